"""Arrivals as vllm-vcr has them: one completed request a line, with what its client felt.

Owns the `vllm-vcr` form: lengths, arrivals and answers' times in ms, and a chain of hashes, one for each full block of the
prompt, which agree as far as two prompts do. No texts. A line `{"meta": {...}}` comes first. Only a log that was computed
can be written so, because every line has a time to its first token; reading makes up tokens, as for Mooncake's form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import xxhash

from vnext.replay.arrivals import NS_PER_MS, VOCABULARY, spelled
from vnext.replay.folding import Folded, fold
from vnext.replay.source import Log, UnusableLog
from vnext.replay.times import Clock, stamps_of
from vnext.state.events import RequestArrived, StepPlanned, pack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling

BLOCK_SIZE = 16
"""Tokens behind a hash in what is written here."""
BLOCK_SIZE_MIN = 5
"""Made-up tokens of a shorter block would not tell all hashes apart."""
TOKENS_MAX = 2**22
"""Of a prompt or an answer: a number in a file is no reason to reserve memory."""
ARRIVAL_MS_MAX = 1e11
"""Three years."""
TAILS = 2**41
"""Numbers of blocks that are not full begin here; those of hashes are below."""


class Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the first line tells; fields that are not named here are left out."""

    model: str = ""
    tp: int = 1
    max_num_seqs: int | None = None
    source: str = ""
    block_size: int | None = None


class MetaLine(msgspec.Struct, frozen=True, kw_only=True):
    meta: Meta


class VcrLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request; fields that are not named here are left out. `itl_ms` are the times between its tokens."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    cached_tokens: int = 0
    itl_ms: list[float] | None = None
    concurrency: int = 1
    arrival_ms: float | None = None
    block_hashes: list[int] | None = None
    finish_reason: str | None = None


_meta_decoder, _line_decoder = msgspec.json.Decoder(MetaLine), msgspec.json.Decoder(VcrLine)


# ---- out of a log ------------------------------------------------------------------------------------------------


class _Life(msgspec.Struct):
    """A request as far as it has come; times in us of the log's clock."""

    arrival: RequestArrived
    arrived_us: float
    cached: int = -1
    concurrency: int = 1
    told_us: list[float] = msgspec.field(default_factory=list)


