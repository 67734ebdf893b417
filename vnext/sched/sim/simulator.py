"""The simulator: the whole engine without processes, devices or time.

Real `reduce` and `schedule`, a virtual clock, several ranks that fold the same events, a toy model, a shadow cache, and
faults of one seed: bursts, aborts at any phase, late, lost, duplicate and reordered results, slow and crashed ranks,
resets, clocks that jump, events that may not happen. All laws are checked after every event (core.py, fleet.py); every
stream is compared with the model's own answer.
"""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from vnext.sched.sim.chance import Chance
from vnext.sched.sim.core import Core
from vnext.sched.sim.errors import Divergence
from vnext.sched.sim.fleet import Fleet
from vnext.sched.sim.mischief import illegal_event, strange_plan
from vnext.sched.sim.rank import StepResult
from vnext.sched.sim.setting import NEVER, Client, Scenario, servable
from vnext.sched.sim.toy import Answer, answer
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    pack_tokens,
)
from vnext.state.refusal import refusal
from vnext.state.state import State

STEP_US = 50
TOKEN_US = 10
RETRY_US = 2_000
STEPS_PER_TOKEN_MAX = 20
STEPS_PER_TOKEN_MAX_ON_A_WHIM = 200

Kind = Literal["arrival", "abort", "reset", "shutdown", "result", "wake"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation left: its log, its last state, each request's stream, and how long it took in virtual time."""

    events: tuple[AnyEvent, ...]
    state: State
    answers: dict[int, Answer]
    refused: int
    duration_us: int


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its end. Raises LawBroken, IllegalEvent or Divergence where the engine is wrong."""
    simulation = Simulation(scenario)
    simulation.run_and_require_all()
    return simulation.outcome()


class Simulation:
    """One run. Mutable; everything that decides is in the core's state and in its events."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.chance = Chance(scenario.seed).fork()
        started = EngineStarted(
            config=scenario.config, model="toy", model_digest="", world_size=scenario.rank_count, environment={},
            started_ns=0,
        )  # fmt: skip
        self.core = Core(started)
        self.fleet = Fleet(self.core, started, scenario.faults, self.chance)
        self.now_us = 0
        self.busy_until_us = 0
        self.refused = 0
        self._results: dict[int, bytes] = {}
        self._asked_by: dict[int, Client] = {}
        self._ids: dict[int, int] = {}
        self._leaving: list[int] = []
        self._due: list[tuple[int, int, Kind, object]] = []
        self._order = 0
        self._expect_clients()

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def events(self) -> list[AnyEvent]:
        """The log so far, EngineStarted first."""
        return self.core.events

    def _expect_clients(self) -> None:
        for number, client in enumerate(self.scenario.clients):
            self._at(client.arrival_us, "arrival", number)
            if client.abort_us != NEVER:
                self._at(client.abort_us, "abort", number)
        for time_us in self.scenario.reset_us:
            self._at(time_us, "reset", None)
        if self.scenario.shutdown_us != NEVER:
            self._at(self.scenario.shutdown_us, "shutdown", None)

    def _at(self, time_us: int, kind: Kind, what: object) -> None:
        self._order += 1
        heapq.heappush(self._due, (time_us, self._order, kind, what))

    def run_and_require_all(self) -> None:
        """The whole run and every law of it. Raises LawBroken, IllegalEvent or Divergence where the engine is wrong."""
        self.run()
        self.require_clean_end()
        self.require_right_answers()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nothing is due any more."""
        tokens = sum(len(client.prompt) + client.sampling.max_tokens for client in self.scenario.clients)
        most = tokens * (STEPS_PER_TOKEN_MAX_ON_A_WHIM if self.scenario.faults.whim else STEPS_PER_TOKEN_MAX)
        while self._due:
            self.now_us = self._due[0][0]
            while self._due and self._due[0][0] == self.now_us:
                _, _, kind, what = heapq.heappop(self._due)
                self._meet(kind, what)
            self._abort()
            if self.chance.happens(self.scenario.faults.illegal):
                self.core.require_refused(illegal_event(self.chance, self.core.seen))
            self._plan()
            self.fleet.end_of_iteration()
            if self.state.planned > most:
                raise Divergence(f"L1: {self.state.planned} steps for {tokens} tokens, and no end")

    def _meet(self, kind: Kind, what: object) -> None:
        match kind:
            case "arrival":
                self._arrive(what)
            case "abort":
                if what in self._ids:
                    self._leaving.append(self._ids[what])
            case "reset":
                self._fold(PrefixCacheReset())
            case "shutdown":
                live = [*(entry.id for entry in self.state.waiting), *self.core.seen.id]
                self._fold(RequestAborted(ids=tuple(live), reason="shutdown"))
            case "result":
                self._take_result(what)
            case "wake":
                pass

    def _abort(self) -> None:
        """All that leave at one time leave in one event, some of them named twice."""
        if not self._leaving:
            return
        again = self._leaving[:1] if self.chance.happens(20) else []
        self._fold(RequestAborted(ids=(*self._leaving, *again), reason="client"))
        self._leaving = []

    def _arrive(self, number: int) -> None:
        client = self.scenario.clients[number]
        arrival = RequestArrived(
            id=self.state.next_id,
            name=str(number),
            prompt=pack_tokens(client.prompt),
            sampling=client.sampling,
            priority=client.priority,
            arrival_ns=1000 * (self.now_us + self._clock_error_us()),
            cache_salt=client.cache_salt,
        )
        refused = refusal(self.scenario.config, arrival) is not None
        if refused == servable(self.scenario.config, client):
            raise Divergence(f"L1: a request that {'fits is refused' if refused else 'can never fit is not refused'}")
        if refused:
            self.refused += 1
            self.core.require_refused(arrival)
            return
        self._ids[number], self._asked_by[arrival.id] = arrival.id, client
        self._fold(arrival)

    def _clock_error_us(self) -> int:
        """How far the wall clock is wrong now, in either direction."""
        most = self.scenario.faults.clock_jump_us
        return self.chance.between(-most, most) if most else 0

    def _fold(self, event: AnyEvent) -> None:
        """One more event of the engine: folded, checked, recorded, told to clients and to every rank."""
        self.core.fold(event)
        self._tell_ranks()

    def _tell_ranks(self) -> None:
        result = self.fleet.tell()
        if result is not None:
            self._send(result)

    # ---- decisions and steps -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Fill the pipeline; a hesitating engine core comes back a little later."""
        faults, chance = self.scenario.faults, self.chance
        while True:
            if chance.happens(faults.hesitation) and self.state.requests:
                self._at(self.now_us + 1 + chance.below(STEP_US), "wake", None)
                return
            if chance.happens(faults.whim):
                self._plan_on_a_whim()
            elif self.core.decide() is None:
                return
            else:
                self._tell_ranks()

    def _plan_on_a_whim(self) -> None:
        plan = strange_plan(self.chance, self.core.seen)
        if plan is not None and self.core.try_to_fold(plan):
            self._tell_ranks()

    def _send(self, result: StepResult) -> None:
        """When the engine core will hear of a step: ranks run one step after another, the transport adds its faults."""
        faults, chance = self.scenario.faults, self.chance
        cost_us = STEP_US + TOKEN_US * sum(self.core.seen.flights[-1].counts)
        cost_us *= 10 if chance.happens(faults.slow_step) else 1
        self.busy_until_us = max(self.busy_until_us, self.now_us) + cost_us
        time_us = self.busy_until_us
        time_us += chance.below(10 * STEP_US) if chance.happens(faults.late_result) else 0
        time_us += RETRY_US if chance.happens(faults.lost_result) else 0
        self._at(time_us, "result", result)
        if chance.happens(faults.duplicate_result):
            self._at(time_us + chance.below(RETRY_US), "result", result)

    def _take_result(self, result: StepResult) -> None:
        """Commit in step order: an early result waits, a second one is dropped."""
        event = StepCommitted(step=result.step, tokens=result.tokens)
        if result.step != self.state.committed:
            self.core.require_refused(event)
        if result.step < self.state.committed:
            return
        self._results[result.step] = result.tokens
        while self.state.committed in self._results:
            step = self.state.committed
            self._fold(StepCommitted(step=step, tokens=self._results.pop(step)))

    # ---- the end -------------------------------------------------------------------------------------------------

    def require_clean_end(self) -> None:
        """L1, L5: everything has ended, every block is free, every replica is equal."""
        state = self.state
        if state.requests or state.flights or len(state.rows) or state.waiting or self._results:
            raise Divergence(f"L1: {len(state.requests)} requests never end")
        if state.pool.free != state.config.block_count:
            raise Divergence(f"L5: {state.config.block_count - state.pool.free} blocks are held by nobody")
        self.fleet.require_equal()

    def require_right_answers(self) -> None:
        """P2, A3, Y3: every stream is what the model answers to that request alone, or its beginning if aborted."""
        for id_, client in self._asked_by.items():
            right, got = answer(self.scenario.config, list(client.prompt), client.sampling), self._answer(id_)
            if got.finish == "abort":
                right = Answer(right.tokens[: len(got.tokens)], "abort")
            if got != right:
                raise Divergence(f"request {id_} was answered {got} where alone it gets {right}")

    def _answer(self, id_: int) -> Answer:
        entry = self.core.books.entries[id_]
        return Answer(tuple(entry.tokens), entry.finish)

    def outcome(self) -> Outcome:
        return Outcome(
            events=tuple(self.events),
            state=self.state,
            answers={id_: self._answer(id_) for id_ in self._asked_by},
            refused=self.refused,
            duration_us=self.now_us,
        )
