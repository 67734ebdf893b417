"""req: one request's life, from the events that touched it.

Owns the story: arrival, admissions, what each step computed and sampled, preemptions and the end.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.log.codec import Frame, Privacy, SegmentHeader
from vnext.replay.answers.seen_inputs import SeenInput, hear, inputs_of
from vnext.replay.answers.waiting import WaitClock, Waits
from vnext.replay.reading.folding import Broken, Folded, fold_items
from vnext.replay.reading.index import Index, require_request
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.replay.reading.verify import why_not_decided
from vnext.sched.admission import Why
from vnext.sched.explain import explain
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    generated_by,
)
from vnext.state.facilities.adapters import slot_of
from vnext.state.outputs import outputs
from vnext.state.state import Request, Slot, State
from vnext.state.store.rows import wants
from vnext.state.traits import everyone_leaves, line_of, loses_steps, requests_of, transfer_of

Kind = Literal["arrived", "reads", "admitted", "preempted", "recovered", "computed", "sampled", "ended"]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `step` is -1 before the first.

    `tokens` counts prompt tokens (arrived), tokens found in the cache (admitted), tokens computed in this step, tokens
    computed and dropped (preempted, recovered), or is 1 (sampled). `adapter` is the digest of the LoRA adapter that the step
    computed the tokens with and `adapter_name` its name, as the slots held them when the step was planned; "" without one.
    """

    event: int
    step: int
    kind: Kind
    tokens: int
    note: str
    adapter: str = ""
    adapter_name: str = ""


class Waited(msgspec.Struct, kw_only=True):
    """Consecutive steps in which the request had something to compute and computed nothing, for one reason.

    `why`, `need`, `have` and `behind` (a request, -1 for none) describe the first of these steps
    (vnext/sched/explain.py).
    """

    first_step: int
    last_step: int
    why: Why | Literal["unknown"]
    need: int
    have: int
    behind: int


class RequestLife(msgspec.Struct, frozen=True, kw_only=True):
    """`waits` accounts for every one of the `waited_steps`; `why_unknown` says why the scheduler could not be asked.

    `queued_steps` were planned between arrival and first admission. `waited_steps` are all steps that the request could
    have joined and did not, including those. `adapter` is the digest of its LoRA adapter, and the name where the log has one;
    by law R1 each of its tokens was computed with it. `arrival_s` is the time from the engine's start to the arrival, in
    seconds. `recoveries` counts the times that ranks were replaced while it lived; `resumed_tokens` of its answer came from
    another engine, whose log is `continues`. `waited` has the times, `inputs` what became of its images, sounds and videos.
    """

    id: int
    name: str
    privacy: Privacy
    client: str
    priority: int
    weight: int
    arrival_s: float
    prompt_tokens: int
    tokens_max: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    queued_steps: int
    waited_steps: int
    finish: str
    waits: list[Waited]
    why_unknown: str
    moments: list[Moment]
    adapter: str = ""
    recoveries: int = 0
    resumed_tokens: int = 0
    continues: str = ""
    waited: Waits = Waits()
    inputs: list[SeenInput] = []


