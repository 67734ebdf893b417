"""The timeline: what `trace` draws of a log, event by event or a whole run of steady frames, as lines of trace events.

Owns the lines: the consecutive steps, a lane for each live request (its wait, its chunks and tokens), counters of the
cache and the batch, and instants that say why a waiting request was not admitted. Slices of one lane nest. A run gives
the same lines, byte for byte, as its events do.
"""

from __future__ import annotations

import heapq
import json
import math
from typing import IO

import numpy as np

from vnext.replay.reading.folding import Folded
from vnext.replay.reading.strides import Run
from vnext.replay.reading.times import STEP_US, Clock
from vnext.sched.explain import bound_behind, explain, first_bound
from vnext.state.events import AnyEvent, RequestAborted, RequestArrived, StepCommitted, StepPlanned
from vnext.state.state import Request, State, StepInFlight, Waiting
from vnext.state.traits import everyone_leaves, line_of, loses_steps, requests_of

ENGINE, REQUESTS = 1, 2
STEPS_LANE = 1
LINES_KEPT = 4096
REASONED_MAX = 64
"""The reason for waiting is shown for this many requests, the first in the queue."""
UNKNOWN = "unknown"
"""The note for all waiting requests where the reason cannot be known."""

STEP = (
    '{"ph":"X","pid":1,"tid":1,"ts":%.3f,"dur":%.3f,"name":"step %d","args":{"requests":%d,"tokens":%d,"samples":%d}}'
)
CHUNK = '{"ph":"X","pid":2,"tid":%d,"ts":%s,"dur":%s,"name":"%d from %s"}'
COUNTERS = (
    '{"ph":"C","pid":1,"tid":0,"ts":%.3f,"name":"cache blocks","args":{"held":%d,"kept":%d,"empty":%d}},\n'
    '{"ph":"C","pid":1,"tid":0,"ts":%.3f,"name":"requests","args":{"running":%d,"waiting":%d}}'
)


class Writer:
    """Writes trace events, one per line. Mutable."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._lines, self.count = file, list[str](), 0
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def put(self, lines: str, events: int = 1) -> None:
        """Write one line, or several joined by a comma and a newline."""
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


class Lived:
    """A request's lane: `who` it is, when it began, and when the current phase (waiting or computing) began (`phase_us`); None if
    unknown. `chunks_us` is the earliest time at which a chunk of this phase may begin."""

    __slots__ = ("lane", "since_us", "waits", "phase_us", "chunks_us", "who", "note")

    def __init__(self, lane: int, since_us: float | None, waits: bool, who: str) -> None:
        self.lane, self.since_us, self.waits, self.who, self.note = lane, since_us, waits, who, ""
        self.phase_us, self.chunks_us = since_us, since_us or 0.0


class _Chunks:
    """What the steps that a run both plans and commits computed: one token for each request, all of which ran before."""

    def __init__(self, living: list[Lived], run: Run) -> None:
        """`living` are the run's requests, in the run's order."""
        in_flight = run.after.in_flight
        flown = sum(len(scheduled.ids) == len(run.ids) or np.isin(run.ids, scheduled.ids) for scheduled in in_flight)
        self._starts = (run.after.rows.computed - flown - (run.frames - len(in_flight))).tolist()
        self._lines = ",\n".join(CHUNK % (each.lane, "%s", "%s", 1, "%d") for each in living)
        self._given: list[object] = [None] * (3 * len(living))
        self._count = len(living)

    def put(self, writer: Writer, plan: int, began_us: float, passed_us: float) -> None:
        """Write the lines of the run's plan number `plan`."""
        start, duration, given, count = f"{began_us:.3f}", f"{passed_us:.3f}", self._given, self._count
        given[::3], given[1::3], given[2::3] = [start] * count, [duration] * count, [first + plan for first in self._starts]
        writer.put(self._lines % tuple(given), count)


