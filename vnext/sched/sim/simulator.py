"""The simulator: the whole engine without processes, devices or time.

Real `reduce` and `schedule`, a virtual clock, several ranks that fold the same events, a toy model, a shadow cache, and
faults of one seed: bursts, aborts at any phase, late, lost, duplicate and reordered results, slow and crashed ranks,
resets, clocks that jump. All laws are checked after every event; every stream is compared with the model's own answer;
now and then an old state is given another future (past.py) and whole replicas are compared.
"""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from vnext.sched.schedule import schedule
from vnext.sched.sim.books import Books
from vnext.sched.sim.chance import Chance
from vnext.sched.sim.contents import contents, differences
from vnext.sched.sim.errors import Divergence
from vnext.sched.sim.laws import check_decision, check_event
from vnext.sched.sim.past import Past
from vnext.sched.sim.rank import Rank, StepResult, rebuilt
from vnext.sched.sim.scenario import NEVER, Client, Scenario, capacity
from vnext.sched.sim.toy import Answer, answer
from vnext.state.committing import settle
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.laws import check, check_after
from vnext.state.outputs import outputs
from vnext.state.reduce import reduce, start
from vnext.state.refusal import refusal
from vnext.state.state import State

STEP_US = 50
TOKEN_US = 10
RETRY_US = 2_000
STEPS_PER_TOKEN_MAX = 20
WHOLE_CHECK_EVENTS = 64
"""Events between two checks of what no single event is likely to break: every law anew, old states, whole replicas."""

