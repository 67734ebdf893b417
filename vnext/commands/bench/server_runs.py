"""Measurements of a running server, as its clients see it: streams over HTTP.

Owns the times at which requests are due, their sending, and the reading of answers. Each request is sent when it is due or, under
a bound by `concurrency`, as soon as there is room. Latencies count from the due time either way. A request that fails is counted
and never repeated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import aiohttp
import msgspec
from tqdm import tqdm

from vnext.commands.bench.client_watch import LoopWatch
from vnext.commands.bench.figures import Piece, Timeline, server_figures
from vnext.commands.bench.workload import Workload

# ---- when a request is due ---------------------------------------------------------------------------------------
# Schedule: the time at which each request is due. Arithmetic only.
#
# Latencies count from these times: a client's wait begins when it wants an answer, not when the load generator sends the request.
# So latencies show a server that cannot keep up, which otherwise only slows down the load (coordinated omission).


def intended_s(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start, for each of `count` requests: a Poisson process of `rate` a second, stretched so that the last
    request comes after count / rate seconds; all at 0 where `rate` is 0."""
    if not rate:
        return [0.0] * count
    rng = random.Random(seed)
    moments = list(accumulate(rng.expovariate(1.0) for _ in range(count)))
    return [moment * (count / rate) / moments[-1] for moment in moments]


# ---- what a read contains ----------------------------------------------------------------------------------------
# Stream: parses server-sent events as they come from a socket, and counts the tokens of each read.
#
# One read may contain several chunks and one chunk several tokens, so the count comes from the server: in each chunk
# (`continuous_usage_stats`), or at the end, if that equals one token per chunk. Otherwise the times of tokens are unknown.


DATA_PREFIX = b"data:"
LAST_DATA = b"[DONE]"


class _Read(NamedTuple):
    at_s: float
    chunks: int
    total: int | None


