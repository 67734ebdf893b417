"""Recovery: other ranks in the place of those that died, hang or have drifted, while the engine core goes on.

Owns the order: the lost ranks are ended, others start at once, or later where several were lost in a row, and load when the lost
ones' memory is free, or beside it where the system does not let go of a lost one. Gives up where `restarts_max` have been lost in a
row without a step's result between. engine_core.py makes events of it and sends the state to the new ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict

from vnext.base.spelling import reason
from vnext.runtime.engine.due_reports import Drifted
from vnext.runtime.engine.executor import Executor
from vnext.runtime.engine.facility import Facility
from vnext.runtime.engine.progress import RanksStalled
from vnext.runtime.processes.subprocesses import ChildDied, HostLost, RankStartFailed
from vnext.runtime.protocol.messages import RankReady
from vnext.runtime.transport.ring.common import RingClosed, RingCorrupt
from vnext.sched.shortage import SUFFICED, is_stuck, patience, raised, ran_short
from vnext.state.events import EngineRecovered, MemoryRanShort, RequestId, StepLimitRaised
from vnext.state.state import State

FIRST_DELAY_S, DELAY_MAX_S = 0.1, 10.0
HELD_MAX_S = 10.0
"""A killed process gives its memory back within a moment, unless it waits inside the system, which SIGKILL does not end."""
STUCK_MAX, STUCK_S = 8, 0.01
"""Attempts at a step that lacks memory and cannot be smaller, and how long the first waits; each next one waits twice as long."""
MAY_DIFFER = ("page_count_max", "draft_costs", "disk")
"""Facts that a start measures; a cache keeps its size."""
log = logging.getLogger(__name__)


class RankGaveUp(RuntimeError):
    """A rank has reported that it cannot go on."""


class NoMoreRanks(RuntimeError):
    """The engine ends: no ranks can take the place of those that were lost. One sentence."""


LOSSES = (ChildDied, RanksStalled, RankGaveUp, Drifted, RingClosed, RingCorrupt, HostLost)
"""Errors after which other ranks can go on with what the engine core knows."""
START_ERRORS = (ChildDied, RankStartFailed, HostLost, OSError)


class OtherRanks:
    """Lost ranks that are being ended, and those that start in their place. Mutable. `again(generation)` makes an executor of new
    processes. They load when no lost one holds memory any more, or beside those that the system does not let go of."""

    def __init__(self, again: Callable[[int], Executor] | None) -> None:
        self.again = again
        self._lost: list[Executor] = []
        self._next: Executor | None = None
        self._loads = False
        self._generation = 0
        self._held_until_s = self.due_s = 0.0

    def end(self, ranks: Executor) -> None:
        """Those of an engine that lost some of them."""
        ranks.kill()
        self._lost.append(ranks)
        self._held_until_s = time.monotonic() + HELD_MAX_S

    def end_next(self) -> None:
        """Those that could not start."""
        failed, self._next = self._next, None
        if failed is not None:
            self.end(failed)

    def look(self) -> tuple[Executor, Sequence[RankReady]] | None:
        """New ranks, started from `due_s` on, once they have loaded, with what they report. Raises one of START_ERRORS."""
        ended = [each for each in self._lost if each.has_ended]
        self._lost = [each for each in self._lost if each not in ended]
        for each in ended:
            each.stop(0.0)
        if self._next is None and time.monotonic() >= self.due_s:
            assert self.again is not None, "ranks are lost only where others can start"
            self._generation += 1
            self._next, self._loads = self.again(self._generation), False
        if self._next is None or (self._lost and time.monotonic() < self._held_until_s):
            return None
        if not self._loads:
            self._loads = True
            if self._lost:
                log.warning("Ranks that were killed have not ended: the system holds them. Others load beside them.")
            self._next.begin()
        if (facts := self._next.started()) is None:
            return None
        ranks, self._next = self._next, None
        return ranks, facts

    def stop(self) -> None:
        """End what has been begun."""
        for each in (*self._lost, *([] if self._next is None else [self._next])):
            each.kill()
            each.stop(0.0)
        self._lost, self._next = [], None


class Recovery:
    """How often the ranks of one engine were lost, and what becomes of it then. Mutable.

    `sentence` is "" unless there are no ranks now. `count` and `seconds` are of the recoveries that are complete; `stall_count` and
    `stall_seconds` of executors that were lost.
    """

    def __init__(
        self,
        again: Callable[[int], Executor] | None = None,
        restarts_max: int = 0,
        facts: Sequence[RankReady] = (),
        log_dir: str = "",
    ) -> None:
        """`again`: as of OtherRanks; None: there can be none. `facts`: what the first ranks reported when they were ready.
        `log_dir`: the folder for stacks, "" for none."""
        self._restarts_max, self._log_dir = restarts_max, log_dir
        self._facts = [_lasting(each) for each in facts]
        self._poison, self._others = PoisonGuard(), OtherRanks(again)
        self._in_a_row = 0
        self._first_step = -1  # a commit of this step or a later one is progress
        self._began_s = 0.0
        self.sentence = ""
        self.count, self.seconds = 0, 0.0
        self.stall_count, self.stall_seconds = 0, 0.0

    def begin(self, error: Exception, ranks: Executor, state: State) -> tuple[EngineRecovered, dict[int, str]]:
        """Take the loss of these ranks: the event of it, and whom to abort before, with the error for its client. Raises `error`
        or NoMoreRanks where the engine cannot go on."""
        if isinstance(error, RanksStalled):
            self._keep_stacks(ranks.stacks(state.in_flight[0].step), state.in_flight[0].step)
        if self._others.again is None or not self._restarts_max:
            raise error
        if state.committed > self._first_step:
            self._in_a_row = 0
        self._first_step, self._began_s = state.planned, time.monotonic()
        count, seconds = ranks.stalls
        self.stall_count += count
        self.stall_seconds += seconds
        self._others.end(ranks)
        self._start_others(error)
        cause = cause_of(error)
        self.sentence = f"The engine's ranks are started again: {cause}."
        blamed, cautious = self._poison.judge(state)
        return EngineRecovered(cause=cause, cautious=cautious), {} if blamed is None else blame(blamed, cause)

    def look(self) -> tuple[Executor, Sequence[RankReady]] | None:
        """As OtherRanks.look, without waiting. Raises NoMoreRanks."""
        try:
            found = self._others.look()
        except START_ERRORS as error:
            self._others.end_next()
            self._start_others(error)
            return None
        if found is not None:
            self._require_same(*found)
            self.sentence = ""
            self.count += 1
            self.seconds += (seconds := time.monotonic() - self._began_s)
            log.warning("The engine goes on with new ranks after %.1f s.", seconds)
        return found

    def _start_others(self, error: Exception) -> None:
        """Decide when others start. Raises NoMoreRanks."""
        count, self._in_a_row = self._in_a_row, self._in_a_row + 1
        if count >= self._restarts_max:
            times = "once" if count == 1 else f"{count} times in a row"
            raise NoMoreRanks(f"{error}\nThe ranks were started again {times} without a step's result")
        delay_s = min(FIRST_DELAY_S * 2 ** (count - 1), DELAY_MAX_S) if count else 0.0
        self._others.due_s = time.monotonic() + delay_s
        log.warning("The engine starts new ranks%s: %s", f" in {delay_s:g} s" if delay_s else "", error)

    def _require_same(self, ranks: Executor, facts: Sequence[RankReady]) -> None:
        """End the new ranks and raise NoMoreRanks if they would give other tokens."""
        for before, now in zip(self._facts, map(_lasting, facts)):
            if names := [name for name in before if before[name] != now[name]]:
                self._others.end(ranks)
                raise NoMoreRanks(
                    f"the ranks that were started again differ from those before in {', '.join(names)}: have the model's files or "
                    "the machine changed? Start the engine again"
                )

    def _keep_stacks(self, stacks: dict[int, str], step: int) -> None:
        for rank, text in stacks.items():
            if not text:
                log.warning("Rank %d could not write its stack: it is stopped, or held inside the system.", rank)
            elif not self._log_dir:
                log.warning("The stack of rank %d at step %d:\n%s", rank, step, text)
            else:
                path = Path(self._log_dir) / f"stacks-of-rank-{rank}-at-step-{step}.txt"
                try:
                    path.write_text(text)
                except OSError as error:
                    log.warning("The stack of rank %d could not be written (%s):\n%s", rank, reason(error), text)
                else:
                    log.warning("The stack of rank %d is in %s.", rank, path)

    def stop(self) -> None:
        """As OtherRanks.stop."""
        self._others.stop()


def cause_of(error: Exception) -> str:
    """What was lost, in one sentence without a process's last lines, which a log without texts must not hold."""
    return error.how if isinstance(error, ChildDied) else str(error)


