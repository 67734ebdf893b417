"""Measurements of a running server, as its clients see it: streams over HTTP.

Owns when requests are sent: at most `concurrency` at once, and at `rate` a second on average where that is given (a
Poisson process from the seed). A request that fails is counted, never repeated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp
import msgspec
from tqdm import tqdm

from vnext.bench.figures import Timeline, server_figures
from vnext.bench.workload import Workload

DATA_PREFIX = b"data:"
LAST_DATA = b"[DONE]"
STREAM_LINE_BYTES_MAX = 2**20


class ServerUnusable(Exception):
    """There is nothing to measure: one sentence with the URL and the remedy."""


class MeasurementFailed(Exception):
    """It began, and no request was answered: one sentence with the first reason."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How the workload is sent. `rate` is in requests a second, 0 for all as soon as `concurrency` lets them."""

    url: str
    api_key: str = ""
    concurrency: int = 32
    rate: float = 0.0


async def measure_server(load: Load, workload: Workload, batch: Sequence[list[int]]) -> dict[str, float]:
    """Send the batch and measure. Raises ServerUnusable when the server cannot be reached, MeasurementFailed when every
    request failed."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=timeout, read_bufsize=STREAM_LINE_BYTES_MAX
    ) as session:
        model = await first_model(session, load.url)
        begin_s = time.perf_counter()
        timelines = await send_all(session, load, workload, batch, model)
        elapsed_s = time.perf_counter() - begin_s
    if all(timeline.error for timeline in timelines):
        why = timelines[0].error
        raise MeasurementFailed(f"All {len(timelines)} requests to {load.url} failed, the first with: {why}")
    return server_figures(timelines, elapsed_s)


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name of the model that is served. Raises ServerUnusable."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            if said := await refusal(response):
                raise ServerUnusable(f"{url} does not say what it serves: {said}")
            return msgspec.json.decode(await response.read())["data"][0]["id"]
    except (aiohttp.ClientError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ServerUnusable(f"{url} does not answer as an OpenAI server does ({error}): is it running?") from error


async def send_all(
    session: aiohttp.ClientSession, load: Load, workload: Workload, batch: Sequence[list[int]], model: str
) -> list[Timeline]:
    """All requests, each in its turn; a terminal shows how many are done."""
    gate = asyncio.Semaphore(load.concurrency)
    chance = random.Random(workload.seed)
    sending = []
    with tqdm(total=len(batch), desc="requests", disable=None, leave=False, dynamic_ncols=True) as bar:
        for prompt in batch:
            sending.append(asyncio.create_task(send_one(session, gate, load, workload, prompt, model)))
            sending[-1].add_done_callback(lambda _: bar.update())
            if load.rate:
                await asyncio.sleep(chance.expovariate(load.rate))
        return await asyncio.gather(*sending)


async def send_one(
    session: aiohttp.ClientSession,
    gate: asyncio.Semaphore,
    load: Load,
    workload: Workload,
    prompt: list[int],
    model: str,
) -> Timeline:
    """One request's timeline; waiting for the gate is not part of it."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": workload.output_length, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    pieces_s: list[float] = []
    usage: dict[str, int] = {}
    error = ""
    async with gate:
        sent_s = time.perf_counter()
        try:
            async with session.post(f"{load.url}/v1/completions", json=body) as response:
                error = await refusal(response)
                async for line in response.content:
                    if (chunk := chunk_of(line)) is None:
                        continue
                    if chunk.get("choices"):
                        pieces_s.append(time.perf_counter())
                    usage = chunk.get("usage") or usage
                    error = error or str(chunk.get("error", ""))
        except (aiohttp.ClientError, msgspec.DecodeError) as failure:
            error = str(failure) or type(failure).__name__
    return Timeline(
        sent_s=sent_s,
        pieces_s=tuple(pieces_s),
        input_tokens=len(prompt),
        output_tokens=usage.get("completion_tokens", len(pieces_s)),
        error=error,
    )


async def refusal(response: aiohttp.ClientResponse) -> str:
    """What the server said against the request, "" where it took it."""
    return "" if response.ok else f"HTTP status {response.status}: {(await response.text())[:500]}"


def chunk_of(line: bytes) -> dict | None:
    """The object in one line of a stream, None in lines without one."""
    data = line[len(DATA_PREFIX) :].strip() if line.startswith(DATA_PREFIX) else b""
    return msgspec.json.decode(data) if data and data != LAST_DATA else None
