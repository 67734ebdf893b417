"""The engine core of a simulation: folds events, decides, refuses, and asks every law each time.

Owns the run's state, its log and all that is checked of one replica. It knows no clock, client, transport or rank: those
are the simulator's (simulator.py), and whoever judges a finished log has none (judge.py).
"""

from __future__ import annotations

from vnext.sched.schedule import schedule
from vnext.sched.sim.books import Books
from vnext.sched.sim.contents import contents, differences
from vnext.sched.sim.errors import Divergence
from vnext.sched.sim.laws import decision_laws, event_laws
from vnext.sched.sim.past import Past
from vnext.sched.sim.quick import check_after
from vnext.sched.sim.snapshot import Snapshot
from vnext.state.committing import settle
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, EngineStarted, StepCommitted, StepPlanned
from vnext.state.laws import check
from vnext.state.outputs import Output, outputs
from vnext.state.reduce import reduce, start
from vnext.state.state import State

WHOLE_CHECK_EVENTS = 64
"""Events between two checks of what no single event is likely to break: every law anew, and old states."""


class Core:
    """One run. Mutable; `seen` is the newest state, `events` its log."""

    def __init__(self, started: EngineStarted, whole_check_events: int = WHOLE_CHECK_EVENTS) -> None:
        self.events: list[AnyEvent] = [started]
        self.seen = Snapshot(start(started))
        self.books = Books()
        self.past: Past | None = None
        self._whole_check_events = whole_check_events

    @property
    def state(self) -> State:
        return self.seen.state

    def fold(self, event: AnyEvent) -> tuple[Output, ...]:
        """One more event; its news. Raises LawBroken, IllegalEvent or Divergence where the engine is wrong."""
        before = self.seen
        settled = settle(before.state, event) if isinstance(event, StepCommitted) else None
        self.events.append(event)
        state = reduce(before.state, event, settled)
        self.seen = after = Snapshot(state, before)
        check_after(before, after)
        event_laws(before, event, after)
        news = outputs(before.state, event, state, settled)
        self.books.write(before, event, after, news)
        if state.sequence % self._whole_check_events == 0:
            self._check_whole(before, event)
        return news

    def _check_whole(self, before: Snapshot, event: AnyEvent) -> None:
        """Every law anew, and the past as it was."""
        check(self.state)
        self.look_back()
        self.past = Past(before, event, self.seen)

    def look_back(self) -> None:
        """What is still held of the past must be as it was."""
        if self.past is not None:
            self.past.require_unchanged(self.seen)

    def decide(self) -> StepPlanned | None:
        """The next decision, folded and checked; None if it is to do nothing, and rightly so."""
        plan, before = schedule(self.state), self.seen
        if plan is not None:
            self.fold(plan)
        decision_laws(before, plan, self.seen)
        return plan

    def require_refused(self, event: AnyEvent) -> None:
        """An event that may not happen now is refused and changes nothing."""
        if not self._refuses(event):
            raise Divergence(f"{type(event).__name__} should have been refused: {event}")

    def try_to_fold(self, plan: StepPlanned) -> bool:
        """Fold a plan that nobody decided, unless it is refused and changes nothing. Every law but a decision's own."""
        if self._refuses(plan):
            return False
        self.fold(plan)
        return True

    def _refuses(self, event: AnyEvent) -> bool:
        said = contents(self.seen)
        try:
            reduce(self.state, event)
            refused = False
        except IllegalEvent:
            refused = True
        differ = differences(said, contents(Snapshot(self.state)))
        if differ:
            what = "was refused and changed" if refused else "may happen, and trying it changed"
            raise Divergence(f"Y2: {type(event).__name__} {what} {', '.join(differ)}")
        return refused