def blame(id_: RequestId, cause: str) -> dict[int, str]:
    """Why a request is aborted that has killed the ranks, for its client."""
    return {id_: f"the engine's ranks were lost twice in a row while they computed this request, so it was ended: {cause}"}


def _lasting(facts: RankReady) -> dict[str, object]:
    return {name: value for name, value in asdict(facts).items() if name not in MAY_DIFFER}


# ---- poison --------------------------------------------------------------------------------------------------------
# Poison: which requests may have killed the ranks, from the steps that were in flight when they died. Pure but for its memory.
# A request that kills its ranks does so again where it has come to the same token. So after the second death in a row a request
# that was in flight at both and has got no token between is suspected. If there was no other in flight at either, it is to
# blame. Else the engine goes on cautiously: requests join the batch one at a time, so that the next death has one suspect,
# which is to blame. A request that has got no more tokens than may have been sampled and lost with their steps at the death
# before (`_lost_max`) is not blamed, but does not leave another as the only suspect either. One case is left in doubt: a prompt
# whose last token is computed in the step in which the next request joins. Of these two, should they come again, the one that
# joined is blamed, and the other one if it comes once more.


class Verdict(NamedTuple):
    """The request to blame, None for none, and EngineRecovered.cautious."""

    blamed: RequestId | None
    cautious: int


