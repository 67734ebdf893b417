"""Measurements of a running server, as its clients see it: streams over HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from vnext.commands.bench.client_watch import LoopWatch
from vnext.commands.bench.figures import server_figures
from vnext.commands.bench.load.answers import Models, RequestFailed
from vnext.commands.bench.load.client import Client
from vnext.commands.bench.load.generator import Pace, Request, Timeline, at_once, poisson, send_until_cut
from vnext.commands.bench.report import Cut, Wrong, progress
from vnext.commands.bench.workload import Workload


class ServerUnusable(Exception):
    """There is nothing to measure: one sentence with the URL and the remedy."""


class MeasurementFailed(Exception):
    """The measurement began, but every request failed: one sentence with the first reason."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How the workload is sent: at `rate` requests a second, 0 for all at once, and at most `concurrency` at a time, 0 for no
    bound. A bounded load without a rate is a closed loop."""

    url: str
    api_key: str = ""
    concurrency: int = 0
    rate: float = 0.0

    def pace(self, count: int, seed: int) -> Pace:
        """Of so many requests."""
        times_s = poisson(count, self.rate, seed) if self.rate else at_once(count)
        return Pace(times_s=times_s, concurrency=self.concurrency, is_closed=self.concurrency > 0 and not self.rate)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`failure` is the first reason, "" where no request failed; `wrong` says that most of them did, or that Ctrl-C cut them."""

    figures: dict[str, float]
    failure: str
    wrong: Wrong


def wrong_in(timelines: Sequence[Timeline], count: int, url: str) -> Wrong:
    """Of `count` requests that were to be sent. Raises MeasurementFailed when none of them was answered."""
    failed = [each.error for each in timelines if each.error]
    words = f"{url} failed, the first with: {failed[0]}" if failed else ""
    if len(failed) == len(timelines):
        raise MeasurementFailed(f"{'All' if len(failed) == count else 'The first'} {len(failed)} requests to {words}")
    if len(timelines) < count:
        return Cut(is_cut=True).wrong(len(timelines), count, "requests")
    if 2 * len(failed) > count:
        return Wrong(f"{len(failed)} of {count} requests to {words}; the figures are of the others")
    return Wrong()


async def measure_server(load: Load, workload: Workload, batch: Sequence[list[int]]) -> Measured:
    """Send the batch and measure. Raises ServerUnusable when the server cannot be reached, MeasurementFailed when every
    request failed."""
    async with Client(load.url, load.api_key) as client:
        model = await model_of(client)
        requests = [Request(body=body_of(model, workload, prompt), input_tokens=len(prompt)) for prompt in batch]
        with progress("requests", total=len(batch)) as bar:
            watch, begin_s = LoopWatch(), time.perf_counter()
            pace = load.pace(len(batch), workload.seed)
            timelines = await send_until_cut(client, requests, pace, begin_s, bar.update)
            elapsed_s, seen = time.perf_counter() - begin_s, watch.stop()
    wrong, failure = wrong_in(timelines, len(batch), load.url), next((each.error for each in timelines if each.error), "")
    return Measured(figures=server_figures(timelines, elapsed_s, load.rate, begin_s) | seen, failure=failure, wrong=wrong)


async def model_of(client: Client) -> str:
    """The name of the first model that the server lists. Raises ServerUnusable."""
    try:
        return (await client.ask("/v1/models", None, Models)).first.id
    except RequestFailed as error:
        if error.status:
            raise ServerUnusable(f"{client.url} does not say what it serves: {error}") from error
        remedy = "is this its address?" if error.kind == "broken" else "is it running?"
        raise ServerUnusable(f"{client.url} does not answer as an OpenAI server does ({error}): {remedy}") from error


def body_of(model: str, workload: Workload, prompt: list[int]) -> bytes:
    """The body of one request, made before the clock starts."""
    return msgspec.json.encode(
        {
            "model": model, "prompt": prompt, "max_tokens": workload.output_length, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )  # fmt: skip