class Stream:
    """Takes the bytes of one answer; `pieces`, `token_count` and `error` once it has ended."""

    def __init__(self) -> None:
        self._rest = b""
        self._reads: list[_Read] = []
        self._total: int | None = None
        self.error = ""

    def read(self, data: bytes, at_s: float) -> None:
        """Take in the bytes of one read. Raises msgspec.DecodeError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [chunk for line in lines if (chunk := chunk_of(line)) is not None]
        totals = [usage["completion_tokens"] for chunk in found if (usage := chunk.get("usage"))]
        self._total = max(totals, default=self._total)
        self.error = self.error or next((str(chunk["error"]) for chunk in found if chunk.get("error")), "")
        if chunks := sum(bool(chunk.get("choices")) for chunk in found):
            self._reads.append(_Read(at_s, chunks, max(totals, default=None)))

    @property
    def token_count(self) -> int:
        """Tokens of the answer, or its chunks where the server does not report tokens."""
        return sum(read.chunks for read in self._reads) if self._total is None else self._total

    def pieces(self) -> tuple[Piece, ...]:
        """The reads that brought tokens."""
        counts = self._counts()
        if counts is None:
            return tuple(Piece(read.at_s, None) for read in self._reads)
        return tuple(Piece(read.at_s, count) for read, count in zip(self._reads, counts) if count)

    def _counts(self) -> list[int] | None:
        """Tokens of each read."""
        totals = [read.total for read in self._reads]
        if None not in totals:
            return [total - before for total, before in zip(totals, [0, *totals])]
        chunks = [read.chunks for read in self._reads]
        return chunks if sum(chunks) == self._total else None


def chunk_of(line: bytes) -> dict[str, Any] | None:
    """The object in one line of a stream, None in lines without one."""
    data = line[len(DATA_PREFIX) :].strip() if line.startswith(DATA_PREFIX) else b""
    return msgspec.json.decode(data) if data and data != LAST_DATA else None


ERROR_CHARACTERS_MAX = 500


class ServerUnusable(Exception):
    """There is nothing to measure: one sentence with the URL and the remedy."""


class MeasurementFailed(Exception):
    """The measurement began, but every request failed: one sentence with the first reason."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How the workload is sent: at `rate` requests a second, 0 for all at once, and at most `concurrency` at a time, 0 for no
    bound.

    A bounded load without a rate acts as `concurrency` clients, each of which sends its next request after an answer: its
    requests are due when there is room.
    """

    url: str
    api_key: str = ""
    concurrency: int = 0
    rate: float = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether answers trigger the next requests."""
        return self.concurrency > 0 and not self.rate


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`failure` is the first reason, "" where no request failed."""

    figures: dict[str, float]
    failure: str


async def measure_server(load: Load, workload: Workload, batch: Sequence[list[int]]) -> Measured:
    """Send the batch and measure. Raises ServerUnusable when the server cannot be reached, MeasurementFailed when every
    request failed."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {load.api_key}"} if load.api_key else {})
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        model = await first_model(session, load.url)
        bodies = [body_of(model, workload, prompt) for prompt in batch]
        watch, begin_s = LoopWatch(), time.perf_counter()
        timelines = await send_all(session, load, workload, bodies, begin_s)
        elapsed_s, seen = time.perf_counter() - begin_s, watch.stop()
    failure = next((timeline.error for timeline in timelines if timeline.error), "")
    if all(timeline.error for timeline in timelines):
        raise MeasurementFailed(f"All {len(timelines)} requests to {load.url} failed, the first with: {failure}")
    return Measured(figures=server_figures(timelines, elapsed_s, load.rate, begin_s) | seen, failure=failure)


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name of the first model that the server lists. Raises ServerUnusable."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            if refused := await refusal(response):
                raise ServerUnusable(f"{url} does not say what it serves: {refused}")
            return msgspec.json.decode(await response.read())["data"][0]["id"]
    except (aiohttp.ClientError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ServerUnusable(f"{url} does not answer as an OpenAI server does ({error}): is it running?") from error


def body_of(model: str, workload: Workload, prompt: list[int]) -> bytes:
    """The body of one request, made before the clock starts."""
    return msgspec.json.encode(
        {
            "model": model, "prompt": prompt, "max_tokens": workload.output_length, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )  # fmt: skip


async def send_all(
    session: aiohttp.ClientSession, load: Load, workload: Workload, bodies: Sequence[bytes], begin_s: float
) -> list[Timeline]:
    """Send all requests, each when it is due; a terminal shows the progress."""
    room = asyncio.Semaphore(load.concurrency) if load.concurrency else nullcontext()
    times = [begin_s + after_s for after_s in intended_s(len(bodies), load.rate, workload.seed)]
    sending = []
    with tqdm(total=len(bodies), desc="requests", disable=None, leave=False, dynamic_ncols=True) as bar:
        for body, at_s in zip(bodies, times):
            if (early_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            sending.append(asyncio.create_task(send_one(session, room, load, workload, body, at_s)))
            sending[-1].add_done_callback(lambda _: bar.update())
        return await asyncio.gather(*sending)


async def send_one(
    session: aiohttp.ClientSession,
    room: AbstractAsyncContextManager,
    load: Load,
    workload: Workload,
    body: bytes,
    at_s: float,
) -> Timeline:
    """Send one request, which is due at `at_s`; returns its timeline."""
    stream, error = Stream(), ""
    async with room:
        sent_s = time.perf_counter()
        try:
            async with session.post(f"{load.url}/v1/completions", data=body) as response:
                error = await refusal(response)
                async for data in response.content.iter_any():
                    stream.read(data, time.perf_counter())
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as failure:
            error = str(failure) or type(failure).__name__
    return Timeline(
        intended_s=sent_s if load.is_closed else at_s,
        sent_s=sent_s,
        pieces=stream.pieces(),
        input_tokens=workload.input_length,
        output_tokens=stream.token_count,
        error=error or stream.error,
    )


async def refusal(response: aiohttp.ClientResponse) -> str:
    """The server's error message, "" where it accepted the request."""
    return "" if response.ok else f"HTTP status {response.status}: {(await response.text())[:ERROR_CHARACTERS_MAX]}"
