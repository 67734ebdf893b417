"""The simulator: the whole engine without processes, devices or time.

Real `reduce` and `schedule`, a virtual clock, several ranks that fold the same events, a toy model, a shadow cache, and
faults from one seed: bursts, aborts at any phase, late, lost, duplicate and reordered results, slow and crashed ranks,
the death of all ranks or of the engine core at any event, resets, clock jumps, illegal events. All laws are checked
after every event (deciding.py, fleet.py), and every stream is compared with the model's own answer (streams.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Literal

from tests.sim.deciding import DecidingCore
from tests.sim.fleet import Fleet
from tests.sim.illegal_events import early_inputs, illegal_event, strange_plan
from tests.sim.scenario import NEVER, Scenario, servable
from tests.sim.shortages import Shortages
from tests.sim.streams import Outcome, Streams
from tests.sim.tier import ReadBack, SimClock, SimSearches, SimTier, Stored, found
from tests.sim.weight_changes import WeightChanges
from vnext.sched.residency import next_load
from vnext.sched.shortage import ran_short
from vnext.sim.checks.plain_state import Divergence
from vnext.sim.laws import constraint_laws
from vnext.sim.rank_values import Contents, StepResult
from vnext.sim.rng import Rng
from vnext.state.events import (
    AbortReason,
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    EngineStarted,
    InputsFound,
    Pause,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestId,
    RequestResumed,
    pack_tokens,
)
from vnext.state.facilities.table import illegal
from vnext.state.feasibility import refusal
from vnext.state.outputs import Output
from vnext.state.state import State, still_owed

STEP_US, TOKEN_US, RETRY_US, LOAD_US, RESUME_US = 50, 10, 2_000, 300, 200
STEPS_PER_TOKEN_MAX, STEPS_PER_TOKEN_MAX_ON_A_WHIM = 20, 200
STALE_PERCENT = 50
"""Of recoveries behind which results of ranks that have died are still to come."""
CAUTIOUS_PERCENT = 40

Kind = Literal["arrival", "abort", "stop", "reset", "shutdown", "result", "adapter", "weights", "wake", "resume", "tier", "found"]


class CoreDied(Exception):
    """The engine core of a simulation ends, and all of its ranks, in the middle of whatever it did."""


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
        self.streams = Streams(scenario)
        self.contents = Contents()
        disk, snapshots = Rng(scenario.seed + 2**59), scenario.config.takes_snapshots
        self.tier = SimTier(scenario.disk, disk, self.contents.damaged, snapshots) if scenario.disk else None
        self.shortages = Shortages(scenario.faults, Rng(scenario.seed + 2**51), self.contents.short)
        self.searches = SimSearches(Rng(scenario.seed + 2**50)) if scenario.searches else None
        self.clock = SimClock(scenario.second_us, scenario.faults.clock_jump_us, Rng(scenario.seed + 2**55))
        self.now_us = self.refused = self.deaths = self._events_before = self._order = 0
        self._due: list[tuple[int, int, Kind, object]] = []
        self._start_engine()
        self._open_tier()
        self._expect_clients()

    def _start_engine(self) -> None:
        settings, ranks = self.scenario.config, self.scenario.rank_count
        started = EngineStarted(config=settings, model="toy", model_digest="", world_size=ranks, environment={}, started_ns=0)
        sources = [each for each in (self.tier, self.searches, self.clock) if each is not None]
        self.core = DecidingCore(started, sources=sources)
        self.fleet = Fleet(self.core, started, self.scenario.faults, self.rng, self.contents)
        self.shortages.short.clear()
        self.busy_until_us = self.now_us
        self._results: dict[int, StepResult] = {}
        self._leaving: list[RequestId] = []
        self._is_loading = False
        self._changes = WeightChanges(self.rng)

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def events(self) -> list[AnyEvent]:
        """The log so far, EngineStarted first."""
        return self.core.events

    @property
    def event_count(self) -> int:
        """The events of all engines so far, their starts not counted."""
        return self._events_before + len(self.events) - 1

    def _expect_clients(self) -> None:
        for number, client in enumerate(self.scenario.clients):
            self._at(client.arrival_us, "arrival", number)
            if client.abort_us != NEVER:
                self._at(client.abort_us, "abort", number)
        for time_us in self.scenario.reset_us:
            self._at(time_us, "reset", None)
        for time_us, mode in self.scenario.weights:
            self._at(time_us, "weights", mode)
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
            self.now_us = self.clock.now_us = self._due[0][0]
            try:
                self._iterate()
            except CoreDied:
                self._start_again()
            if self.state.planned > most * (1 + self.deaths + self.shortages.count):
                raise Divergence(f"L1: {self.state.planned} steps for {tokens} tokens, and no end")

    def _iterate(self) -> None:
        """One moment of the engine core."""
        while self._due and self._due[0][0] == self.now_us:
            _, _, kind, what = heapq.heappop(self._due)
            self._meet(kind, what)
        self._abort()
        if self.rng.happens(self.scenario.faults.illegal):
            self.core.require_refused(illegal_event(self.rng, self.core.seen))
            for event in (*illegal(self.state), *early_inputs(self.state)):
                self.core.require_refused(event)
        self._begin_load()
        self._fold_all(self.shortages.relief(self.state))
        self._plan()
        self._change_weights()
        self.clock.wake(self.state, self._at)
        self.fleet.end_of_iteration()
        self.streams.sent()

    def _meet(self, kind: Kind, what: object) -> None:
        match kind, what:
            case "arrival", int():
                self._arrive(what)
            case "abort" | "stop", int():
                self._leave(what, kind)
            case "resume", int():
                if what in self.streams.waiting:
                    self._resume(what)
            case "reset", _:
                self._fold(PrefixCacheReset())
            case "shutdown", _:
                self._end_all("shutdown")
            case "weights", ("wait" | "keep" | "abort" | "sleep"):
                self._pause(what)
            case "result", StepResult():
                self._take_result(what)
            case "adapter", str():
                self._load(what)
            case "tier", (Stored() | ReadBack()):
                assert self.tier is not None, "it answers"
                self._fold_all(self.tier.events(self.core, what))
            case "found", InputsFound():
                self._fold_all(found(self.core, what))

    def _leave(self, number: int, kind: Literal["abort", "stop"]) -> None:
        self.streams.leave(number)
        if number not in self.streams.ids:
            return
        id_ = RequestId(self.streams.ids[number])
        if kind == "stop":
            self._fold(RequestAborted(ids=(id_,), reason="stop"))
        else:
            self._leaving.append(id_)

    def _end_all(self, reason: AbortReason) -> None:
        self._fold(RequestAborted(ids=tuple(RequestId(id_) for id_, _ in self.state.requests.items()), reason=reason))

    def _pause(self, mode: Pause) -> None:
        """Let requests go on as `mode` has it until the weights may change; another change that comes meanwhile is one with it."""
        if self._changes.begin(self.core, mode):
            if mode == "abort" and self.state.requests:
                self._end_all("client")
            self._fold(EnginePaused(mode="keep" if mode == "sleep" else mode))

    def _change_weights(self) -> None:
        """Change the weights that are due once nothing is computed with the old ones, and go on."""
        events = self._changes.events(self.core) if self.scenario.weights else ()
        for event in events:
            self._fold(event)
        if events:
            self._begin_load()
            self._plan()

    def _abort(self) -> None:
        """Abort all requests that leave at one time in one event, with some of them listed twice."""
        if not self._leaving:
            return
        again = self._leaving[:1] if self.rng.happens(20) else []
        self._fold(RequestAborted(ids=(*self._leaving, *again), reason="client"))
        self._leaving = []

    def _arrive(self, number: int) -> None:
        client = self.scenario.clients[number]
        arrival = RequestArrived(**self._arrival(number))
        if (refused := refusal(self.scenario.config, arrival) is not None) == servable(self.scenario.config, client):
            raise Divergence(f"L1: a request that {'fits is refused' if refused else 'can never fit is not refused'}")
        if refused:
            self.refused += 1
            self.core.require_refused(arrival)
            return
        self.streams.begin(number, arrival.id)
        self._fold(arrival)

    def _resume(self, number: int) -> None:
        """A client of an engine that died asks this one to go on behind the tokens that it has."""
        tokens = self.streams.waiting[number]
        event = RequestResumed(**self._arrival(number), generated=pack_tokens(tokens))
        if why_not := refusal(self.scenario.config, event):
            raise Divergence(f"L1: a request that has {tokens} is refused: {why_not}")
        self.streams.begin(number, event.id)
        self._fold(event)

    def _arrival(self, number: int) -> dict[str, Any]:
        """The fields of a client's arrival."""
        client = self.scenario.clients[number]
        return dict(
            id=RequestId(self.state.next_id), name=str(number), prompt=pack_tokens(client.prompt), sampling=client.sampling,
            priority=client.priority, arrival_ns=1000 * (self.now_us + self._clock_error_us()), cache_salt=client.cache_salt,
            client=client.number, weight=client.weight,
        )  # fmt: skip

    def _clock_error_us(self) -> int:
        """The current error of the wall clock, in either direction."""
        most = self.scenario.faults.clock_jump_us
        return self.rng.between(-most, most) if most else 0

    def _fold(self, event: AnyEvent) -> None:
        """Fold one event of the engine: check it, record it, and send it to clients and to every rank."""
        self._hear(self.core.fold(event))

    def _hear(self, news: tuple[Output, ...]) -> None:
        """Send what an event did to clients and ranks."""
        self._expect_disk()
        entries = self.core.accounting.entries
        constraint_laws(self.scenario.config, entries, news)
        self.streams.hear(entries, news)
        for id_ in dict.fromkeys(output.id for output in news if output.token >= 0 and not output.finish):
            number = self.streams.number(id_)
            stop, tokens = self.scenario.clients[number].stop, entries[id_].tokens
            if stop and tuple(tokens[-len(stop) :]) == stop:
                self._at(self.now_us + self.rng.below(STEP_US), "stop", number)
        self._tell_ranks()

    def _fold_all(self, events: Iterable[AnyEvent]) -> None:
        """Fold what ranks have done together, unless they die meanwhile."""
        deaths = self.deaths
        for event in events:
            if self.deaths == deaths:
                self._fold(event)

    def _tell_ranks(self) -> None:
        self.shortages.strike(self.core.events[-1], self.state)
        result = self.fleet.tell()
        if result is not None:
            self._send(result)
        self._perhaps_die()

    # ---- deaths --------------------------------------------------------------------------------------------------

    def _perhaps_die(self) -> None:
        """After any event all ranks may die, or the engine core and they; so they may behind a recovery."""
        faults = self.scenario.faults
        while self.deaths < faults.deaths:
            if self.rng.happens(faults.core_dies):
                raise CoreDied
            if not self.rng.happens(faults.ranks_die):
                return
            self._replace_ranks()

    def _replace_ranks(self) -> None:
        """All ranks have died: others begin from the state, in which nothing is in flight."""
        self.deaths += 1
        gone = {"adapter", "tier", "found"} | (set() if self.rng.happens(STALE_PERCENT) else {"result"})
        self._forget_due(gone)
        self._results, self._is_loading, self.busy_until_us = {}, False, self.now_us
        cautious = self.state.next_id if self.rng.happens(CAUTIOUS_PERCENT) else 0
        self.core.fold(EngineRecovered(cause="rank 0 was killed", cautious=cautious))
        self.fleet.tell()
        self._at(self.now_us + 1, "wake", None)

    def _start_again(self) -> None:
        """Another engine begins; the clients of the one that died come in two groups, each in its order."""
        self.deaths += 1
        self.core.look_back()
        self.fleet.require_same_log()
        frames, self._events_before = self.fleet.frames, self.event_count
        self.streams.lose_engine(self.core.accounting.entries, self.rng)
        self._forget_due({"adapter", "result", "resume", "wake", "tier", "found"})
        self._start_engine()
        waiting = self.streams.waiting
        cautious = len(waiting) if self.rng.happens(CAUTIOUS_PERCENT) else 0
        self.core.fold(EngineRecovered(cause="the engine core was killed", log="before", frames=frames, cautious=cautious))
        self.fleet.tell()
        self._open_tier()
        for group in range(2):
            time_us = self.now_us + self.rng.below(RESUME_US)
            for number in waiting:
                if number % 2 == group:
                    self._at(time_us, "resume", number)

    def _forget_due(self, kinds: set[str]) -> None:
        self._due = [each for each in self._due if each[2] not in kinds]
        heapq.heapify(self._due)

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
            else:
                plan = self.core.decide(self._hear)
                self._expect_disk()
                if plan is None:
                    return
                self._tell_ranks()

    def _expect_disk(self) -> None:
        """What the disk has been asked for comes later."""
        for after_us, answer in () if self.tier is None else self.tier.coming():
            self._at(self.now_us + after_us, "tier", answer)
        for after_us, found_ in () if self.searches is None else self.searches.coming():
            self._at(self.now_us + after_us, "found", found_)

    def _plan_on_a_whim(self) -> None:
        plan = strange_plan(self.rng, self.core.seen)
        if plan is not None and self.core.try_to_fold(plan):
            self._tell_ranks()

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
        self._fold_all(wish.events(f"adapter {digest}") if wish is not None and wish.digest == digest else ())

    def _open_tier(self) -> None:
        """An engine that starts finds what is on disk."""
        if self.tier is not None:
            self.core.fold(self.tier.opened())
            self.fleet.tell()

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
            if result.step == self.state.committed:
                self._results = {} if result.is_short else self._results
                self._fold(ran_short(self.state, "rank 0 has no room") if result.is_short else result.event)

    def _abort_failed(self, failed: tuple[int, ...]) -> None:
        """Abort the requests whose constraints ranks could not follow, before the tokens that they chose nevertheless."""
        owed = still_owed(self.state)
        ids = tuple(RequestId(id_) for id_ in failed if id_ in owed)
        if ids:
            self.streams.failed.update(map(self.streams.number, ids))
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
        """P2, A3, Y3, C5: every stream equals the model's answer to that request alone, or its beginning if aborted."""
        self.streams.require_right(self.core.accounting.entries)

    def outcome(self) -> Outcome:
        return Outcome(
            events=tuple(self.events), state=self.state, answers=self.streams.all_answers(self.core.accounting.entries),
            refused=self.refused, duration_us=self.now_us,
        )  # fmt: skip
