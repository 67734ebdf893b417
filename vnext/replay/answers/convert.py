"""convert: moves arrivals from a log or a file into a log or a file.

Owns the conversions. A log made of arrivals takes its engine from another log (`like`) and has no steps; what-if and
the simulator continue from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from vnext.log import codec, token_width
from vnext.log.codec import Frame
from vnext.replay.answers.arrivals import Format, format_of, from_jsonl, from_mooncake, lines_of, to_jsonl, to_mooncake
from vnext.replay.answers.arrivals_vcr import from_vcr, to_vcr
from vnext.replay.reading.folding import IMPOSSIBLE, Broken, Folded, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.writer import Writer, snapshot_of_log
from vnext.state.events import RequestArrived, RequestResumed
from vnext.state.outputs import outputs
from vnext.state.reduce import reduce, start


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What was read and written: formats are "log", "jsonl", "mooncake" or "vllm-vcr"."""

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
    read, model = "log" if log else format_of(source), model or log
    began_ns = model.header.started.started_ns if model else 0
    if like is not None:
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
    if source.is_dir() or source.suffix == codec.SEGMENT_SUFFIX:
        log = open_log(source)
        return log, arrivals_of(log)
    return None, _from_file(source, format_of(source), like.header.started.started_ns if like else 0)


def _from_file(path: Path, format_: str, began_ns: int) -> Iterator[RequestArrived]:
    if format_ == "jsonl":
        return from_jsonl(lines_of(path))
    return (from_vcr if format_ == "vllm-vcr" else from_mooncake)(lines_of(path), began_ns)


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
        raise UnusableLog(f"{out} cannot be written: {error}") from error
    return count


def _write_log(arrivals: Iterable[RequestArrived], out: Path, model: Log) -> int:
    """Write a log with the engine of another one: one frame for each request. Texts stay as the arrivals have them."""
    started = model.header.started
    header = msgspec.structs.replace(
        codec.first_header(started, "full", model.header.code_version),
        token_width=token_width.width_bytes(codec.token_bound(started.config, "full")),
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
