"""The simulator: the whole engine without processes, devices or time.

Real `reduce` and `schedule`, a virtual clock, several ranks that fold the same events, a toy model, a shadow cache, and
faults from one seed: bursts, aborts at any phase, late, lost, duplicate and reordered results, slow and crashed ranks,
resets, clock jumps, illegal events. All laws are checked after every event (core.py, fleet.py), and every stream is
compared with the model's own answer.
"""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from vnext.sched.residency import next_load
from vnext.sched.sim.checks.errors import Divergence
from vnext.sched.sim.core import Core
from vnext.sched.sim.fleet import Fleet
from vnext.sched.sim.illegal_events import illegal_event, strange_plan
from vnext.sched.sim.laws import constraint_laws
from vnext.sched.sim.rank import StepResult
from vnext.sched.sim.rng import Rng
from vnext.sched.sim.scenario import NEVER, Client, Scenario, servable
from vnext.sched.sim.toy import Answer, answer
from vnext.state.adapters import held
from vnext.state.events import (
    AdapterEvicted,
    AdapterLoaded,
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestId,
    pack_tokens,
)
from vnext.state.feasibility import refusal
from vnext.state.samples import still_owed
from vnext.state.state import State

STEP_US = 50
TOKEN_US = 10
RETRY_US = 2_000
STEPS_PER_TOKEN_MAX = 20
STEPS_PER_TOKEN_MAX_ON_A_WHIM = 200

LOAD_US = 300