class _Story:
    """The request's life while the log is read."""

    def __init__(self, request_id: int, why_unknown: str, clock: Clock) -> None:
        self.id, self.clock, self.waiting = request_id, clock, WaitClock()
        self.us: float | None = None
        self.waits: list[Waited] = []
        self.why_unknown = why_unknown
        self.arrival: RequestArrived | None = None
        self.moments: list[Moment] = []
        self.queued_steps = self.waited_steps = 0
        self.cached_tokens = self.transfer = -1
        self.finish = ""
        self.slots: dict[int, Slot] = {}  # of its adapter, by step in flight
        self.adapter_name = ""

    def tell(self, item: Folded, kind: Kind, step: int, tokens: int, note: str, slot: Slot | None = None) -> None:
        adapter, name = (slot.digest, slot.name) if slot else ("", "")
        moment = Moment(event=item.number, step=step, kind=kind, tokens=tokens, note=note, adapter=adapter, adapter_name=name)
        self.moments.append(moment)

    def hear(self, item: Folded) -> None:
        if self.clock.timestamped:
            self.us = self.clock.frame_us(item.frame_end)
        match item.event:
            case RequestArrived():
                self._arrived(item, item.event)
            case StepPlanned():
                self._planned(item, item.event)
            case StepCommitted():
                self._committed(item, item.event)
            case RequestAborted():
                self._aborted(item, item.event)
            case EngineRecovered():
                self._recovered(item, item.event)
            case _:
                self._touched(item, item.event)

    def _touched(self, item: Folded, event: AnyEvent) -> None:
        """An event of a feature: it names the request, ends its transfer, or takes everyone from the batch."""
        transfer, is_named = event.traits.transfer, self.id in requests_of(event)
        if is_named and transfer == "begins":
            self.transfer = transfer_of(event)
        if is_named or (transfer == "ends" and transfer_of(event) == self.transfer):
            self.tell(item, "reads", item.after.planned, 0, line_of(event))
        elif everyone_leaves(event):
            self._waits_again(item, f"{line_of(event)}: its tokens are computed anew")
        elif loses_steps(event) and self.arrival is not None and self.id in item.before.rows.id:
            self.tell(item, "reads", item.before.planned - 1, 0, line_of(event))
        if self.arrival is not None and isinstance(event, EnginePaused) and event.mode:
            self.waiting.wait("pause", self.us)

    def _arrived(self, item: Folded, event: RequestArrived) -> None:
        if event.id == self.id:
            self.arrival = event
            self.waiting.arrive(self.us, "pause" if item.after.paused else "step")
            place = [entry.id for entry in item.after.waiting].index(event.id)
            has = len(generated_by(event)) // 4
            back = f", back from another engine with {has} tokens of its answer" if isinstance(event, RequestResumed) else ""
            note = f"{place} ahead of it in the queue{back}"
            self.tell(item, "arrived", item.before.planned - 1, len(event.prompt) // 4, note)

    def _planned(self, item: Folded, event: StepPlanned) -> None:
        if self.arrival is None or self.id not in item.before.requests:
            return
        rows = item.before.rows.id.tolist()
        gave_way = self.id in [rows[row] for row in event.preempted]
        if gave_way:
            computed = int(item.before.rows.computed[rows.index(self.id)])
            self.tell(item, "preempted", event.step, computed, "its blocks were needed")
            self.waiting.wait("preemption", self.us)
        scheduled = item.after.in_flight[-1]
        place = (scheduled.ids == self.id).nonzero()[0]
        if len(place) == 0:
            self._waited(item, event)
            return
        self.waiting.wait("", self.us)
        start, count, samples = (
            int(column[place[0]]) for column in (scheduled.starts, scheduled.counts, scheduled.samples)
        )
        if self.id not in rows:
            self._admitted(item, event.step, start)
        drafts = 0 if scheduled.drafts is None else int(scheduled.drafts[place[0]])
        with_drafts = f", drafts {drafts} at most" if drafts else ""
        note = f"positions {start} to {start + count - drafts - 1}{with_drafts}{', samples' if samples else ''}"
        if (place := self._place(item.after)) is not None and (slot := item.after.slots[place]) is not None:
            self.slots[event.step] = slot
        self.tell(item, "computed", event.step, count - drafts, note, self.slots.get(event.step))

    def _waited(self, item: Folded, event: StepPlanned) -> None:
        """Count a step without the request as waiting only if it had something to compute."""
        place = (item.after.rows.id == self.id).nonzero()[0]
        self.queued_steps += self.cached_tokens < 0
        if len(place) == 0 or int(wants(item.after.rows)[place[0]]) > 0:
            self.waited_steps += 1
            why = self._ask_why(item.before, event)
            self.waiting.wait(why, self.us, item.after.in_flight[-1], item.after)

    def _ask_why(self, before: State, event: StepPlanned) -> str:
        """Ask the scheduler for the reason, if it decides as recorded. Returns what the request that it is behind waits for."""
        reported = None if self.why_unknown else explain(before)
        found = (
            next((wait for wait in reported.waits if wait.id == self.id), None)
            if reported and reported.plan == event
            else None
        )
        now = Waited(
            first_step=event.step, last_step=event.step, why=found.why if found else "unknown",
            need=found.need if found else 0, have=found.have if found else 0, behind=found.behind if found else -1,
        )
        last = self.waits[-1] if self.waits else None
        if last and (last.last_step + 1, last.why, last.behind) == (event.step, now.why, now.behind):
            last.last_step = event.step
        else:
            self.waits.append(now)
        ahead = next((wait for wait in reported.waits if found and wait.id == found.behind), found) if reported else None
        return ahead.why if ahead is not None else now.why

    def _admitted(self, item: Folded, step: int, start: int) -> None:
        self.cached_tokens = start if self.cached_tokens < 0 else self.cached_tokens
        in_slot = ""
        if (place := self._place(item.after)) is not None and (slot := item.after.slots[place]) is not None:
            self.adapter_name, in_slot = slot.name, f"; slot {place} holds its adapter {slot.digest}"
        self.tell(item, "admitted", step, start, f"tokens found in the cache{in_slot}")

    def _place(self, state: State) -> int | None:
        """Which slot holds the request's adapter."""
        adapter = state.requests[self.id].sampling.adapter
        return slot_of(state, adapter) if adapter else None

    def _committed(self, item: Folded, event: StepCommitted) -> None:
        if self.id not in item.before.requests or self.id not in item.before.in_flight[0].ids:
            return
        slot = self.slots.pop(event.step, None)
        for output in outputs(item.before, event, item.after):
            if output.id == self.id:
                self.tell(item, "sampled", event.step, 1, f"token {output.token}", slot)
                self.waiting.sample(self.us)
                if output.finish:
                    self._ended(item, event.step, output.finish)

    def _aborted(self, item: Folded, event: RequestAborted) -> None:
        if self.id in item.before.requests and self.id not in item.after.requests:
            self._ended(item, item.before.planned - 1, f"abort ({event.reason})")

    def _waits_again(self, item: Folded, why: str) -> None:
        rows = item.before.rows
        if self.arrival is not None and len(place := (rows.id == self.id).nonzero()[0]):
            self.tell(item, "preempted", item.before.planned - 1, int(rows.computed[place[0]]), why)

    def _recovered(self, item: Folded, event: EngineRecovered) -> None:
        """The ranks are new; what they had computed of the request is gone, and its tokens are not."""
        self.slots.clear()
        self.waiting.wait("recovery", self.us)
        if self.arrival is None or self.id not in item.before.requests:
            return
        place = (item.before.rows.id == self.id).nonzero()[0]
        computed = int(item.before.rows.computed[place[0]]) if len(place) else 0
        self.tell(item, "recovered", item.before.planned - 1, computed, event.cause)

    def _ended(self, item: Folded, step: int, finish: str) -> None:
        self.finish = finish
        self.tell(item, "ended", step, 0, finish)

    def life(self, arrival: RequestArrived, header: SegmentHeader, continues: str, inputs: list[SeenInput]) -> RequestLife:
        return RequestLife(
            id=self.id,
            name=arrival.name,
            privacy=header.privacy,
            client=f"{arrival.client:016x}" if arrival.client else "",
            priority=arrival.priority,
            weight=arrival.weight,
            arrival_s=(arrival.arrival_ns - header.started.started_ns) / 1e9,
            prompt_tokens=len(arrival.prompt) // 4,
            tokens_max=arrival.sampling.max_tokens,
            cached_tokens=max(self.cached_tokens, 0),
            generated_tokens=sum(moment.kind == "sampled" for moment in self.moments),
            preemptions=sum(moment.kind == "preempted" for moment in self.moments),
            queued_steps=self.queued_steps,
            waited_steps=self.waited_steps,
            finish=self.finish or "still alive at the log's end",
            waits=self.waits,
            why_unknown=self.why_unknown,
            moments=self.moments,
            adapter=f"{arrival.sampling.adapter} {self.adapter_name}".strip(),
            recoveries=sum(moment.kind == "recovered" for moment in self.moments),
            resumed_tokens=len(generated_by(arrival)) // 4,
            continues=continues,
            waited=self.waiting.waits(),
            inputs=inputs,
        )


def life(index: Index, request_id: int, own_policy: bool = False) -> RequestLife:
    """The life of one request. Raises UnusableLog if the log does not hold it. `own_policy` as in `verify`."""
    log, begin = index.log, index.first
    story = _Story(request_id, why_not_decided(log, own_policy), Clock(timestamps_of(log)))
    if request_id in begin.requests:
        story.arrival = _arrival(begin.requests[request_id])
    else:
        require_request(index, request_id)
    place, inputs, environment = index.at_request(request_id), list[SeenInput](), log.header.started.environment
    if story.arrival is not None:
        inputs = inputs_of(story.arrival.prompt, begin.config, environment)
    for item in fold_items(place.state, place.items):
        if isinstance(item, Folded):
            story.hear(item)
            if isinstance(item.event, RequestArrived) and item.event.id == request_id:
                inputs = inputs_of(item.event.prompt, item.after.config, environment)
            hear(inputs, request_id, item.event, item.before, item.after)
        if story.finish or isinstance(item, Broken):
            break
    if story.arrival is None:
        raise UnusableLog(f"request {request_id} cannot be told of: the log is damaged before it arrives")
    is_back = isinstance(story.arrival, RequestResumed)
    return story.life(story.arrival, log.header, log_before(log) if is_back else "", inputs)


def log_before(log: Log) -> str:
    """The folder of the log that this one continues, "" if it continues none."""
    frame = next((item for item in log.items() if isinstance(item, Frame)), None)
    begun = frame.events[:1] if frame is not None and frame.first_event == 1 else ()
    return begun[0].log if begun and isinstance(begun[0], EngineRecovered) else ""


def _arrival(request: Request) -> RequestArrived:
    """The arrival event of a request that arrived before the log begins."""
    return RequestArrived(
        id=request.id,
        name=request.name,
        prompt=request.prompt,
        sampling=request.sampling,
        priority=request.priority,
        arrival_ns=request.arrival_ns,
        client=request.client,
        weight=request.weight,
    )
