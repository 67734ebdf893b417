"""profile: runs recorded steps again and says which operation took how long, beside the time that the engine took for each.

Owns the split of a step's time over the operations of the compiled kernels (kernels/cpu/traced.py), and its lines in a timeline.
Batches are the recorded ones, as in `exec`: what is measured is the load that was served. Tokens are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.console import Console

from vnext.base.spelling import reason
from vnext.log.reading import BAD_FORM
from vnext.replay.answers.trace import trace
from vnext.replay.causes.ledger import Entry, ledger
from vnext.replay.console.commands import index_of, writing
from vnext.replay.console.render import counted, facts, records, records_of
from vnext.replay.execution.execution import ModelChoice, described, machine_of, sentences, steps_of
from vnext.replay.execution.recorded import RecordedStep, Selection, Walk
from vnext.replay.execution.render_exec import numbers
from vnext.replay.reading.between import steps_between
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import STEP_US, timestamps_of
from vnext.replay.reading.window import planned_by
from vnext.replay.rerun.calls import Part, add_parts, calls_in, parts_of

if TYPE_CHECKING:
    from vnext.log.timestamps import Timestamps
    from vnext.replay.execution.execution import Progress
    from vnext.replay.rerun.calls import Part
    from vnext.replay.rerun.machine import Machine
    from vnext.replay.rerun.measured import MeasuredStep



SLOWEST = 8
AGAIN = 3  # the process of a timeline, behind the engine's and the requests'


class OperationTime(msgspec.Struct, frozen=True, kw_only=True):
    """An operation's own time in all steps, without that of operations within it. `share` is of the run's time; `gflops` and
    `gbytes` are 1e9 operations, and bytes of weights or of keys and values, in a second of it (0 where they are not counted)."""

    name: str
    calls: int
    ms: float
    share: float
    gflops: float
    gbytes: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time here and, where the log has times, as rank 0 and the whole engine took it (0: unknown)."""

    step: int
    requests: int
    tokens: int
    ms: float
    busy_ms: float
    recorded_ms: float


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """Of `steps` that were run again: `ms` and `busy_ms` are medians of a step here and on the log's rank 0 (0: unknown).
    `skipped` steps were computed with weights that are not here. `left_out` calls are not counted."""

    model: str
    numerics: dict[str, object]
    steps: int
    tokens: int
    total_ms: float
    ms: float
    busy_ms: float
    operations: list[OperationTime]
    slowest: list[StepTime]
    skipped: int
    left_out: int
    end: str
    timeline: str = ""


def profile(
    path: Path, selection: Selection, chosen: ModelChoice, out: Path | None = None, progress: Progress | None = None
) -> Profiled:
    """Run the steps, and write the timeline of these steps of the log with the run's operations to `out`. Raises UnusableLog."""
    walk = Walk(path, selection)
    with sentences():
        machine = machine_of(walk, chosen)
        if machine.kernels.is_torch:
            raise UnusableLog("only compiled kernels are measured: leave out --kernels torch, or install vnext with a compiler")
        with _part(walk, path, selection) as part:
            run = _Run({entry.step: entry for entry in ledger(part).entries if not entry.stopped}, timeline=out is not None)
            _again(walk, machine, run, progress)
            if not run.steps:
                raise UnusableLog(f"nothing was run: {path} has no step in what was asked for")
            if out is not None:
                with writing(out), out.open("w") as file:
                    trace(part, file, str(out), more=run.lines(timestamps_of(part)))
    times = [[step.ms for step in run.steps], [step.busy_ms for step in run.steps if step.busy_ms]]
    medians = [float(np.median(each)) if each else 0.0 for each in times]
    total_ms = sum(times[0])
    return Profiled(
        model=str(machine.path), numerics=described(machine), steps=len(run.steps), tokens=sum(step.tokens for step in run.steps),
        total_ms=total_ms, ms=medians[0], busy_ms=medians[1], operations=operations_of(run.parts, total_ms),
        slowest=sorted(run.steps, key=lambda step: -step.ms)[:SLOWEST], skipped=run.skipped, left_out=run.left_out, end=walk.end,
        timeline=str(out or ""),
    )  # fmt: skip


@contextmanager
def _part(walk: Walk, path: Path, selection: Selection) -> Iterator[Log]:
    """The log of what was asked for, with the steps that were in flight at its ends."""
    if not selection.first and selection.end is None:
        yield walk.log
        return
    index, depth = index_of(path), walk.first.config.pipeline_depth + 1
    end = index.last.planned if selection.end is None else selection.end + depth
    with steps_between(index, selection.first - depth, end) as part:
        yield part


def _again(walk: Walk, machine: Machine, run: _Run, progress: Progress | None) -> None:
    from vnext.replay.rerun.batched import Batched
    from vnext.replay.rerun.measured import Measured

    batched = Batched(machine, walk.first, walk.whole)
    measured = Measured(batched)
    for step, can_run in steps_of(walk, batched):
        if not can_run:
            run.skipped += 1
            continue
        run.step(step, measured.run(batched.inputs(step.state, step.placeholders, step.drafts)))
        if progress is not None:
            progress(len(run.steps), 0)


