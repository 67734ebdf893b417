"""The engine of a simulation that goes on: it decides by itself, and is tried with what may not happen.

Core (vnext/sim/core.py) checks what each event does; a decision has laws of its own, of which those of microbatches and of
the disk tier are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vnext.sched.engine import Engine, Ready, Source, unchecked
from vnext.sim.checks.fitting import first_chunk, needs_slot
from vnext.sim.checks.microbatch_laws import decoding, parts_of
from vnext.sim.checks.plain_state import Divergence, PlainState, contents, differences
from vnext.sim.core import WHOLE_CHECK_EVENTS, Core
from vnext.sim.laws import decision_laws, going
from vnext.sim.order import policy_keys
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import AnyEvent, EngineStarted, StepPlanned
from vnext.state.outputs import Output
from vnext.state.reduce import reduce
from vnext.state.state import Waiting


class TurnBook:
    """How long each request has been left out of the decisions of one run. Mutable: give it every decision once, in order."""

    def __init__(self) -> None:
        self._decoding: list[int] = []
        self._step = 0
        self._passed: dict[int, int] = {}

    def write(self, before: PlainState, after: PlainState, fills: bool) -> None:
        """S7, S8 of one decision, which `fills` a step and makes no room: a step that does may take everybody. Raises LawBroken.

        S7: a step takes no request whose token is in flight, and at most a part of those that decode.
        S8: while the same requests decode, each of them whose token is not in flight is in one of as many steps as there are
        microbatches, unless a step's budget ends before it.
        """
        if not fills or (parts := parts_of(before)) == 1:
            self._decoding = []
            return
        step, owed = after.in_flight[-1], [id_ for id_, due in zip(before.rows.id, before.rows.placeholders) if due]
        ids = [before.rows.id[row] for row in decoding(before)]
        taken = [id_ for id_ in step.ids if id_ in ids]
        if len(taken) > -(-len(ids) // parts) or set(taken) & set(owed):
            raise LawBroken("S7", f"step {step.step} takes {taken} of {ids}, and tokens of {owed} are in flight")
        if ids != self._decoding or step.step != self._step + 1 or sum(step.counts) >= before.state.config.max_num_batched_tokens:
            self._passed = {}
        self._decoding, self._step = ids, step.step
        self._passed = {id_: self._passed.get(id_, 0) + 1 for id_ in ids if id_ not in taken and id_ not in owed}
        if late := [id_ for id_, steps in self._passed.items() if steps >= parts]:
            raise LawBroken("S8", f"step {step.step} is the last of {parts} that leave out the requests {late}")


def tiers_block_nobody(before: PlainState, preempted: Sequence[int], after: PlainState, best: Waiting | None) -> None:
    """K2: while a transfer holds pages, no row is preempted for want of pages, and the best request without one does not wait for
    them.

    `best`: that one, of those that may be admitted; None where one was.
    """
    if before.state.tier is None or not before.state.tier.transfers:
        return
    if preempted:
        raise LawBroken("K2", f"rows {preempted} give way while blocks are read from disk")
    if best is None or len(after) >= after.state.config.max_num_seqs or before.state.cautious:
        return
    budget = before.state.config.max_num_batched_tokens - sum(after.in_flight[-1].counts)
    if budget > 0 and not needs_slot(after, best) and not first_chunk(before, after, best, budget, transfers=True):
        return
    if budget > 0 and not needs_slot(after, best) and not first_chunk(before, after, best, budget):
        raise LawBroken("K2", f"request {best.id} waits for pages into which blocks are read from disk")


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
