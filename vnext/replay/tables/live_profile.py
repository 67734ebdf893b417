"""A live profile: the calls of kernels that a running engine noted (POST /start_profile, /stop_profile), within its log's timeline.

Owns the file of the calls as ranks give them, and which part of the log they belong to. The kernels' clock is that of the log's
times, so each call is drawn in the step that it served.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from vnext.log.reading import BAD_FORM
from vnext.replay.answers.trace import trace
from vnext.replay.causes.part import steps_between
from vnext.replay.console.commands import index_of, writing
from vnext.replay.console.render import counted, facts
from vnext.replay.reading.source import UnusableLog
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.window import planned_by
from vnext.replay.rerun.calls import Part, add_parts, calls_in, parts_of
from vnext.replay.tables.profile import AGAIN, OperationTime, call_slice, operations_of, print_operations, process_line


class RankCalls(msgspec.Struct, frozen=True):
    """What one rank noted: `calls`, the bytes of CALL[n], and how many more there were."""

    calls: bytes
    left_out: int = 0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A profile of steps that an engine served: `steps` from `first_step` on, which was in flight, `calls` of kernels on `ranks`.
    An operation's `share` is of the kernels' time. `left_out` calls had no room."""

    timeline: str
    first_step: int
    steps: int
    ranks: int
    calls: int
    total_ms: float
    operations: list[OperationTime]
    left_out: int


_calls_decoder = msgspec.json.Decoder(list[RankCalls])


def served(path: Path, calls_file: Path, out: Path) -> Served:
    """Draw the calls in a file into the timeline of the log's steps around them. Raises UnusableLog."""
    try:
        ranks = _calls_decoder.decode(calls_file.read_bytes())
        calls = [calls_in(each.calls) for each in ranks]
    except (OSError, *BAD_FORM) as error:
        raise UnusableLog(f"{calls_file} has no calls of kernels: {error}") from error
    index = index_of(path)
    timestamps = timestamps_of(index.log)
    every = np.concatenate([calls_in(b""), *calls])
    if timestamps is None or not len(every):
        raise UnusableLog("no step was computed while the profile ran" if timestamps is not None else f"{path} has no times")
    begins, ends = every["began_ns"].min() / 1e3, every["ended_ns"].max() / 1e3
    depth = index.first.config.pipeline_depth
    first, end = max(0, planned_by(index, timestamps, begins) - depth), planned_by(index, timestamps, ends)
    with steps_between(index, first - depth, end + depth) as part, writing(out), out.open("w") as file:
        found = timestamps_of(part)
        first_us = found.times_ns[0] / 1e3 if found is not None else 0.0
        trace(part, file, str(out), more=[line for rank, each in enumerate(calls) for line in _lines(rank, each, first_us)])
    parts = dict[str, Part]()
    for each in calls:
        add_parts(parts, parts_of(each))
    total_ms = sum(part.ns for part in parts.values()) / 1e6
    return Served(
        timeline=str(out), first_step=first, steps=max(end - first, 1), ranks=len(calls), calls=len(every),
        total_ms=total_ms, operations=operations_of(parts, total_ms), left_out=sum(each.left_out for each in ranks),
    )  # fmt: skip


def _lines(rank: int, calls: np.ndarray, first_us: float) -> list[str]:
    """Trace events of a rank's calls."""
    pid = AGAIN + rank
    drawn = (call_slice(call, call["began_ns"] / 1e3 - first_us, pid) for call in calls)
    return [process_line(f"kernels of rank {rank}", pid), *drawn]


def print_served(console: Console, answer: Served) -> None:
    facts(console, "as it was served", [
        ("steps", f"{answer.steps:,} from step {answer.first_step} on"),
        ("calls", f"{answer.calls:,} on {counted(answer.ranks, 'rank')}, {answer.total_ms:,.1f} ms"),
        *([("left out", counted(answer.left_out, "call"))] if answer.left_out else []),
    ])  # fmt: skip
    print_operations(console, answer.operations)
    console.print(f"written: {answer.timeline}", soft_wrap=True)
