"""convert: moves arrivals from a log or a file into a log or a file.

Owns the conversions. A log made of arrivals takes its engine from another log (`like`) and has no steps; what-if and
the simulator continue from there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from vnext.base.spelling import reason
from vnext.log import codec
from vnext.log.codec import Frame
from vnext.replay.answers.arrivals import (
    NS_PER_MS,
    TOKENS_MAX,
    VOCABULARY,
    YEARS_NS,
    Format,
    from_jsonl,
    from_mooncake,
    lines_of,
    spelled,
    to_jsonl,
    to_mooncake,
)
from vnext.replay.answers.spans import from_otlp, from_sglang, is_sglang
from vnext.replay.reading.folding import IMPOSSIBLE, Broken, Folded, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.replay.reading.writer import Writer, snapshot_of_log
from vnext.state.events import RequestArrived, RequestId, RequestResumed, generated_by, pack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

PICKLE = re.compile(rb"\x80[\2-\5]")
PICKLED = (
    "{} holds pickles, as SGLang's dumps of requests are, and to read one may run a stranger's code: convert SGLang's log of "
    "--log-requests --log-requests-format json, or write the requests as JSONL where you trust them"
)


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What was read and written: formats are "log" and those of arrivals."""

    requests: int
    source: str
    target: str
    out: str


def convert(source: Path, out: Path, format_: Format | None, like: Path | None) -> Converted:
    """Write the arrivals of `source` to `out`: a file in a format, or a log with the engine of the log `like`."""
    if (format_ is None) == (like is None):
        raise UnusableLog("name what is wanted: --to jsonl, mooncake or vllm-vcr, or --like LOG for a log")
    model = open_log(like) if like else None
    log, arrivals = arrivals_in(source, model)
    read, engine = "log" if log else format_of(source), model or log
    began_ns = engine.header.started.started_ns if engine else 0
    if model is not None:
        count = _write_log(arrivals, out, model)
    elif format_ == "vllm-vcr":
        if log is None:
            raise UnusableLog(f"{source} tells no request's first token, which a vllm-vcr trace has: convert a log to it")
        count = _write_lines(to_vcr(log), out) - 1
    else:
        answers = answers_of(log) if log and format_ == "mooncake" else {}
        lines = to_jsonl(arrivals) if format_ == "jsonl" else to_mooncake(arrivals, answers, began_ns)
        count = _write_lines(lines, out)
    return Converted(requests=count, source=read, target=format_ or "log", out=str(out))


def arrivals_in(source: Path, like: Log | None = None) -> tuple[Log | None, Iterator[RequestArrived]]:
    """A log and its requests, or those of a file in any format, which come to an engine like this one. Raises UnusableLog."""
    if source.is_dir() and not [*source.glob(f"*{codec.SEGMENT_SUFFIX}")] and [*source.glob("*.pkl")]:
        raise UnusableLog(PICKLED.format(source))
    if source.is_dir() or source.suffix == codec.SEGMENT_SUFFIX:
        log = open_log(source)
        return log, arrivals_of(log)
    return None, _from_file(source, format_of(source), like.header.started.started_ns if like else 0)


def format_of(path: Path) -> str:
    """The format of a file of arrivals, by its first line. Raises UnusableLog if the file has none."""
    first = next(lines_of(path), b"")
    if PICKLE.match(first) or path.suffix in (".pkl", ".pickle"):
        raise UnusableLog(PICKLED.format(path))
    if first.strip() == b"{":  # over several lines
        first = b"".join(lines_of(path))
    try:
        fields = msgspec.json.decode(first, type=dict[str, object]).keys()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if is_sglang(lines_of(path)):
            return "sglang"
        raise UnusableLog(f"{path} is neither a log nor a file of requests ({error})") from error
    if fields & {"input_lens", "request_throughput"}:
        raise UnusableLog(f"{path} is a benchmark's result, which tells no request's time: convert the server's log of requests")
    return next((form for form, marks in MARKS.items() if fields & marks), "jsonl")


def _from_file(path: Path, format_: str, began_ns: int) -> Iterator[RequestArrived]:
    lines = lines_of(path)
    return from_jsonl(lines) if format_ == "jsonl" else READERS[format_](lines, began_ns)


def arrivals_of(log: Log) -> Iterator[RequestArrived]:
    """The requests of a log, in order, without folding it."""
    for item in log.items():
        if isinstance(item, Frame):
            yield from (event for event in item.events if isinstance(event, RequestArrived))


def answers_of(log: Log) -> dict[int, int]:
    """Tokens sampled for each request that ended in the log; at least 1, as a trace requires."""
    counts: Counter[int] = Counter()
    ended: dict[int, int] = {}
    for item in fold(log):
        if isinstance(item, Broken):
            break
        if isinstance(item, Folded):
            if isinstance(item.event, RequestResumed):
                counts[item.event.id] = len(item.event.generated) // 4
            for output in outputs(item.before, item.event, item.after):
                counts[output.id] += output.token >= 0
                if output.finish:
                    ended[output.id] = max(1, counts.pop(output.id))
    return ended