class Timeline:
    """The timeline while the log is folded. Mutable; `left_out` counts the steps, requests and phases of requests that
    begin or end at an unknown time and are not drawn."""

    def __init__(self, writer: Writer, clock: Clock, first: State, each_chunk: bool, why_unknown: str) -> None:
        self._writer, self._clock, self._each_chunk = writer, clock, each_chunk
        self._free: list[int] = []
        self.lanes = self.steps = self.requests = self.left_out = 0
        self._living: dict[int, Lived] = {}
        self._planned_us: dict[int, float | None] = {scheduled.step: 0.0 for scheduled in first.in_flight}
        self._last_commit_us = 0.0
        self._latest_us = 0.0 if clock.timestamped else first.committed * STEP_US
        self._why_unknown = why_unknown
        self._reasoned: tuple[tuple[Waiting, ...], str | None] | None = None
        writer.name(ENGINE, 0, "process_name", "engine")
        writer.name(ENGINE, STEPS_LANE, "thread_name", "steps")
        writer.name(REQUESTS, 0, "process_name", "requests")
        running = set(first.rows.id.tolist())
        for id_, request in first.requests.items():
            self._arrive(request, 0.0, id_ not in running)

    def hear(self, item: Folded) -> None:
        event, before, after = item.event, item.before, item.after
        now_us = self._clock.known_us(item.frame_end, after.committed)
        self._latest_us = self._latest_us if now_us is None else now_us
        match event:
            case RequestArrived():
                self._arrive(event, now_us, True)
            case StepPlanned():
                self._plan(event, before, after, now_us)
            case StepCommitted():
                self._commit(event, before, after, now_us)
            case RequestAborted():
                for id_ in event.ids:
                    if id_ in self._living and id_ not in after.requests:
                        self._end(id_, now_us, f"abort ({event.reason})")
            case _:
                self._marked(event, before, now_us)

    def _marked(self, event: AnyEvent, before: State, now_us: float | None) -> None:
        """An event that is neither of a client nor of a step: a mark in the engine's lane, or in those of its requests."""
        marks, line = event.traits.marks, json.dumps(line_of(event))[1:-1]
        if marks == "engine":
            self._instant(ENGINE, STEPS_LANE, now_us, line, "p")
        for id_ in requests_of(event) if marks == "request" else ():
            if id_ in self._living:
                self._instant(REQUESTS, self._living[id_].lane, now_us, line, "t")
        if loses_steps(event):
            for scheduled in before.in_flight:  # they end without a slice
                self._planned_us.pop(scheduled.step, None)
            self._reasoned = None
        if everyone_leaves(event):
            why = "its ranks are gone" if event.traits.transfer == "loses" else f"waits again: {line}"
            self._everyone_leaves(before, now_us, why)

    # ---- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request | RequestArrived, now_us: float | None, waits: bool) -> None:
        self.requests += 1
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            self.lanes = lane = self.lanes + 1
            self._writer.name(REQUESTS, lane, "thread_name", f"lane {lane}")
        client = f',"client":"{request.client:016x}","weight":{request.weight}' if request.client or request.weight != 1 else ""
        self._living[request.id] = Lived(lane, now_us, waits, f'"name":{json.dumps(request.name)}{client}')

    def _end(self, id_: int, now_us: float | None, finish: str) -> None:
        lived = self._living.pop(id_)
        self._phase(lived, now_us)
        self._slice(REQUESTS, lived.lane, lived.since_us, now_us, f"request {id_}",
                    f'{lived.who},"finish":"{finish}"')  # fmt: skip
        heapq.heappush(self._free, lived.lane)

    def _phase(self, lived: Lived, now_us: float | None) -> None:
        """Draw the request's current phase up to now as one slice; chunks lie inside it."""
        name = "waiting" if lived.waits else "running"
        self._slice(REQUESTS, lived.lane, lived.phase_us, now_us, name, "")
        lived.phase_us = now_us
        lived.chunks_us = math.nextafter(self._latest_us, math.inf) if now_us is None else now_us

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _plan(self, plan: StepPlanned, before: State, after: State, now_us: float | None) -> None:
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

    def _commit(self, event: StepCommitted, before: State, after: State, now_us: float | None) -> None:
        scheduled = before.in_flight[0]
        began_us = self._began(event.step, now_us)
        if began_us is not None and now_us is not None:
            self._writer.put(STEP % (
                began_us, now_us - began_us, event.step, len(scheduled.samples), scheduled.tokens, len(event.tokens) // 4
            ))  # fmt: skip
            if self._each_chunk:
                self._chunks(scheduled, began_us, now_us)
        if len(after.rows) != len(before.rows):
            left = set(after.rows.id.tolist())
            for id_ in before.rows.id.tolist():
                if id_ not in left:
                    self._end(id_, now_us, "end")

    def _everyone_leaves(self, before: State, now_us: float | None, why: str) -> None:
        """Every running request waits again."""
        for id_ in before.rows.id.tolist():
            lived = self._living[id_]
            self._phase(lived, now_us)
            lived.waits, lived.note = True, ""
            self._instant(REQUESTS, lived.lane, now_us, why, "t")

    def _began(self, step: int, now_us: float | None) -> float | None:
        """When the step committed now began; None if a time is unknown. A step that was planned before the previous
        commit begins at that commit."""
        planned_us, last_us = self._planned_us.pop(step), self._last_commit_us
        if now_us is not None:
            self._last_commit_us = now_us
        elif step + 1 in self._planned_us:
            self._planned_us[step + 1] = None
        if now_us is None or planned_us is None:
            self.left_out += 1
            return None
        return max(planned_us, last_us)

    def _chunks(self, scheduled: StepInFlight, began_us: float, now_us: float) -> None:
        """Draw what the step computed for each request that is still running in the same phase."""
        put, living = self._writer.put, self._living
        duration, start = f"{now_us - began_us:.3f}", f"{began_us:.3f}"
        for id_, first, count in zip(*scheduled.entries[[0, 2, 3]].tolist()):
            lived = living.get(id_)
            if lived is None or lived.waits or lived.chunks_us > began_us:
                continue
            put(CHUNK % (lived.lane, start, duration, count, first))

    def _counters(self, state: State, now_us: float | None) -> None:
        if now_us is None:
            return
        pool = state.pool
        free, kept = pool.free, pool.kept
        held = pool.page_count - free
        self._writer.put(COUNTERS % (now_us, held, kept, free - kept, now_us, len(state.rows), len(state.waiting)), 2)

    # ---- a run at once -------------------------------------------------------------------------------------------

    def may_run(self, state: State) -> bool:
        """Whether steady frames after this state need no reasons for waiting requests."""
        if not state.waiting or self._why_unknown:
            return not state.waiting or self._reasoned == (state.waiting, UNKNOWN)
        config, running = state.config, len(state.rows)
        if state.cautious or state.paused or running >= config.max_num_batched_tokens:
            return False  # a step with fewer tokens has another reason
        bound = first_bound(config, running, running)
        return bound is not None and self._reasoned == (state.waiting, bound)

    def meet_run(self, run: Run) -> None:
        """Draw a folded run of steady frames that begins in a state that `may_run`."""
        frames, after, requests = np.arange(run.frames), run.after, len(run.ids)
        times_us, begun_us, depth = self._clock.known_many(run.next_events, run.step + 1 + frames), [], len(run.in_flight)
        for place, now_us in enumerate(times_us):
            begun_us.append(self._began(run.step + place, now_us))
            self._planned_us[run.step + depth + place] = now_us
            self._latest_us = self._latest_us if now_us is None else now_us
        self.steps += run.frames
        chunks = _Chunks([self._living[id_] for id_ in run.ids.tolist()], run) if self._each_chunk and run.frames > depth else None
        plans, put, blocks, waiting = run.plans.tolist(), self._writer.put, after.pool.page_count, len(after.waiting)
        for place, (began_us, now_us) in enumerate(zip(begun_us, times_us)):
            scheduled = run.in_flight[place] if place < depth else None
            count, tokens = (len(scheduled.samples), scheduled.tokens) if scheduled else plans[place - depth][:2]
            if began_us is not None and now_us is not None:
                put(STEP % (began_us, now_us - began_us, run.step + place, count, tokens, requests))
                if scheduled and self._each_chunk:
                    self._chunks(scheduled, began_us, now_us)
                elif chunks:
                    chunks.put(self._writer, place - depth, began_us, now_us - began_us)
            if now_us is not None:
                free, kept = plans[place][2:]
                put(COUNTERS % (now_us, blocks - free, kept, free - kept, now_us, requests, waiting), 2)

    # ---- why not -------------------------------------------------------------------------------------------------

    def _reason(self, before: State, plan: StepPlanned, after: State, now_us: float | None) -> None:
        """Draw why the first requests in the queue wait despite a new step, as the scheduler explains it, when the
        reason changes."""
        whys: dict[int, str] = {}
        bound: str | None = UNKNOWN
        if not self._why_unknown:
            known = not before.cautious and not before.paused
            bound = bound_behind(after.config, plan, after.in_flight[-1].tokens, len(after.rows)) if known else None
            if bound is None:
                reported = explain(before)
                whys = {wait.id: wait.why for wait in reported.waits} if reported.plan == plan else {}
            elif self._reasoned is not None and self._reasoned == (after.waiting, bound):
                return
        self._reasoned = after.waiting, bound
        for entry in after.waiting[:REASONED_MAX]:
            lived, why = self._living[entry.id], whys.get(entry.id, bound or UNKNOWN)
            if lived.note != why:
                lived.note = why
                if why != "preempted":  # preemption has its own instant
                    self._instant(REQUESTS, lived.lane, now_us, f"not taken: {why}", "t")

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _slice(self, pid: int, tid: int, begin_us: float | None, end_us: float | None, name: str, args: str) -> None:
        if begin_us is None or end_us is None:
            self.left_out += 1
            return
        self._writer.put(
            f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{begin_us:.3f},"dur":{end_us - begin_us:.3f},'
            f'"name":"{name}","args":{{{args}}}}}'
        )

    def _instant(self, pid: int, tid: int, now_us: float | None, name: str, scope: str) -> None:
        if now_us is not None:
            self._writer.put(f'{{"ph":"i","pid":{pid},"tid":{tid},"ts":{now_us:.3f},"s":"{scope}","name":"{name}"}}')

    def close(self, finish: str) -> None:
        """Close all live requests at the end of the log, or of its times."""
        for id_ in list(self._living):
            self._end(id_, self._latest_us, finish)
