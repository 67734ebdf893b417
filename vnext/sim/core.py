"""The engine of a simulation: the product's own (vnext/sched/engine.py), of which every law is checked each time.

Owns the run's log and all checks of one replica. It has no clock, client, transport or rank: those belong to
simulator.py, and findings.py checks finished logs without them.
"""

from __future__ import annotations

from vnext.sched.engine import Engine, Ready, unchecked
from vnext.sched.schedule import schedule
from vnext.sched.turn import Turn, steady_turn
from vnext.sim.checks.accounting import Accounting
from vnext.sim.checks.plain_state import Divergence, PlainState, contents, differences
from vnext.sim.checks.run_laws import ClientBook, EncodingBook, PinBook, resets_forget
from vnext.sim.laws import event_laws
from vnext.sim.rank_values import shortages_lose_nothing
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestAborted, StepCommitted, StepPlanned, pack_tokens
from vnext.state.laws import check
from vnext.state.outputs import Output
from vnext.state.reduce import reduce, start
from vnext.state.state import State

WHOLE_CHECK_EVENTS = 64
"""The number of events between two checks of old states, which a single event is unlikely to change."""


class Core:
    """One run. Mutable; `seen` is the newest state, `events` its log."""

    def __init__(self, started: EngineStarted, whole_check_events: int = WHOLE_CHECK_EVENTS) -> None:
        self.events: list[AnyEvent] = [started]
        self.engine = Engine(start(started), check=unchecked)
        self.seen = PlainState(self.engine.state)
        self.accounting = Accounting()
        self.pins = PinBook()
        self.clients = ClientBook()
        self.encoding = EncodingBook()
        self.history: History | None = None
        self._whole_check_events = whole_check_events

    @property
    def state(self) -> State:
        return self.seen.state

    def fold(self, event: AnyEvent) -> tuple[Output, ...]:
        """Fold one event and return its news. Raises LawBroken, IllegalEvent or Divergence if the engine is wrong."""
        turn = turn_of(self.state, event)
        try:
            self.engine.fold(event, apart=False)
        finally:
            ready = self.engine.take()
            self.events += ready.events
        return self._checked(ready, turn)

    def _checked(self, ready: Ready, turn: Turn | None = None) -> tuple[Output, ...]:
        """Check what one event did; `turn`: what it would have done together with the plan behind it."""
        before, state, (event,) = self.seen, ready.state, ready.events
        if turn is not None:
            require_same(turn, state)
        self.seen = after = PlainState(state, before)
        check(state)
        event_laws(before, event, after)
        resets_forget(event, after)
        shortages_lose_nothing(before, event, after)
        news = tuple(output for _, outputs, _ in ready.news for output in outputs)
        self.pins.write(before, event, after, news)
        self.clients.write(before, event, after)
        self.encoding.write(before, event, after)
        self.accounting.write(before, event, after, news)
        if state.sequence % self._whole_check_events == 0:
            self.look_back()
            self.history = History(before, event, after)
        return news

    def look_back(self) -> None:
        """Require that the old states still held are unchanged."""
        if self.history is not None:
            self.history.require_unchanged(self.seen)


# ---- turning -------------------------------------------------------------------------------------------------------
# Turning: occasionally a simulation also computes a commit's steady turn, which must equal the reducer and the scheduler.
# Owns the comparison. The turn is computed first and then discarded, so both are futures of one state, and neither may disturb
# the other.

TURN_COMMITS = 3
"""The number of commits between two turns that are computed."""


def turn_of(before: State, event: AnyEvent) -> Turn | None:
    """The steady turn that begins with this event, if one is due."""
    if isinstance(event, StepCommitted) and event.step % TURN_COMMITS == 0:
        return steady_turn(before, event)
    return None


def require_same(turn: Turn, after: State) -> None:
    """Raise Divergence unless the scheduler's plan leads from the state after the commit to the turn's state."""
    plan, usual = schedule(after), StepPlanned(step=after.planned)
    if plan != usual:
        raise Divergence(f"a turn goes on with {usual} where the scheduler says {plan}")
    expected = reduce(after, plan)
    differ = differences(contents(PlainState(turn.state)), contents(PlainState(expected)))
    if differ or digest(turn.state) != digest(expected):
        raise Divergence(f"a turn is not what its events make: {', '.join(differ) or 'the digest'}")


# ---- history -------------------------------------------------------------------------------------------------------
# A state that was left behind stays as it was, whatever is folded afterwards, and can be given another future.
# States share arenas and stores. A bug in that sharing writes into a state that somebody else still holds: a trial of the
# scheduler into the engine's state, the replay of an old state into a newer one.


class History:
    """One event of the run: the states around it, and what they said then."""

    def __init__(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        self._before, self._event, self._after = before.state, event, after.state
        self._reported_before, self._reported_after = contents(before), contents(after)

    def require_unchanged(self, now: PlainState) -> None:
        """Y2: folding the event again gives the same state; another future changes neither the past nor the present."""
        reported_now = contents(now)
        again = reduce(self._before, self._event)
        self._same("the same event of the same state", self._reported_after, again)
        other_future(self._before)
        other_future(self._after)
        self._same("the state before", self._reported_before, self._before)
        self._same("the state after", self._reported_after, self._after)
        self._same("the state made again", self._reported_after, again)
        self._same("the newest state", reported_now, now.state)

    def _same(self, what: str, reported: dict[str, object], state: State) -> None:
        differ = differences(reported, contents(PlainState(state)))
        if differ:
            number = self._before.sequence
            raise Divergence(
                f"Y2: {what} has other {', '.join(differ)} after folding event {number} and other futures again"
            )


def other_future(state: State) -> State:
    """What might have been: one more step, an oldest step with other tokens, and the oldest request aborted."""
    plan = schedule(state)
    if plan is not None:
        state = reduce(state, plan)
    if state.in_flight:
        tokens = pack_tokens([1] * int(state.in_flight[0].samples.sum()))
        state = reduce(state, StepCommitted(step=state.committed, tokens=tokens))
    oldest = [entry.id for entry in state.waiting[:1]] + state.rows.id.tolist()[:1]
    return reduce(state, RequestAborted(ids=tuple(oldest), reason="client")) if oldest else state
