"""Walking: the moments of a log, each step with the states around it, in any order at once.

Owns what is kept between two questions. States are immutable and share almost everything, so a few hundred of them cost
little, and a step back is as quick as a step on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock

import msgspec

from vnext.replay.index import Index
from vnext.replay.source import UnusableLog
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, StepPlanned
from vnext.state.log import Frame
from vnext.state.reduce import reduce
from vnext.state.state import State

KEPT = 256


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A step: the state in which it was decided, the decision, the state after it. `since` are the events that came
    between the plan before it and its own, with their numbers."""

    event: int
    plan: StepPlanned
    before: State
    after: State
    since: tuple[tuple[int, AnyEvent], ...]

    @property
    def step(self) -> int:
        return self.plan.step


class Walk:
    """One log. `lock` is held by whoever asks or reads a state of it: reading an old version changes what lies behind it."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.lock = Lock()
        self._kept: OrderedDict[int, Moment] = OrderedDict()
        self._ahead: tuple[int, Iterator[Moment]] | None = None

    @property
    def first_step(self) -> int:
        return self.index.first.planned

    @property
    def last_step(self) -> int:
        """The last step of the log; one before `first_step` in a log that has none."""
        return self.index.last.planned - 1

    def moment(self, step: int) -> Moment:
        """UnusableLog if the log has no such step."""
        found = self._kept.get(step)
        return found if found is not None else self._sought(step)

    def moments(self, first: int, last: int) -> list[Moment]:
        """Steps `first` to `last`, those of them that the log has."""
        first, last = max(first, self.first_step), min(last, self.last_step)
        return [self.moment(step) for step in range(first, last + 1)]

    def _sought(self, step: int) -> Moment:
        if not self.first_step <= step <= self.last_step:
            raise UnusableLog(f"step {step} is not in this log: it has steps {self.first_step} to {self.last_step}")
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._from(step))
        for moment in self._ahead[1]:
            self._keep(moment)
            if moment.step == step:
                self._ahead = (step + 1, self._ahead[1])
                return moment
        self._ahead = None
        raise UnusableLog(f"step {step} cannot be reached: folding ends before it")

    def _keep(self, moment: Moment) -> None:
        self._kept[moment.step] = moment
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _from(self, step: int) -> Iterator[Moment]:
        """Moments from one shortly before `step` on, to the end of what can be folded."""
        place = self.index.at_step(max(self.first_step, step - 1))
        state, since = place.state, []
        for item in place.items:
            if not isinstance(item, Frame):
                continue
            if item.first_event != state.sequence:
                return
            for number, event in enumerate(item.events, item.first_event):
                try:
                    after = reduce(state, event)
                except IllegalEvent:
                    return
                if isinstance(event, StepPlanned):
                    yield Moment(event=number, plan=event, before=state, after=after, since=tuple(since))
                    since = []
                else:
                    since.append((number, event))
                state = after
