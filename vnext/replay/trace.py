"""trace: a log as a timeline in the trace-event format that Perfetto and Chrome open.

Owns the mapping: the steps one after another, a lane for each request that lives (its wait, its chunks and tokens),
counters of the cache and the batch, and instants that say why a waiting request was not taken. Slices of one lane nest.
Times are microseconds since the first frame (times.py).
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console

from vnext.replay import render
from vnext.replay.folding import Broken, Folded, first_state, fold
from vnext.replay.source import Log, UnusableLog, open_log
from vnext.replay.times import Clock, stamps_of
from vnext.replay.verify import why_not_decided
from vnext.sched.explain import bound_behind, explain
from vnext.state.events import PrefixCacheReset, RequestAborted, RequestArrived, StepCommitted, StepPlanned
from vnext.state.state import Flight, State

ENGINE, REQUESTS = 1, 2
STEPS_LANE = 1
LINES_KEPT = 4096
REASONED_MAX = 64
"""Waiting requests, the first in the queue, of which it is told why they wait."""


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """`clock` is "stamps", or "steps" where the log has no times: a step is a millisecond then. `lanes`: most requests
    alive at once. `ended`: how the log ended, or why folding stopped."""

    path: str
    trace_events: int
    steps: int
    requests: int
    lanes: int
    clock: str
    ended: str


class _Writer:
    """Trace events, one a line. Mutable."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._lines, self.count = file, [], 0
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def put(self, lines: str, events: int = 1) -> None:
        """One line, or several with a comma and a line's end between them."""
        self.count += events
        self._lines.append(lines)
        if len(self._lines) >= LINES_KEPT:
            self._flush(",\n")

    def _flush(self, end: str) -> None:
        self._file.write(",\n".join(self._lines) + end if self._lines else "")
        self._lines.clear()

    def name(self, pid: int, tid: int, what: str, name: str) -> None:
        self.put(f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{what}","args":{{"name":{json.dumps(name)}}}}}')

    def close(self) -> None:
        self.put(f'{{"ph":"M","pid":{ENGINE},"tid":0,"name":"process_sort_index","args":{{"sort_index":0}}}}')
        self._flush("\n]}\n")


class _Lived:
    """A request's lane, since when it is there, and since when it waits or computes (`phase_us`)."""

    __slots__ = ("lane", "since_us", "waits", "phase_us", "name", "note")

    def __init__(self, lane: int, since_us: float, waits: bool, name: str) -> None:
        self.lane, self.since_us, self.waits, self.phase_us, self.name, self.note = lane, since_us, waits, since_us, name, ""


class _Trace:
    """The timeline while the log is folded. Mutable."""

    def __init__(self, writer: _Writer, clock: Clock, first: State, each_chunk: bool, why_unknown: str) -> None:
        self._writer, self._clock, self._each_chunk = writer, clock, each_chunk
        self._free: list[int] = []
        self.lanes = self.steps = self.requests = 0
        self._living: dict[int, _Lived] = {}
        self._planned_us: dict[int, float] = {flight.step: 0.0 for flight in first.flights}
        self._last_commit_us = 0.0
        self._why_unknown = why_unknown
        self._reasoned: tuple | None = None
        writer.name(ENGINE, 0, "process_name", "engine")
        writer.name(ENGINE, STEPS_LANE, "thread_name", "steps")
        writer.name(REQUESTS, 0, "process_name", "requests")
        running = set(first.rows.id.tolist())
        for id_, request in first.requests.items():
            self._arrive(id_, request.name, 0.0, id_ not in running)

    def hear(self, item: Folded) -> None:
        event, before, after = item.event, item.before, item.after
        now_us = self._clock.of(item.number, before.committed + isinstance(event, StepCommitted))
        match event:
            case RequestArrived():
                self._arrive(event.id, event.name, now_us, True)
            case StepPlanned():
                self._plan(event, before, after, now_us)
            case StepCommitted():
                self._commit(event, before, after, now_us)
            case RequestAborted():
                for id_ in event.ids:
                    if id_ in self._living and id_ not in after.requests:
                        self._end(id_, now_us, f"abort ({event.reason})")
            case PrefixCacheReset():
                self._instant(ENGINE, STEPS_LANE, now_us, "prefix cache reset", "p")

    # ---- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, id_: int, name: str, now_us: float, waits: bool) -> None:
        self.requests += 1
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            self.lanes = lane = self.lanes + 1
            self._writer.name(REQUESTS, lane, "thread_name", f"lane {lane}")
        self._living[id_] = _Lived(lane, now_us, waits, name)

    def _end(self, id_: int, now_us: float, finish: str) -> None:
        lived = self._living.pop(id_)
        self._phase(lived, now_us)
        self._slice(REQUESTS, lived.lane, lived.since_us, now_us, f"request {id_}",
                    f'"name":{json.dumps(lived.name)},"finish":"{finish}"')  # fmt: skip
        heapq.heappush(self._free, lived.lane)

    def _phase(self, lived: _Lived, now_us: float) -> None:
        """What it did until now, as one slice; chunks lie inside."""
        name = "waiting" if lived.waits else "running"
        self._slice(REQUESTS, lived.lane, lived.phase_us, now_us, name, "")
        lived.phase_us = now_us

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _plan(self, plan: StepPlanned, before: State, after: State, now_us: float) -> None:
        self.steps += 1
        self._planned_us[plan.step] = now_us
        rows = before.rows.id.tolist() if plan.preempted else ()
        for row in plan.preempted:
            lived = self._living[rows[row]]
            self._phase(lived, now_us)
            lived.waits, lived.note = True, ""
            self._instant(REQUESTS, lived.lane, now_us, "gives way: its blocks are needed", "t")
        if plan.admitted:
            for id_ in after.rows.id[len(before.rows) - len(plan.preempted) :].tolist():
                lived = self._living[id_]
                self._phase(lived, now_us)
                lived.waits = False
        if after.waiting:
            self._reason(before, plan, after, now_us)
        self._counters(after, now_us)

    def _commit(self, event: StepCommitted, before: State, after: State, now_us: float) -> None:
        flight = before.flights[0]
        began_us = max(self._planned_us.pop(event.step), self._last_commit_us)
        self._last_commit_us = now_us
        self._writer.put(
            f'{{"ph":"X","pid":1,"tid":1,"ts":{began_us:.3f},"dur":{now_us - began_us:.3f},"name":"step {event.step}",'
            f'"args":{{"requests":{len(flight.samples)},"tokens":{flight.tokens},"samples":{len(event.tokens) // 4}}}}}'
        )
        if self._each_chunk:
            self._chunks(flight, began_us, now_us)
        if len(after.rows) != len(before.rows):
            left = set(after.rows.id.tolist())
            for id_ in before.rows.id.tolist():
                if id_ not in left:
                    self._end(id_, now_us, "end")

    def _chunks(self, flight: Flight, began_us: float, now_us: float) -> None:
        """What the step computed of each request that still runs in the same phase."""
        put, living = self._writer.put, self._living
        duration, start = f"{now_us - began_us:.3f}", f"{began_us:.3f}"
        for id_, first, count in zip(*flight.entries[[0, 2, 3]].tolist()):
            lived = living.get(id_)
            if lived is None or lived.waits or lived.phase_us > began_us:
                continue
            put(f'{{"ph":"X","pid":2,"tid":{lived.lane},"ts":{start},"dur":{duration},"name":"{count} from {first}"}}')

    def _counters(self, state: State, now_us: float) -> None:
        pool, ts = state.pool, f"{now_us:.3f}"
        free, kept = pool.free, pool.kept
        self._writer.put(
            f'{{"ph":"C","pid":1,"tid":0,"ts":{ts},"name":"cache blocks",'
            f'"args":{{"held":{pool.block_count - free},"kept":{kept},"empty":{free - kept}}}}},\n'
            f'{{"ph":"C","pid":1,"tid":0,"ts":{ts},"name":"requests",'
            f'"args":{{"running":{len(state.rows)},"waiting":{len(state.waiting)}}}}}',
            2,
        )

    # ---- why not -------------------------------------------------------------------------------------------------

    def _reason(self, before: State, plan: StepPlanned, after: State, now_us: float) -> None:
        """Why requests wait in spite of a new step, as the scheduler itself says: told when it changes, of the first ones
        in the queue."""
        whys, everybody = {}, "unknown"
        if not self._why_unknown:
            bound = bound_behind(after.config, plan, after.flights[-1].tokens, len(after.rows))
            if bound is None:
                told = explain(before)
                whys = {wait.id: wait.why for wait in told.waits} if told.plan == plan else {}
            elif self._reasoned is not None and self._reasoned == (after.waiting, bound):
                return
            self._reasoned, everybody = (after.waiting, bound), bound or everybody
        for entry in after.waiting[:REASONED_MAX]:
            lived, why = self._living[entry.id], whys.get(entry.id, everybody)
            if lived.note != why:
                lived.note = why
                if why != "preempted":  # it has an instant of its own
                    self._instant(REQUESTS, lived.lane, now_us, f"not taken: {why}", "t")

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _slice(self, pid: int, tid: int, begin_us: float, end_us: float, name: str, args: str) -> None:
        self._writer.put(
            f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{begin_us:.3f},"dur":{end_us - begin_us:.3f},'
            f'"name":"{name}","args":{{{args}}}}}'
        )

    def _instant(self, pid: int, tid: int, now_us: float, name: str, scope: str) -> None:
        self._writer.put(f'{{"ph":"i","pid":{pid},"tid":{tid},"ts":{now_us:.3f},"s":"{scope}","name":"{name}"}}')

    def close(self, state: State, now_us: float) -> None:
        """What still lives ends with the log."""
        for id_ in list(self._living):
            self._end(id_, max(now_us, self._living[id_].phase_us), "alive at the log's end")


def trace(log: Log, file: IO[str], path: str, each_chunk: bool = True) -> Traced:
    """Write the timeline of a log."""
    writer, clock, state = _Writer(file), Clock(stamps_of(log)), first_state(log)
    timeline, ended, number = _Trace(writer, clock, state, each_chunk, why_not_decided(log)), "complete", state.sequence
    for item in fold(log):
        if isinstance(item, Folded):
            timeline.hear(item)
            state, number = item.after, item.number
        elif isinstance(item, Broken):
            ended = item.message
    timeline.close(state, clock.of(number, state.committed))
    writer.close()
    return Traced(
        path=path, trace_events=writer.count, steps=timeline.steps, requests=timeline.requests, lanes=timeline.lanes,
        clock="stamps" if clock.stamped else "steps", ended=ended,
    )  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`trace` among the commands."""
    tracing = command(
        "trace", run, "a timeline for ui.perfetto.dev or chrome://tracing",
        "Steps, a lane for each living request, counters of cache and batch, and why requests wait. Exit code 1: the log "
        "could not be folded to its end.",
    )  # fmt: skip
    tracing.add_argument("-o", "--out", type=Path, required=True, help="the JSON file")
    tracing.add_argument("--brief", action="store_true", help="no slice for each chunk and token: a small file of a long log")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 the whole log, 1 up to where it breaks."""
    log = open_log(arguments.log)
    try:
        with arguments.out.open("w") as file:
            answer = trace(log, file, str(arguments.out), not arguments.brief)
    except OSError as error:
        raise UnusableLog(f"{arguments.out} cannot be written ({error}): give another file with -o") from error
    if arguments.json:
        render.print_json(console, answer)
        return int(answer.ended != "complete")
    console.print(f"written: {answer.path}, {render.counted(answer.trace_events, 'trace event')}", style="bold", soft_wrap=True)
    steps, requests = render.counted(answer.steps, "step"), render.counted(answer.requests, "request")
    console.print(f"{steps} and {requests}, at most {answer.lanes} at once")
    if answer.clock == "steps":
        console.print("the log has no times: a step is drawn as a millisecond")
    if answer.ended != "complete":
        console.print(f"up to where it breaks: {render.printable(answer.ended)}", style="bold red", soft_wrap=True)
    return int(answer.ended != "complete")
