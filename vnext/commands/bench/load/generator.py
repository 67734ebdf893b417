"""The load generator: sends requests when they are due and notes the times of each chunk of their answers.

A request that fails is counted by its kind and never repeated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate

import msgspec

from vnext.commands.bench.load.answers import RequestFailed, refused
from vnext.commands.bench.load.client import COMPLETIONS, Client
from vnext.commands.bench.load.events import Piece, Stream


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A body of JSON and its path; `input_tokens` of its prompt, as far as they are known. One that `follows` is due `delay_s`
    after the answer to the request before it, as an agent's next turn. Answers are streams, or come whole."""

    body: bytes = b""
    path: str = COMPLETIONS
    input_tokens: int = 0
    follows: bool = False
    delay_s: float = 0.0
    is_whole: bool = False


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """When requests are due, in seconds after the start, and how many there are at a time, 0 for no bound. Those that follow others
    have no time of their own, and all of an agent's take one place.

    A closed loop is so many clients, each of which sends its next request after an answer: a request is due when there is room.
    """

    times_s: Sequence[float]
    concurrency: int = 0
    is_closed: bool = False


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a server: when it was due, when it was sent, and the reads of its stream (seconds of one clock). `kind` is
    that of its failure (answers.py), "" for none."""

    intended_s: float
    sent_s: float
    pieces: tuple[Piece, ...]
    input_tokens: int
    output_tokens: int
    error: str = ""
    kind: str = ""
    ended_s: float = 0.0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Time from when the request was due to the first token."""
        return self.pieces[0].at_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        """Time from when the request was due to the last token."""
        return self.pieces[-1].at_s - self.intended_s


async def send_all(
    client: Client,
    requests: Sequence[Request],
    pace: Pace,
    begin_s: float,
    ended: Callable[[Timeline], object] = lambda _: None,
) -> list[Timeline]:
    """Send every request when it is due, counted from `begin_s` of time.perf_counter; `ended` gets each that has ended."""
    room: asyncio.Semaphore | nullcontext[None] = asyncio.Semaphore(pace.concurrency) if pace.concurrency else nullcontext()
    sending = []
    for turns, after_s in zip(turns_of(requests), pace.times_s, strict=True):
        if (early_s := begin_s + after_s - time.perf_counter()) > 0:
            await asyncio.sleep(early_s)
        due_s = None if pace.is_closed else begin_s + after_s
        sending.append(asyncio.create_task(_send(client, room, turns, due_s, ended)))
    return [timeline for found in await asyncio.gather(*sending) for timeline in found]


async def send_until_cut(
    client: Client, requests: Sequence[Request], pace: Pace, begin_s: float, ended: Callable[[], object]
) -> list[Timeline]:
    """As `send_all`; where Ctrl-C cuts it off, those that had ended are returned if there are any."""
    found: list[Timeline] = []

    def note(timeline: Timeline) -> None:
        found.append(timeline)
        ended()

    try:
        return await send_all(client, requests, pace, begin_s, note)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not found or task is None:
            raise
        task.uncancel()
        return found


def turns_of(requests: Sequence[Request]) -> list[list[Request]]:
    """Each request with those that follow it."""
    found: list[list[Request]] = []
    for request in requests:
        if request.follows and found:
            found[-1].append(request)
        else:
            found.append([request])
    return found


async def _send(
    client: Client, room: asyncio.Semaphore | nullcontext[None], turns: Sequence[Request], due_s: float | None,
    ended: Callable[[Timeline], object],
) -> list[Timeline]:  # fmt: skip
    """One after another; a turn that fails does not keep the next one back."""
    found: list[Timeline] = []
    async with room:
        for request in turns:
            if found:
                due_s = found[-1].ended_s + request.delay_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            found.append(await send_one(client, request, due_s))
            ended(found[-1])
    return found


