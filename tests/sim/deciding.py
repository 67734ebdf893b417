"""The engine of a simulation that goes on: it decides by itself, and is tried with what may not happen.

Core (vnext/sim/core.py) checks what each event does; a decision has laws of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vnext.sched.engine import Engine, Ready, Source, unchecked
from vnext.sim.checks.microbatch_laws import TurnBook
from vnext.sim.checks.plain_state import Divergence, PlainState, contents, differences
from vnext.sim.checks.run_laws import tiers_block_nobody
from vnext.sim.core import WHOLE_CHECK_EVENTS, Core
from vnext.sim.laws import decision_laws, going
from vnext.sim.order import policy_keys
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, EngineStarted, StepPlanned
from vnext.state.outputs import Output
from vnext.state.reduce import reduce


class DecidingCore(Core):
    """One run, with the sources of its events. Mutable."""

    def __init__(
        self, started: EngineStarted, whole_check_events: int = WHOLE_CHECK_EVENTS, sources: Sequence[Source] = ()
    ) -> None:
        super().__init__(started, whole_check_events)
        self.engine = Engine(self.state, list(sources), unchecked)
        self.turns = TurnBook()

    def decide(self, hear: Callable[[tuple[Output, ...]], None] | None = None) -> StepPlanned | None:
        """The next decision, folded and checked, behind the events of the sources, each of whose news somebody hears; None if it is
        rightly to do nothing. A source's event is carried out before the next one, as it may come in another frame."""
        plan, before = None, self.seen
        for ready in self._turn():
            before, plan = self.seen, ready.plan
            news = self._checked(ready)
            if plan is None and hear is not None:
                hear(news)
        before = self.seen if plan is None else before
        self.turns.write(before, self.seen, plan is not None and not (plan.preempted or plan.changed))
        decision_laws(before, plan, self.seen)
        if plan is not None:
            self.encoding.decided(before, bool(plan.preempted or plan.changed))
        if plan is not None and before.state.tier:
            key_of = policy_keys(before)
            queue = () if plan.admitted else going(self.seen)
            best = min(queue, key=lambda entry: key_of[entry.id], default=None)
            tiers_block_nobody(before, plan.preempted, self.seen, best)
        return plan

    def _turn(self) -> Iterator[Ready]:
        """A turn of the engine, each value behind its events' place in the log."""
        try:
            for ready in self.engine.turn():
                self.events += ready.events
                yield ready
        except Exception:
            self.events += self.engine.take().events  # the last of them broke the engine
            raise

    def require_refused(self, event: AnyEvent) -> None:
        """Require that an event that may not happen now is refused and changes nothing."""
        if not self._refuses(event):
            raise Divergence(f"{type(event).__name__} should have been refused: {event}")

    def try_to_fold(self, plan: StepPlanned) -> bool:
        """Fold a plan that the scheduler did not decide, or require that its refusal changes nothing. Checks every law
        except those of a decision.
        """
        if self._refuses(plan):
            return False
        self.clients.restart()
        self.fold(plan)
        self.clients.restart()
        return True

    def _refuses(self, event: AnyEvent) -> bool:
        before = contents(self.seen)
        try:
            reduce(self.state, event)
            refused = False
        except IllegalEvent:
            refused = True
        differ = differences(before, contents(PlainState(self.state)))
        if differ:
            what = "was refused and changed" if refused else "may happen, and trying it changed"
            raise Divergence(f"Y2: {type(event).__name__} {what} {', '.join(differ)}")
        return refused