def _write_lines(lines: Iterable[bytes], out: Path) -> int:
    count = 0
    try:
        with out.open("xb") as file:
            for count, line in enumerate(lines, start=1):  # noqa: B007  used below
                file.write(line + b"\n")
    except FileExistsError as error:
        raise UnusableLog(f"{out} is there already: name a new file") from error
    except OSError as error:
        raise UnusableLog(f"{out} cannot be written ({reason(error)})") from error
    return count


def _write_log(arrivals: Iterable[RequestArrived], out: Path, model: Log) -> int:
    """Write a log with the engine of another one: one frame for each request. Texts stay as the arrivals have them."""
    started = model.header.started
    header = msgspec.structs.replace(
        codec.first_header(started, "full", model.header.code_version),
        token_width=codec.width_bytes(codec.token_bound(started.config, "full")),
    )
    state, count = start(started), 0
    writer = Writer(out, header, lambda each: snapshot_of_log(each, "full"))
    for event in arrivals:
        event = msgspec.structs.replace(event, id=state.next_id)
        try:
            after = reduce(state, event)
        except IMPOSSIBLE as error:
            raise UnusableLog(f"request {count} cannot be served by that engine: {error}") from error
        writer.ready(state)
        writer.write(codec.encode_body(state.sequence, (event,), (), 0, header.token_width), after)
        state, count = after, count + 1
    writer.close()
    return count


# ---- vllm-vcr ------------------------------------------------------------------------------------------------------
# Arrivals in the format of vllm-vcr: one completed request per line, with the latencies that its client saw.
# Owns the `vllm-vcr` format: lengths, arrivals, the answers' times in ms, and a chain of hashes, one for each full block of the
# prompt; the hashes of two prompts agree as far as the prompts do. It has no texts. A line `{"meta": {...}}` comes first. Every
# line needs a time to the first token, so only a log with computed steps can be written in this format. Reading makes up
# tokens, as for Mooncake's format.

BLOCK_SIZE = 16
"""Tokens per hash in the files that this module writes."""
BLOCK_SIZE_MIN = 5
"""Made-up tokens of a shorter block could not distinguish all hashes."""
TAILS = 2**41
"""Numbers of blocks that are not full begin here; those of hashes are below."""


class Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of the first line; reading ignores other fields."""

    model: str = ""
    tp: int = 1
    max_num_seqs: int | None = None
    source: str = ""
    block_size: int | None = None


class MetaLine(msgspec.Struct, frozen=True, kw_only=True):
    meta: Meta


class VcrLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request; reading ignores other fields. `itl_ms` are the times between its tokens. Times that a log does not
    have are null."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    cached_tokens: int = 0
    itl_ms: list[float | None] | None = None
    concurrency: int = 1
    arrival_ms: float | None = None
    block_hashes: list[int] | None = None
    finish_reason: str | None = None


_meta_decoder, _line_decoder = msgspec.json.Decoder(MetaLine), msgspec.json.Decoder(VcrLine)


# ---- out of a log ------------------------------------------------------------------------------------------------


class _Life(msgspec.Struct):
    """A request so far; times in us of the log's clock."""

    arrival: RequestArrived
    arrived_us: float | None
    cached: int = -1
    concurrency: int = 1
    reported_us: list[float | None] = msgspec.field(default_factory=list)