async def send_one(client: Client, request: Request, due_s: float | None = None) -> Timeline:
    """Send one request, which was due at `due_s`, None for now; returns its timeline."""
    stream, failed, sent_s = Stream(), None, time.perf_counter()
    try:
        async with client.asking(request.path, request.body) as response:
            if response.status >= 400:
                raise refused(response.status, await response.read())
            if request.is_whole:
                stream.read_whole(await response.read(), time.perf_counter())
            async for data in response.content.iter_any():
                stream.read(data, time.perf_counter())
            failed = stream.failure(response.content_type)
    except RequestFailed as error:
        failed = error
    return Timeline(
        intended_s=sent_s if due_s is None else due_s,
        sent_s=sent_s,
        pieces=stream.pieces(),
        input_tokens=stream.prompt_tokens or request.input_tokens,
        output_tokens=stream.token_count,
        error=str(failed or ""),
        kind=failed.kind if failed else "",
        ended_s=time.perf_counter(),
        text=stream.text,
    )


async def keep_sending(
    client: Client,
    requests: Sequence[Request],
    senders: int,
    seconds: float,
    answered: Callable[[bytes], object] = lambda _: None,
) -> tuple[Counter[str], list[float]]:
    """So many senders of these requests in turn, each as soon as it has its answer, until the time is over; `answered` gets each
    answer. A request without a body is a GET. Returns the number of answers by status, or by kind where there was none, and
    the seconds that each took."""
    found, took_s, end_s = Counter[str](), list[float](), time.perf_counter() + seconds

    async def send() -> None:
        while True:
            for request in requests:
                if (begin_s := time.perf_counter()) >= end_s:
                    return
                try:
                    status, data = await client.answer(request.path, request.body or None)
                    found[str(status)] += 1
                    answered(data)
                except RequestFailed as error:
                    found[error.kind] += 1
                took_s.append(time.perf_counter() - begin_s)

    await asyncio.gather(*(send() for _ in range(senders)))
    return found, took_s


# ---- arrivals ------------------------------------------------------------------------------------------------------
# Arrivals: the seconds after the start at which each request is due. Arithmetic only.
# Latencies count from these times: a client's wait begins when it wants an answer, not when the load generator sends the
# request. So latencies show a server that cannot keep up, which otherwise only slows down the load (coordinated omission).


def at_once(count: int) -> list[float]:
    """All at the start: what a bound on the requests at a time makes of it is a closed loop."""
    return [0.0] * count


def constant(count: int, rate: float) -> list[float]:
    """`rate` requests a second at equal distances."""
    return [(place + 1) / rate for place in range(count)]


def poisson(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Gaps of a gamma distribution with this shape, stretched so that the last request comes after count / rate seconds.

    A burstiness of 1 is a Poisson process; less comes in bursts, more is more even.
    """
    rng = random.Random(seed)
    gaps = (rng.expovariate(1.0) if burstiness == 1 else rng.gammavariate(burstiness, 1 / burstiness) for _ in range(count))
    moments = list(accumulate(gaps))
    return [moment * (count / rate) / moments[-1] for moment in moments]


def ramp(count: int, rates: tuple[float, float], is_exponential: bool, seed: int, burstiness: float = 1.0) -> list[float]:
    """Gaps as of `poisson`, at a rate that goes from the first to the second of `rates` with each request: by equal steps, or by
    equal factors. The last request comes when it would without chance."""
    first, last = rates
    shares = [place / max(count - 1, 1) for place in range(count)]
    meant_s = [1 / (first * (last / first) ** share if is_exponential else first + (last - first) * share) for share in shares]
    moments = [0.0, *poisson(count, 1.0, seed, burstiness)]
    found = list(accumulate((after - before) * gap_s for before, after, gap_s in zip(moments, moments[1:], meant_s)))
    return [moment * sum(meant_s) / found[-1] for moment in found]


def recorded(moments_s: Sequence[float], speed: float = 1.0) -> list[float]:
    """Moments of a record, from its first on, `speed` times as fast."""
    return [(moment - moments_s[0]) / speed for moment in moments_s]