def to_vcr(log: Log) -> Iterator[bytes]:
    """The meta line, then a line for each request that has ended with a token or more, in order of their ends."""
    started = log.header.started
    meta = Meta(
        model=started.model, tp=started.world_size, max_num_seqs=started.config.running_max, source="vnext",
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    yield msgspec.json.encode(MetaLine(meta=meta))
    clock, living = Clock(stamps_of(log)), {}
    for item in fold(log):
        if isinstance(item, Folded):
            yield from _ended(item, clock.of(item.number, item.before.committed), living, started.started_ns)


def _ended(item: Folded, now_us: float, living: dict[int, _Life], began_ns: int) -> Iterator[bytes]:
    """What an event tells of requests, taken down; the lines of those that it has ended."""
    event = item.event
    if isinstance(event, RequestArrived):
        living[event.id] = _Life(event, now_us)
    elif isinstance(event, StepPlanned) and event.admitted:
        flight = item.after.flights[-1]
        for id_, first in zip(flight.ids.tolist(), flight.starts.tolist()):
            if id_ in living and living[id_].cached < 0:
                living[id_].cached, living[id_].concurrency = first, len(flight.ids)
    for told in outputs(item.before, event, item.after):
        if (life := living.get(told.id)) is None:
            continue
        if told.token >= 0:
            life.told_us.append(now_us)
        if told.finish:
            if life.told_us:
                yield msgspec.json.encode(_line(life, told.finish, began_ns))
            del living[told.id]


def _line(life: _Life, finish: str, began_ns: int) -> VcrLine:
    arrival, told = life.arrival, life.told_us
    return VcrLine(
        prompt_tokens=len(arrival.prompt) // 4, output_tokens=len(told), ttft_ms=_ms(told[0] - life.arrived_us),
        cached_tokens=max(life.cached, 0), itl_ms=[_ms(after - before) for before, after in zip(told, told[1:])] or None,
        concurrency=life.concurrency, arrival_ms=(arrival.arrival_ns - began_ns) / NS_PER_MS,
        block_hashes=hashes(arrival.prompt, arrival.cache_salt) or None, finish_reason=finish,
    )  # fmt: skip


def _ms(us: float) -> float:
    return round(us / 1000, 3)


def hashes(prompt: bytes, salt: str, block_size: int = BLOCK_SIZE) -> list[int]:
    """A number for each full block of a prompt (int32 tokens) and all before it."""
    chain, width = xxhash.xxh3_64_intdigest(salt.encode()), 4 * block_size
    found = []
    for at in range(0, len(prompt) // width * width, width):
        chain = xxhash.xxh3_64_intdigest(prompt[at : at + width], seed=chain)
        found.append(chain)
    return found


# ---- into arrivals -----------------------------------------------------------------------------------------------


def from_vcr(lines: Iterable[bytes], began_ns: int, vocabulary: int = VOCABULARY) -> Iterator[RequestArrived]:
    """The requests of such lines in order of arrival, with made-up tokens below `vocabulary`; each answer as long as it was.

    UnusableLog names the line that is wrong.
    """
    block_size, told = 0, []
    for number, line in enumerate(lines):
        try:
            if number == 0 and b'"meta"' in line:
                block_size = _block_size(_meta_decoder.decode(line).meta)
            else:
                told.append(_require_sane(_line_decoder.decode(line), block_size))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UnusableLog(f"line {number + 1} is no request of a vllm-vcr trace ({error})") from error
    numbers: dict[int, int] = {}
    for number, request in enumerate(sorted(told, key=lambda each: each.arrival_ms)):
        yield RequestArrived(
            id=number, name=f"request-{number}", prompt=pack_tokens(_tokens(request, number, block_size, numbers, vocabulary)),
            sampling=Sampling(seed=number, max_tokens=request.output_tokens, ignore_eos=True), priority=0,
            arrival_ns=began_ns + round(request.arrival_ms * NS_PER_MS),
        )  # fmt: skip


def _block_size(meta: Meta) -> int:
    size = meta.block_size or 0
    if size and not BLOCK_SIZE_MIN <= size <= TOKENS_MAX:
        raise ValueError(f"block_size is {size}: {BLOCK_SIZE_MIN} or more are needed")
    return size


def _require_sane(told: VcrLine, block_size: int) -> VcrLine:
    if told.arrival_ms is None:
        raise ValueError("it has no arrival_ms: this trace does not tell when requests came")
    if not 0 < told.prompt_tokens <= TOKENS_MAX or not 0 < told.output_tokens <= TOKENS_MAX:
        raise ValueError(f"prompt_tokens is {told.prompt_tokens} and output_tokens {told.output_tokens}")
    if not abs(told.arrival_ms) < ARRIVAL_MS_MAX:
        raise ValueError(f"arrival_ms is {told.arrival_ms}")
    if told.block_hashes and (not block_size or len(told.block_hashes) != told.prompt_tokens // block_size):
        raise ValueError(f"{len(told.block_hashes)} block_hashes for {told.prompt_tokens} tokens in blocks of {block_size}")
    return told


def _tokens(told: VcrLine, number: int, block_size: int, numbers: dict[int, int], vocabulary: int) -> np.ndarray:
    """A prompt (int64) that shares with others what its hashes share, and nothing behind them."""
    known = [numbers.setdefault(each, len(numbers)) for each in told.block_hashes or ()]
    full = [spelled(each, block_size, vocabulary) for each in known]
    rest = told.prompt_tokens - len(full) * block_size
    return np.concatenate([*full, spelled(TAILS + number, rest, vocabulary)]) if rest else np.concatenate(full)