class PoisonGuard:
    """What was in flight at the last death. Mutable."""

    def __init__(self) -> None:
        self._before: dict[RequestId, int] = {}  # by request, the tokens known
        self._lost_max = 0
        self._suspects: set[RequestId] = set()
        self._doubted: set[RequestId] = set()  # those that went free when the other one was blamed
        self._is_cautious = False

    def judge(self, state: State) -> Verdict:
        """Take the ranks' death in this state."""
        flown = in_flight(state)
        if not flown:
            return Verdict(None, state.cautious)
        got = {id_: known - self._before[id_] for id_, known in flown.items() if id_ in self._before}
        suspects = {id_ for id_, count in got.items() if count <= self._lost_max}
        same = {id_ for id_ in suspects if not got[id_]}
        is_alone = len(flown) == 1 == len(self._before)
        is_clear = len(suspects) == 1 and (is_alone or self._is_cautious)
        is_again = self._is_cautious and suspects == self._suspects
        per_step = 1 + (state.config.speculation.num_speculative_tokens if state.config.speculation else 0)
        self._before, self._lost_max, self._suspects = flown, (len(state.in_flight) - 1) * per_step, suspects
        if same and (is_clear or is_again):
            blamed = next(id_ for id_ in reversed(flown) if id_ in (same & self._doubted or same))
            self._doubted = suspects - {blamed}
            del flown[blamed]
            self._is_cautious = False
            return Verdict(blamed, 0)
        self._is_cautious = bool(suspects)
        return Verdict(None, state.next_id if suspects else 0)


def in_flight(state: State) -> dict[RequestId, int]:
    """The live requests in steps in flight, in the order of the batch, and how many of their tokens are known."""
    known = dict(zip(state.rows.id.tolist(), state.rows.known.tolist()))
    known |= {entry.id: len(entry.tokens) // 4 for entry in state.waiting}
    flown = {id_ for step in state.in_flight for id_ in step.ids.tolist()}
    return {RequestId(id_): count for id_, count in known.items() if id_ in flown}


# ---- shortages of memory -----------------------------------------------------------------------------------------
# A rank lacks memory for a step, and later it suffices again: decisions are those of vnext/sched/shortage.py. Where a step cannot
# be cut any more, the next attempt waits a little, and after STUCK_MAX in a row the ranks start again.


WITHOUT_MEMORY, WITHOUT_INPUT = "Memory ran short", "An input was gone"


class Shortages(Facility):
    """Those of one engine. Mutable. `is_on` while steps take less than the engine started with."""

    is_on = False

    def __init__(self) -> None:
        """Memory has sufficed so far."""
        self._wait, self._since, self._next_step, self._stuck = SUFFICED, 0, -1, 0
        self._raised_at: int | None = None
        self.count = 0

    def lacking(self, state: State, cause: str, what: str = WITHOUT_MEMORY) -> MemoryRanShort:
        """The event of a shortage, as `what` says, in the oldest step in flight. Raises RankGaveUp where the step cannot
        be smaller and was tried often enough."""
        event = ran_short(state, cause)
        is_early = self._raised_at is not None and state.committed - self._raised_at < self._wait
        self._wait_if_stuck(state, cause)
        if not self.count or event.limit < state.config.max_num_batched_tokens:
            log.warning("%s at step %d, steps take %d tokens at most for now: %s.", what, event.step, event.limit, cause)
        self.count, self.is_on = self.count + 1, state.config.chunked_prefill
        self._wait, self._raised_at = patience(self._wait, is_early), None
        self._since = self._next_step = state.planned
        return event

    def _wait_if_stuck(self, state: State, cause: str) -> None:
        again = state.in_flight[0].step == self._next_step  # no step has been computed between
        self._stuck = self._stuck + 1 if again and is_stuck(state) else 0
        if self._stuck >= STUCK_MAX:
            self._stuck = 0
            raise RankGaveUp(f"{cause}, for a step that cannot be smaller, {STUCK_MAX + 1} times in a row")
        if self._stuck:
            time.sleep(STUCK_S * 2 ** (self._stuck - 1))

    def next_event(self, state: State) -> StepLimitRaised | None:
        """A higher limit, once enough steps have had enough."""
        if not state.lowered_from or state.committed - self._since < self._wait:
            self.is_on = state.lowered_from > 0
            return None
        self._since = self._raised_at = state.committed
        event = raised(state)
        if event.limit == state.lowered_from:
            log.warning("Memory suffices again: steps take %d tokens.", event.limit)
        return event

    def stats(self, state: State) -> Mapping[str, object]:
        return {"shortages": self.count, "step_tokens_max": state.config.max_num_batched_tokens}