class _Run:
    """What has been measured so far. Mutable."""

    def __init__(self, recorded: dict[int, Entry], timeline: bool) -> None:
        self._recorded, self._timeline = recorded, timeline
        self.parts: dict[str, Part] = {}
        self.steps: list[StepTime] = []
        self.skipped = self.left_out = 0
        self._drawn: list[MeasuredStep] = []

    def step(self, step: RecordedStep, measured: MeasuredStep) -> None:
        measured.add_to(self.parts)
        self.left_out += measured.left_out
        entry, planned = self._recorded.get(step.step), step.state.in_flight[-1]
        self.steps.append(StepTime(
            step=step.step, requests=len(planned.ids), tokens=planned.tokens, ms=measured.ns / 1e6,
            busy_ms=entry.busy_us / 1e3 if entry else 0.0, recorded_ms=entry.us / 1e3 if entry else 0.0,
        ))  # fmt: skip
        if self._timeline:
            self._drawn.append(measured)

    def lines(self, timestamps: Timestamps | None) -> Iterator[str]:
        """Trace events: each step where the log has it, or behind the one before where that took longer here."""
        first_us = timestamps.times_ns[0] / 1e3 if timestamps is not None else 0.0
        yield process_line("run again by profile")
        free_us = 0.0
        for found, measured in zip(self.steps, self._drawn):
            entry = self._recorded.get(found.step)
            at_us = max(free_us, entry.end_us - entry.us - first_us if entry else found.step * STEP_US)
            free_us = at_us + found.ms * 1e3
            yield slice_of(f"step {found.step}", 0, at_us, found.ms * 1e3, {"requests": found.requests, "tokens": found.tokens})
            for call in measured.calls:
                yield call_slice(call, at_us + (call["began_ns"] - measured.began_ns) / 1e3)


def operations_of(parts: dict[str, Part], total_ms: float) -> list[OperationTime]:
    found = [
        OperationTime(
            name=name, calls=part.calls, ms=part.ns / 1e6, share=part.ns / 1e6 / total_ms, gflops=part.work / max(1, part.ns),
            gbytes=part.bytes / max(1, part.ns),
        )
        for name, part in parts.items()
    ]  # fmt: skip
    return sorted(found, key=lambda each: -each.ms)


def slice_of(name: str, thread: int, at_us: float, us: float, details: dict[str, object], pid: int = AGAIN) -> str:
    found = {"ph": "X", "pid": pid, "tid": thread, "ts": round(at_us, 3), "dur": round(us, 3), "name": name, "args": details}
    return json.dumps(found, separators=(",", ":"))


def process_line(name: str, pid: int = AGAIN) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":0,"name":"process_name","args":{{"name":"{name}"}}}}'


def call_slice(call: np.void, at_us: float, pid: int = AGAIN) -> str:
    """The trace event of a call of a kernel."""
    from vnext.replay.rerun.calls import name_of

    us = (call["ended_ns"] - call["began_ns"]) / 1e3
    return slice_of(name_of(call), int(call["thread"]), at_us, us, _details_of(call, us), pid)


def _details_of(call: np.void, us: float) -> dict[str, object]:
    """A call's rows and rates."""
    rates = {"GFLOP/s": call["work"], "GB/s": call["bytes"]}
    return {"rows": int(call["rows"])} | {name: round(float(count) / us / 1e3, 2) for name, count in rates.items() if count and us}


# ---- for a terminal ----------------------------------------------------------------------------------------------


def print_profiled(console: Console, answer: Profiled) -> None:
    facts(console, "run again", [
        ("model", answer.model),
        ("numbers", numbers(answer.numerics)),
        ("steps", f"{answer.steps:,}, {counted(answer.tokens, 'token')}, {answer.total_ms:,.1f} ms"),
        ("a step's median", f"{answer.ms:.3f} ms here{f', {answer.busy_ms:.3f} ms in the log (rank 0)' if answer.busy_ms else ''}"),
        *([("skipped", f"{counted(answer.skipped, 'step')} with weights that are not here")] if answer.skipped else []),
        *([("left out", counted(answer.left_out, "call"))] if answer.left_out else []),
        ("end", records_of(answer.end)),
    ])  # fmt: skip
    print_operations(console, answer.operations)
    slow = [{name: round(number, 3) for name, number in msgspec.structs.asdict(step).items()} for step in answer.slowest]
    records(console, "slowest steps", tuple(slow[0]), slow)
    if answer.timeline:
        console.print(f"written: {answer.timeline}", soft_wrap=True)


def print_operations(console: Console, operations: list[OperationTime]) -> None:
    rows = [
        {"operation": each.name, "calls": f"{each.calls:,}", "ms": f"{each.ms:,.2f}", "share": f"{each.share:.1%}",
         "GFLOP/s": f"{each.gflops:.1f}" if each.gflops else "", "GB/s": f"{each.gbytes:.1f}" if each.gbytes else ""}
        for each in operations
    ]  # fmt: skip
    records(console, "operations", tuple(rows[0]), rows)


# ---- a profile of a running engine -------------------------------------------------------------------------------
# The calls of kernels that it noted (POST /start_profile, /stop_profile). Their clock is that of the log's times, so each call is
# drawn in the step that it served.


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
    except OSError as error:
        raise UnusableLog(f"{calls_file} cannot be read ({reason(error)})") from error
    except BAD_FORM as error:
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