Kind = Literal["arrival", "abort", "stop", "reset", "shutdown", "result", "adapter", "wake"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation: its log, its last state, each request's stream, and its duration in virtual time."""

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
        self.rng = Rng(scenario.seed).fork()
        started = EngineStarted(
            config=scenario.config, model="toy", model_digest="", world_size=scenario.rank_count, environment={},
            started_ns=0,
        )  # fmt: skip
        self.core = Core(started)
        self.fleet = Fleet(self.core, started, scenario.faults, self.rng)
        self.now_us = 0
        self.busy_until_us = 0
        self.refused = 0
        self._results: dict[int, StepResult] = {}
        self._failed: set[int] = set()
        self._asked_by: dict[int, Client] = {}
        self._ids: dict[int, RequestId] = {}
        self._leaving: list[RequestId] = []
        self._due: list[tuple[int, int, Kind, object]] = []
        self._order = 0
        self._is_loading = False
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
        """Run everything and check every law. Raises LawBroken, IllegalEvent or Divergence if the engine is wrong."""
        self.run()
        self.require_clean_end()
        self.require_right_answers()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until no event is due."""
        tokens = sum(len(client.prompt) + client.sampling.max_tokens for client in self.scenario.clients)
        most = tokens * (STEPS_PER_TOKEN_MAX_ON_A_WHIM if self.scenario.faults.whim else STEPS_PER_TOKEN_MAX)
        while self._due:
            self.now_us = self._due[0][0]
            while self._due and self._due[0][0] == self.now_us:
                _, _, kind, what = heapq.heappop(self._due)
                self._meet(kind, what)
            self._abort()
            if self.rng.happens(self.scenario.faults.illegal):
                self.core.require_refused(illegal_event(self.rng, self.core.seen))
                self._require_slots_refused()
            self._begin_load()
            self._plan()
            self.fleet.end_of_iteration()
            if self.state.planned > most:
                raise Divergence(f"L1: {self.state.planned} steps for {tokens} tokens, and no end")

    def _meet(self, kind: Kind, what: object) -> None:
        match kind:
            case "arrival":
                assert isinstance(what, int)
                self._arrive(what)
            case "abort":
                assert isinstance(what, int)
                if what in self._ids:
                    self._leaving.append(self._ids[what])
            case "stop":
                assert isinstance(what, int)
                self._fold(RequestAborted(ids=(RequestId(what),), reason="stop"))
            case "reset":
                self._fold(PrefixCacheReset())
            case "shutdown":
                live = [*(entry.id for entry in self.state.waiting), *self.core.seen.id]
                self._fold(RequestAborted(ids=tuple(map(RequestId, live)), reason="shutdown"))
            case "result":
                assert isinstance(what, StepResult)
                self._take_result(what)
            case "adapter":
                assert isinstance(what, str)
                self._load(what)
            case "wake":
                pass

    def _abort(self) -> None:
        """Abort all requests that leave at one time in one event, with some of them listed twice."""
        if not self._leaving:
            return
        again = self._leaving[:1] if self.rng.happens(20) else []
        self._fold(RequestAborted(ids=(*self._leaving, *again), reason="client"))
        self._leaving = []

    def _arrive(self, number: int) -> None:
        client = self.scenario.clients[number]
        arrival = RequestArrived(
            id=RequestId(self.state.next_id),
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
        """The current error of the wall clock, in either direction."""
        most = self.scenario.faults.clock_jump_us
        return self.rng.between(-most, most) if most else 0

    def _fold(self, event: AnyEvent) -> None:
        """Fold one event of the engine: check it, record it, and send it to clients and to every rank."""
        news = self.core.fold(event)
        constraint_laws(self.scenario.config, self.core.accounting.entries, news)
        self._tell_ranks()
        for id_ in dict.fromkeys(output.id for output in news if output.token >= 0 and not output.finish):
            stop, tokens = self._asked_by[id_].stop, self.core.accounting.entries[id_].tokens
            if stop and tuple(tokens[-len(stop) :]) == stop:
                self._at(self.now_us + self.rng.below(STEP_US), "stop", id_)

    def _tell_ranks(self) -> None:
        result = self.fleet.tell()
        if result is not None:
            self._send(result)

    # ---- decisions and steps -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Fill the pipeline; an engine core that hesitates tries again a little later."""
        faults, rng = self.scenario.faults, self.rng
        while True:
            if rng.happens(faults.hesitation) and self.state.requests:
                self._at(self.now_us + 1 + rng.below(STEP_US), "wake", None)
                return
            if rng.happens(faults.whim):
                self._plan_on_a_whim()
            elif self.core.decide() is None:
                return
            else:
                self._tell_ranks()

    def _plan_on_a_whim(self) -> None:
        plan = strange_plan(self.rng, self.core.seen)
        if plan is not None and self.core.try_to_fold(plan):
            self._tell_ranks()

    def _require_slots_refused(self) -> None:
        """Nobody loads an adapter into a slot that is taken, nor twice, nor evicts one that running requests use."""
        users = held(self.state)
        for place, slot in enumerate(self.state.slots):
            if slot is None:
                self.core.require_refused(AdapterEvicted(slot=place))
                continue
            self.core.require_refused(AdapterLoaded(name="", digest="another", slot=place))
            self.core.require_refused(AdapterLoaded(name="", digest=slot.digest, slot=(place + 1) % len(self.state.slots)))
            if slot.digest in users:
                self.core.require_refused(AdapterEvicted(slot=place))

    def _begin_load(self) -> None:
        """Begin to read the adapter that is needed next, unless one is being read."""
        wish = next_load(self.state)
        if wish is not None and not self._is_loading:
            self._is_loading = True
            self._at(self.now_us + 1 + self.rng.below(LOAD_US), "adapter", wish.digest)

    def _load(self, digest: str) -> None:
        """An adapter has been read: it gets a slot if it is still the one that is needed next."""
        self._is_loading = False
        wish = next_load(self.state)
        for event in wish.events(f"adapter {digest}") if wish is not None and wish.digest == digest else ():
            self._fold(event)

    def _send(self, result: StepResult) -> None:
        """Schedule a step's result: ranks run one step after another, and the transport adds its faults."""
        faults, rng = self.scenario.faults, self.rng
        cost_us = STEP_US + TOKEN_US * sum(self.core.seen.in_flight[-1].counts)
        cost_us *= 10 if rng.happens(faults.slow_step) else 1
        self.busy_until_us = max(self.busy_until_us, self.now_us) + cost_us
        time_us = self.busy_until_us
        time_us += rng.below(10 * STEP_US) if rng.happens(faults.late_result) else 0
        time_us += RETRY_US if rng.happens(faults.lost_result) else 0
        self._at(time_us, "result", result)
        if rng.happens(faults.duplicate_result):
            self._at(time_us + rng.below(RETRY_US), "result", result)

    def _take_result(self, result: StepResult) -> None:
        """Commit in step order: an early result waits, and a duplicate is dropped."""
        event = result.event
        if result.step != self.state.committed:
            self.core.require_refused(event)
        if result.step < self.state.committed:
            return
        self._results[result.step] = result
        while self.state.committed in self._results:
            result = self._results.pop(self.state.committed)
            self._abort_failed(result.failed)
            self._fold(result.event)

    def _abort_failed(self, failed: tuple[int, ...]) -> None:
        """Abort the requests whose constraints ranks could not follow, before the tokens that they chose nevertheless."""
        owed = still_owed(self.state)
        ids = tuple(RequestId(id_) for id_ in failed if id_ in owed)
        if ids:
            self._failed.update(ids)
            self._fold(RequestAborted(ids=ids, reason="error"))

    # ---- the end -------------------------------------------------------------------------------------------------

    def require_clean_end(self) -> None:
        """L1, L5: every request has ended, every page is free, and all replicas are equal."""
        state = self.state
        if state.requests or state.in_flight or len(state.rows) or state.waiting or self._results:
            raise Divergence(f"L1: {len(state.requests)} requests never end")
        if state.pool.free != state.config.page_count:
            raise Divergence(f"L5: {state.config.page_count - state.pool.free} blocks are held by nobody")
        self.fleet.require_equal()

    def require_right_answers(self) -> None:
        """P2, A3, Y3: every stream equals the model's answer to that request alone, or its beginning if aborted."""
        for id_, client in self._asked_by.items():
            right, got = answer(self.scenario.config, list(client.prompt), client.sampling), self._answer(id_)
            if got.finish == "abort" and id_ not in self._failed:
                right = Answer(right.tokens[: len(got.tokens)], "abort")
            if got != right:
                raise Divergence(f"request {id_} was answered {got} where alone it gets {right}")

    def _answer(self, id_: int) -> Answer:
        entry = self.core.accounting.entries[id_]
        return Answer(tuple(entry.tokens), entry.finish)

    def outcome(self) -> Outcome:
        return Outcome(
            events=tuple(self.events),
            state=self.state,
            answers={id_: self._answer(id_) for id_ in self._asked_by},
            refused=self.refused,
            duration_us=self.now_us,
        )
