"""The walk: the moments of a log, each a step with the states around it, in any order and without delay.

Owns what is kept between two questions. States are immutable and share almost everything, so a few hundred of them cost
little, and a step back is as fast as a step forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock
from typing import Literal

import msgspec

from vnext.log.codec import Frame
from vnext.replay.reading.index import Index, Place, Unindexed
from vnext.replay.reading.source import UnusableLog
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, StepPlanned
from vnext.state.reduce import reduce
from vnext.state.state import State

KEPT = 256
LEAD = 48
"""This many steps before the requested one are kept too, because the page asks for its neighbours next."""
Kind = Literal["step", "event", "request"]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A step: the state in which it was decided, the decision, the state after it. `since` are the events between the
    previous plan and its own, with their numbers."""

    event: int
    plan: StepPlanned
    before: State
    after: State
    since: tuple[tuple[int, AnyEvent], ...]

    @property
    def step(self) -> int:
        return self.plan.step


class Following:
    """Makes moments from frames in order, starting at a state. Mutable."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._since: list[tuple[int, AnyEvent]] = []

    def take(self, frame: Frame) -> Iterator[Moment]:
        """The steps that a frame plans. Raises IllegalEvent if the frame does not follow."""
        if frame.first_event != self.state.sequence:
            raise IllegalEvent(f"{frame.lost} frames are missing before event {frame.first_event}")
        for number, event in enumerate(frame.events, frame.first_event):
            before = self.state
            self.state = reduce(before, event)
            if isinstance(event, StepPlanned):
                since, self._since = tuple(self._since), []
                yield Moment(event=number, plan=event, before=before, after=self.state, since=since)
            else:
                self._since.append((number, event))


class Walk:
    """One log. Callers hold `lock` to ask or to read its states: reading an old version changes the store behind it."""

    def __init__(self, index: Index | None) -> None:
        self.index = index
        self.lock = Lock()
        self._kept: OrderedDict[int, Moment] = OrderedDict()
        self._ahead: tuple[int, Iterator[Moment]] | None = None

    def indexed(self) -> Index:
        """The index, which a log that grows lacks until someone asks for the past."""
        assert self.index is not None
        return self.index

    @property
    def first_step(self) -> int:
        return self.indexed().first.planned

    @property
    def last_step(self) -> int:
        """The last step of the log; `first_step` - 1 for a log without steps."""
        return self.indexed().last.planned - 1

    @property
    def events(self) -> int:
        """The number of events of the log, including those before its beginning."""
        return self.indexed().last.sequence

    @property
    def requests(self) -> int:
        return self.indexed().last.next_id

    def place(self, kind: Kind, value: int) -> Place:
        """A state shortly before this step, event or request."""
        return self._at(self.indexed(), kind, value)

    def moment(self, step: int) -> Moment:
        """Raises UnusableLog if the log has no such step."""
        found = self._kept.get(step)
        return found if found is not None else self._sought(step)

    def moments(self, first: int, last: int) -> list[Moment]:
        """Those of the steps `first` to `last` that the log has."""
        first, last = max(first, self.first_step), min(last, self.last_step)
        return [self.moment(step) for step in range(first, last + 1)]

    def _sought(self, step: int) -> Moment:
        if not self.first_step <= step <= self.last_step:
            raise UnusableLog(f"step {step} is not in this log: it has steps {self.first_step} to {self.last_step}")
        found = self._reached(step, self._ahead[1]) if self._ahead is not None and self._ahead[0] == step else None
        found = found or self._reached(step, self._from(step))
        if found is None:
            raise UnusableLog(f"step {step} cannot be reached: folding ends before it")
        return found

    def _reached(self, step: int, moments: Iterator[Moment]) -> Moment | None:
        """The step among these moments, whose iterator continues after it next time; None if they end before it."""
        for moment in moments:
            self._keep(moment)
            if moment.step == step:
                self._ahead = (step + 1, moments)
                return moment
        self._ahead = None
        return None

    def _keep(self, moment: Moment) -> None:
        self._kept[moment.step] = moment
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _from(self, step: int) -> Iterator[Moment]:
        """Moments from shortly before `step` to the end of what can be folded."""
        try:
            place = self.place("step", max(self.first_step, step - LEAD))
        except Unindexed:  # another segment lacks its index; the step itself may not need it
            place = self.place("step", max(self.first_step, step - 1))
        following, items = Following(place.state), place.items
        del place  # holding this version would keep everything folded from it
        for item in items:
            if isinstance(item, Frame):
                try:
                    yield from following.take(item)
                except IllegalEvent:
                    return

    @staticmethod
    def _at(index: Index, kind: Kind, value: int) -> Place:
        return {"step": index.at_step, "event": index.at_event, "request": index.at_request}[kind](value)