Kind = Literal["arrival", "abort", "reset", "result", "wake"]


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
    """One run. Mutable; everything that decides is in `state` and in the events of `events`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.chance = Chance(scenario.seed).fork()
        started = EngineStarted(
            config=scenario.config, model="toy", model_digest="", world_size=scenario.rank_count, environment={},
            started_ns=0,
        )  # fmt: skip
        self.state = start(started)
        self.events: list[AnyEvent] = [started]
        self.ranks = [Rank(started) for _ in range(scenario.rank_count)]
        self.folded = [1] * scenario.rank_count
        self.now_us = 0
        self.busy_until_us = 0
        self.refused = 0
        self.books = Books()
        self.past: Past | None = None
        self._digests: dict[int, int] = {}
        self._results: dict[int, bytes] = {}
        self._asked_by: dict[int, Client] = {}
        self._ids: dict[int, int] = {}
        self._leaving: list[int] = []
        self._due: list[tuple[int, int, Kind, object]] = []
        self._order = 0
        self._expect_clients()

    def _expect_clients(self) -> None:
        for number, client in enumerate(self.scenario.clients):
            self._at(client.arrival_us, "arrival", number)
            if client.abort_us != NEVER:
                self._at(client.abort_us, "abort", number)
        for time_us in self.scenario.reset_us:
            self._at(time_us, "reset", None)

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
        while self._due:
            self.now_us = self._due[0][0]
            while self._due and self._due[0][0] == self.now_us:
                _, _, kind, what = heapq.heappop(self._due)
                self._meet(kind, what)
            self._abort()
            self._plan()
            if self.state.planned > STEPS_PER_TOKEN_MAX * tokens:
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
            arrival_ns=1000 * (self.now_us + self.chance.below(2 * self.scenario.faults.clock_jump_us + 1)),
            cache_salt=client.cache_salt,
        )
        refused = refusal(self.scenario.config, arrival) is not None
        if refused != (len(client.prompt) + client.sampling.max_tokens > capacity(self.scenario.config)):
            raise Divergence(f"L1: a request that {'fits is refused' if refused else 'can never fit is not refused'}")
        if refused:
            self.refused += 1
            self._must_refuse(arrival)
            return
        self._ids[number], self._asked_by[arrival.id] = arrival.id, client
        self._fold(arrival)

    def _fold(self, event: AnyEvent) -> None:
        """One more event of the engine: folded, checked, recorded, told to clients and sent to every rank."""
        before = self.state
        settled = settle(before, event) if isinstance(event, StepCommitted) else None
        self.events.append(event)
        self.state = reduce(before, event, settled)
        check_after(before, self.state)
        check_event(before, event, self.state)
        self.books.write(before, event, self.state, outputs(before, event, self.state, settled))
        if isinstance(event, StepPlanned) and len(self.ranks) > 1:
            self._digests[event.step] = digest(self.state)
        for rank in range(len(self.ranks)):
            if rank == 0 or not self.chance.happens(self.scenario.faults.slow_rank):
                self._catch_up(rank)
        if self.state.sequence % WHOLE_CHECK_EVENTS == 0:
            self._check_whole(before, event)

    def _check_whole(self, before: State, event: AnyEvent) -> None:
        """Every law anew, the past as it was, and replicas part by part (Y1 beyond the digest)."""
        check(self.state)
        if self.past is not None:
            self.past.require_unchanged(self.state)
        self.past = Past(before, event, self.state)
        for rank in range(1, len(self.ranks)):
            if self.folded[rank] == len(self.events):
                self._compare_contents(rank)

    def _compare_contents(self, rank: int) -> None:
        differ = differences(contents(self.state), contents(self.ranks[rank].state))
        if differ:
            raise Divergence(f"Y1: rank {rank} has other {', '.join(differ)} after event {self.state.sequence - 1}")

    def _must_refuse(self, event: AnyEvent) -> None:
        """An event that may not happen now is refused and changes nothing."""
        before = digest(self.state)
        try:
            reduce(self.state, event)
        except IllegalEvent:
            if digest(self.state) != before:
                raise Divergence(f"{type(event).__name__} was refused and changed the state") from None
            return
        raise Divergence(f"{type(event).__name__} should have been refused")

    # ---- decisions and steps -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Fill the pipeline; a hesitating engine core comes back a little later."""
        while True:
            if self.chance.happens(self.scenario.faults.hesitation) and self.state.requests:
                self._at(self.now_us + 1 + self.chance.below(STEP_US), "wake", None)
                return
            before, plan = self.state, schedule(self.state)
            if plan is not None:
                self._fold(plan)
            check_decision(before, plan, self.state)
            if plan is None:
                return

    def _catch_up(self, rank: int) -> None:
        """Fold what the rank has not seen; rank 0's results go back to the engine core."""
        if self.chance.happens(self.scenario.faults.crash) and self.chance.happens(20):
            self.ranks[rank] = rebuilt(self.events[: self.folded[rank]])
        for event in self.events[self.folded[rank] :]:
            # The first rank sees every event at once: it runs in the engine core's process and shares its state.
            result = self.ranks[rank].fold(event, None if rank else self.state)
            if result is not None:
                if rank == 0:
                    self._send(result)
                else:
                    self._compare(rank, result)
        self.folded[rank] = len(self.events)

    def _compare(self, rank: int, result: StepResult) -> None:
        if result.digest != self._digests[result.step]:
            raise Divergence(f"Y1: rank {rank} has another state in step {result.step}")

    def _send(self, result: StepResult) -> None:
        """When the engine core will hear of a step: ranks run one step after another, the transport adds its faults."""
        faults, chance = self.scenario.faults, self.chance
        cost_us = STEP_US + TOKEN_US * int(self.state.flights[-1].counts.sum())
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
            self._must_refuse(event)
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
        for rank in range(len(self.ranks)):
            self._catch_up(rank)
            self._compare_contents(rank)

    def require_right_answers(self) -> None:
        """P2, A3, Y3: every stream is what the model answers to that request alone, or its beginning if aborted."""
        for id_, client in self._asked_by.items():
            right, got = answer(self.scenario.config, list(client.prompt), client.sampling), self._answer(id_)
            if got.finish == "abort":
                right = Answer(right.tokens[: len(got.tokens)], "abort")
            if got != right:
                raise Divergence(f"request {id_} was answered {got} where alone it gets {right}")

    def _answer(self, id_: int) -> Answer:
        entry = self.books.entries[id_]
        return Answer(tuple(entry.tokens), entry.finish)

    def outcome(self) -> Outcome:
        return Outcome(
            events=tuple(self.events),
            state=self.state,
            answers={id_: self._answer(id_) for id_ in self._asked_by},
            refused=self.refused,
            duration_us=self.now_us,
        )