def to_vcr(log: Log) -> Iterator[bytes]:
    """The meta line, then a line for each request that ended with at least one token, in order of their ends."""
    started = log.header.started
    meta = Meta(
        model=started.model, tp=started.world_size, max_num_seqs=started.config.max_num_seqs, source="vnext",
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    yield msgspec.json.encode(MetaLine(meta=meta))
    clock, living = Clock(timestamps_of(log)), dict[int, _Life]()
    for item in fold(log):
        if isinstance(item, Folded):
            yield from _ended(item, clock.known_us(item.frame_end, item.before.committed), living, started.started_ns)


def _ended(item: Folded, now_us: float | None, living: dict[int, _Life], began_ns: int) -> Iterator[bytes]:
    """Note what an event says about requests, and yield the lines of requests that it ended."""
    event = item.event
    if isinstance(event, RequestArrived):
        living[event.id] = _Life(event, now_us)
    elif (plan := item.plan) is not None and plan.admitted:
        scheduled = item.after.in_flight[-1]
        for id_, first in zip(scheduled.ids.tolist(), scheduled.starts.tolist()):
            if id_ in living and living[id_].cached < 0:
                living[id_].cached, living[id_].concurrency = first, len(scheduled.ids)
    for reported in outputs(item.before, event, item.after):
        if (life := living.get(reported.id)) is None:
            continue
        if reported.token >= 0:
            life.reported_us.append(now_us)
        if reported.finish:
            if life.reported_us:
                yield msgspec.json.encode(_line(life, reported.finish, began_ns))
            del living[reported.id]


def _line(life: _Life, finish: str, began_ns: int) -> VcrLine:
    arrival, reported, brought = life.arrival, life.reported_us, len(generated_by(life.arrival)) // 4
    return VcrLine(
        prompt_tokens=len(arrival.prompt) // 4, output_tokens=brought + len(reported),
        ttft_ms=None if brought else _ms(life.arrived_us, reported[0]),
        cached_tokens=max(life.cached, 0), itl_ms=[_ms(*pair) for pair in zip(reported, reported[1:])] or None,
        concurrency=life.concurrency, arrival_ms=(arrival.arrival_ns - began_ns) / NS_PER_MS,
        block_hashes=hashes(arrival.prompt, arrival.cache_salt) or None, finish_reason=finish,
    )  # fmt: skip


def _ms(begin_us: float | None, end_us: float | None) -> float | None:
    return None if begin_us is None or end_us is None else round((end_us - begin_us) / 1000, 3)


def hashes(prompt: bytes, salt: str, block_size: int = BLOCK_SIZE) -> list[int]:
    """One hash for each full block of a prompt (int32 tokens), which also covers all blocks before it."""
    chain, width = xxhash.xxh3_64_intdigest(salt.encode()), 4 * block_size
    found = []
    for at in range(0, len(prompt) // width * width, width):
        chain = xxhash.xxh3_64_intdigest(prompt[at : at + width], seed=chain)
        found.append(chain)
    return found


# ---- into arrivals -----------------------------------------------------------------------------------------------


def from_vcr(lines: Iterable[bytes], began_ns: int, vocabulary: int = VOCABULARY) -> Iterator[RequestArrived]:
    """The requests of such lines in order of arrival, with made-up tokens below `vocabulary`; each answer has its
    recorded length.

    UnusableLog names the invalid line.
    """
    block_size, reported = 0, []
    for number, line in enumerate(lines):
        try:
            if number == 0 and b'"meta"' in line:
                block_size = _block_size(_meta_decoder.decode(line).meta)
            else:
                reported.append(_require_sane(_line_decoder.decode(line), block_size))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UnusableLog(f"line {number + 1} is no request of a vllm-vcr trace ({error})") from error
    numbers: dict[int, int] = {}
    for number, request in enumerate(sorted(reported, key=_arrival_ms)):
        yield RequestArrived(
            id=RequestId(number), name=f"request-{number}",
            prompt=pack_tokens(_tokens(request, number, block_size, numbers, vocabulary)),
            sampling=Sampling(seed=number, max_tokens=request.output_tokens, ignore_eos=True), priority=0,
            arrival_ns=began_ns + round(_arrival_ms(request) * NS_PER_MS),
        )  # fmt: skip


def _arrival_ms(request: VcrLine) -> float:
    assert request.arrival_ms is not None, "a line without is not sane"
    return request.arrival_ms


def _block_size(meta: Meta) -> int:
    size = meta.block_size or 0
    if size and not BLOCK_SIZE_MIN <= size <= TOKENS_MAX:
        raise ValueError(f"block_size is {size}: {BLOCK_SIZE_MIN} or more are needed")
    return size


def _require_sane(reported: VcrLine, block_size: int) -> VcrLine:
    if reported.arrival_ms is None:
        raise ValueError("it has no arrival_ms: this trace does not tell when requests came")
    if not 0 < reported.prompt_tokens <= TOKENS_MAX or not 0 < reported.output_tokens <= TOKENS_MAX:
        raise ValueError(f"prompt_tokens is {reported.prompt_tokens} and output_tokens {reported.output_tokens}")
    if not abs(reported.arrival_ms) * NS_PER_MS < YEARS_NS:
        raise ValueError(f"arrival_ms is {reported.arrival_ms}")
    if reported.block_hashes and (not block_size or len(reported.block_hashes) != reported.prompt_tokens // block_size):
        raise ValueError(
            f"{len(reported.block_hashes)} block_hashes for {reported.prompt_tokens} tokens in blocks of {block_size}"
        )
    return reported


def _tokens(reported: VcrLine, number: int, block_size: int, numbers: dict[int, int], vocabulary: int) -> np.ndarray:
    """A prompt (int64) that shares with other prompts exactly what its hashes share."""
    known = [numbers.setdefault(each, len(numbers)) for each in reported.block_hashes or ()]
    full = [spelled(each, block_size, vocabulary) for each in known]
    rest = reported.prompt_tokens - len(full) * block_size
    return np.concatenate([*full, spelled(TAILS + number, rest, vocabulary)]) if rest else np.concatenate(full)


# ---- formats -----------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Iterable[bytes], int], Iterator[RequestArrived]]] = {
    "mooncake": from_mooncake, "vllm-vcr": from_vcr, "otlp": from_otlp, "sglang": from_sglang,
}  # fmt: skip
"""Of the formats whose times count from the beginning of a run."""
MARKS = {"mooncake": {"hash_ids"}, "vllm-vcr": {"meta", "prompt_tokens"}, "otlp": {"resourceSpans"}, "sglang": {"rid", "event"}}
"""Members of a format's first line, any of which tells it."""
