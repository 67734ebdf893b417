"""Engine core: orders events, decides, records and broadcasts. The loop:

    for event in arrived():                    requests, aborts, commits: one numbered stream
        state, effects = fold(state, event)
    plan  = schedule(state)
    state, effects = fold(state, plan)         and the same event goes to the log and to every rank

Owns the one true order. It writes a frame of the log before the frame's effects: ranks hear of a plan and clients of a token
only then. With asynchronous scheduling it plans step t+1 while the ranks run step t; the code here is the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

import zmq

from vnext.base.version import __version__
from vnext.log import snapshot as snapshots
from vnext.log.log_plain import WIDTH_MAX
from vnext.log.stream import EventStreams
from vnext.runtime.engine.adapters import AdapterLoading
from vnext.runtime.engine.clients import Clients
from vnext.runtime.engine.clock import EventClock
from vnext.runtime.engine.draft_counts import DraftCounts
from vnext.runtime.engine.due_reports import NOTHING_REPORTED, RankChecks
from vnext.runtime.engine.executor import Executor, NoRanks
from vnext.runtime.engine.facilities import NO_ERRORS, Facility, takers
from vnext.runtime.engine.failures import Failures
from vnext.runtime.engine.handovers import HandOvers
from vnext.runtime.engine.operations import Operations
from vnext.runtime.engine.owners import News
from vnext.runtime.engine.progress import Progress, RanksStalled
from vnext.runtime.engine.recovery import LOSSES, RankGaveUp, Recovery
from vnext.runtime.engine.request_outputs import prompt_outputs, to_clients
from vnext.runtime.engine.tiers import TierTransfers
from vnext.runtime.protocol.messages import (
    EngineDied,
    EngineStats,
    Operated,
    RankFailed,
    RankMessage,
    StepResult,
    TokenLogprobs,
)
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.transport.ring.broadcast import encode_begin, encode_events
from vnext.sched.schedule import schedule
from vnext.sched.turn import steady_turn
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    EngineStarted,
    RequestAborted,
    RequestId,
    StepCommitted,
    StepPlanned,
    TierOpened,
    WeightsChanged,
)
from vnext.state.fold_commit import MatchedSamples
from vnext.state.laws import check, check_cheap
from vnext.state.outputs import outputs, outputs_apart
from vnext.state.reduce import fold, start
from vnext.state.state import State

STATS_INTERVAL_S = 0.25
PATIENCE_MS, BEHIND_PATIENCE_MS, RECOVERY_PATIENCE_MS = 1000, 50, 20
log = logging.getLogger(__name__)


class EngineCore:
    """One engine. `step` does one turn of the loop without waiting; its caller waits for news between turns."""

    def __init__(
        self,
        started: EngineStarted,
        executor: Executor, recorder: Recorder, clients: Clients,
        all_laws: bool = False, step_timeout_s: float = 0.0,
        recovery: Recovery | None = None, tier: TierOpened | None = None, ticket: str = "",
    ) -> None:
        """`recovery`: what replaces ranks that are lost; None: the engine ends with them. `tier`: what they have on disk. `ticket`:
        what clients take to the engine that blocks are handed over to."""
        self.state: State = start(started)
        self._started = started
        self._executor = executor
        self._recovery = recovery or Recovery()
        self._poller: zmq.Poller | None = None
        self._recorder = recorder
        self._clients = clients
        self._check: Callable[[State], None] = check if all_laws else check_cheap
        self._unwritten: list[tuple[AnyEvent, State, MatchedSamples | None]] = []
        self._untold: list[News] = []
        self._checks = RankChecks(started.world_size)
        self._drafts, self._failures = DraftCounts(), Failures()
        self._step_seconds = self._plan_seconds = self._stats_due_s = 0.0
        self._progress = Progress(step_timeout_s)
        self._stalled = ""
        self._operations = Operations(started, executor.send, self._answer, clients.notes)
        self._handovers = self._handovers_of(ticket)
        self._facilities = self._facilities_of(tier)
        self._takers = takers(self._facilities)
        self._streams = EventStreams(started, __version__)
        executor.while_full = self._send_stats
        executor.send(encode_events([started]))

    def _facilities_of(self, tier: TierOpened | None) -> list[Facility]:
        """What this engine has, in the order in which a turn asks for events."""
        started, send, clients = self._started, self._executor.send, self._clients
        found: list[Facility] = [self._operations]
        if self.state.slots:
            found.append(AdapterLoading(started.world_size, send, clients.adapter_files))
        if tier is not None:
            clients.tickets = {}
            found.append(TierTransfers(started.world_size, send, tier, clients.tickets))
        if started.config.pinned_pages_max:
            found.append(EventClock())
        return [*found, self._handovers] if self._handovers is not None else found

    def _handovers_of(self, ticket: str) -> HandOvers | None:
        if not ticket:
            return None
        self._clients.to_hand_over = set()
        return HandOvers(self._started.world_size, ticket, self._clients.tell, self._clients.to_hand_over)

    def begin_after(self, recovered: EngineRecovered) -> None:
        """Another engine core had the requests that clients submit from now on, with its weights and its pause. Call first."""
        self._fold(recovered)
        handover = self._operations.handover
        if (weights := handover.weights) is not None:
            self._fold(EnginePaused(mode="keep"))
            self._fold(WeightsChanged(version=weights.version, digest=weights.digest, path=weights.path))
        if self.state.paused != handover.paused:
            self._fold(EnginePaused(mode=handover.paused))
        self._carry_out()

    # ---- one turn --------------------------------------------------------------------------------------------------

    def step(self, ready: Collection[object] | None = None) -> None:
        """Take everything that has arrived, decide as far ahead as the pipeline allows, carry out the effects.

        `ready` is what a poller reported, so that only those sources are asked; None asks all of them.
        """
        try:
            self._executor.check(ready)
            for event in self._clients.arrived(self.state, ready):
                self._arrive(event)
            if asked := self._clients.operations:
                self._operations.ask_all(asked)
            messages = self._executor.receive()
            for message in messages:
                self._take_result(message, message is messages[-1])
            if self._recovery.sentence:
                self._await_ranks()
            else:
                self._advance()
            if self._clients.subscribed:
                self._begin_streams()
            self._send_stats()
        except LOSSES as error:
            self._lose_ranks(error)

    def _arrive(self, event: AnyEvent) -> None:
        """Fold an event from a client, behind those that must come before it."""
        for facility in self._facilities:
            if facility.precedes and (first := facility.precede(self.state, event)) is not None:
                self._fold(first)
        self._fold(event)

    def _advance(self) -> None:
        while True:
            for facility in self._facilities:
                if facility.is_on:
                    self._follow(facility)
            began = time.perf_counter()
            if (plan := schedule(self.state)) is not None:
                self._fold(plan)
                if plan.admitted:
                    self._clients.begun(self.state.rows.id[-len(plan.admitted) :].tolist())
            self._plan_seconds += time.perf_counter() - began
            if self._unwritten:
                self._carry_out()
            for facility in self._facilities:
                if facility.asks_behind:
                    facility.ask(self.state)
            if plan is None:
                return

    def _follow(self, facility: Facility) -> None:
        """Fold a facility's events."""
        while (event := facility.next_event(self.state)) is not None:
            self._fold(event)
            if facility.goes_out:
                self._carry_out()

    def _answer(self, peer: bytes, message: Operated) -> None:
        """Answer an operation, behind statistics that show what it did."""
        self._clients.tell_stats(self._stats())
        self._clients.answer(peer, message)

    def _fold(
        self, event: AnyEvent, logprobs: tuple[TokenLogprobs | None, ...] = (), errors: Mapping[int, str] = NO_ERRORS
    ) -> None:
        """`errors`: why requests are aborted, for their clients."""
        before = self.state
        self._unwritten.append((event, before, None))  # first: an event that breaks the engine must be in its log
        self.state, matched = fold(before, event)
        self._unwritten[-1] = (event, before, matched)
        self._check(self.state)
        if matched is not None:
            self._drafts.take(before, matched)
        if matched is not None and not any(logprobs):
            going, ended = outputs_apart(before, self.state, matched)
            self._untold.append((going, to_clients(ended, self._drafts)))
        elif news := outputs(before, event, self.state, matched):
            self._untold.append((None, to_clients(news, self._drafts, logprobs, errors)))

    def _carry_out(self) -> None:
        """Write the frame, broadcast its events, then send the clients their outputs."""
        events = self._write_frame()
        self._executor.send(encode_events(events))
        if self._streams.readers:
            for peer, frame in self._streams.frames(events, self.state, digest(self.state)):
                if not self._clients.stream(peer, frame):
                    self._streams.end(peer)
        reported, self._untold = self._untold, []
        self._clients.tell(reported if self._handovers is None else self._handovers.without_kept(reported))

    def _begin_streams(self) -> None:
        """Begin and end event streams, as clients have asked. Every folded event is written by now."""
        asked = self._clients.subscribed
        while asked:
            peer, is_on = asked.pop(0)
            if not (is_on and self._clients.stream(peer, self._streams.begin(peer, self.state))):
                self._streams.end(peer)

    def _write_frame(self) -> tuple[AnyEvent, ...]:
        """Record the events folded since the last frame and the ranks' reports; returns the events."""
        events, befores, matched = zip(*self._unwritten) if self._unwritten else ((), (), ())
        self._unwritten = []
        state_digest = digest(self.state)
        if events and isinstance(last := events[-1], StepPlanned) and last.step % self.state.config.digest_interval == 0:
            self._checks.expect(last.step, state_digest, self.state)
        reported = self._checks.take_new() if self._checks.new.digests else NOTHING_REPORTED
        self._recorder.append(events, befores, state_digest, reported.digests, matched, reported.details)
        return events

    # ---- results of the ranks --------------------------------------------------------------------------------------

    def _take_result(self, message: RankMessage, is_last: bool) -> None:
        """Take one rank's message. If it `is_last` of the arrived ones, the next plan may be folded with it."""
        if isinstance(message, RankFailed):
            raise RankGaveUp(f"rank {message.rank} failed: {message.message}")
        if (taker := self._takers.get(type(message))) is not None:
            self._abort_with(taker.answered(message, self.state))
            return
        assert isinstance(message, StepResult), "a rank says that it is ready once, before the engine starts"
        if message.step % self.state.config.digest_interval == 0:
            self._checks.compare(message)
        if message.rank == 0:
            event = message.commit
            for due in self._checks.due.values():
                due.commits[message.step] = event
            self._step_seconds += message.seconds
            self._recorder.took(message.step, message.seconds)
            self._progress.took(self.state.in_flight[0].tokens, message.seconds)
            self._abort_with(self._failures.errors(self.state, message.failed))
            if message.prompts:
                self._untold.append((None, prompt_outputs(self.state, message.prompts)))
            if not is_last or not self._is_steady_turn(event, message.logprobs):
                self._fold(event, message.logprobs)

    def _abort_with(self, errors: Mapping[int, str]) -> None:
        """Abort these requests and tell their clients why."""
        if errors:
            self._fold(RequestAborted(ids=tuple(map(RequestId, sorted(errors))), reason="error"), errors=errors)

    def _is_steady_turn(self, event: StepCommitted, logprobs: tuple[TokenLogprobs | None, ...]) -> bool:
        """Fold the commit and the plan behind it if both are the usual ones. Else return False and do nothing."""
        if self._unwritten or self._check is not check_cheap or any(logprobs):
            return False
        began = time.perf_counter()
        if (turn := steady_turn(self.state, event)) is None:
            return False
        before, self.state = self.state, turn.state
        self._unwritten = [(event, before, turn.matched), (turn.plan, before, None)]  # nothing reads the state before such a plan
        self._untold.append((turn.going, ()))
        self._plan_seconds += time.perf_counter() - began
        return True

    # ---- ranks that are lost ---------------------------------------------------------------------------------------

    def _lose_ranks(self, error: Exception) -> None:
        """Go on without ranks until others have started. Raises `error` or NoMoreRanks if there can be none."""
        recovered, errors = self._recovery.begin(error, self._executor, self.state)
        self._executor = NoRanks()
        self._checks.due.clear()
        self._stalled = ""
        self._abort_with(errors)
        self._fold(recovered)
        self._carry_out()
        for facility in self._facilities:
            facility.lose_ranks()
        self._clients.tell_stats(self._stats())

    def _await_ranks(self) -> None:
        """Record and report what has happened meanwhile. New ranks that are ready begin with the state behind it."""
        if self._unwritten:
            self._carry_out()
        if (executor := self._recovery.look()) is None:
            return
        self._executor = executor
        executor.while_full = self._send_stats
        for facility in self._facilities:
            facility.begin_again(executor.send, self._recovery.ready)
        if self._poller is not None:
            executor.watch(self._poller)
        executor.send(encode_begin(self._started, snapshots.encode(snapshots.snapshot(self.state), WIDTH_MAX)))
        self._advance()

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something has arrived that no poller can see."""
        return self._executor.has_results

    @property
    def poll_timeout_ms(self) -> int | None:
        """How long to wait for news that a poller can see, None for no limit: steps and slow clients need looks."""
        if self._recovery.sentence:
            return RECOVERY_PATIENCE_MS
        if self._clients.is_behind:
            return BEHIND_PATIENCE_MS
        if self.state.in_flight:
            return PATIENCE_MS
        waits = (facility.wait_ms(self.state) for facility in self._facilities)
        return min((wait_ms for wait_ms in waits if wait_ms is not None), default=None)

    def watch(self, poller: zmq.Poller) -> None:
        """As Executor.watch, for the ranks that there are and those that take their place."""
        self._poller = poller
        self._executor.watch(poller)

    def stop_ranks(self, grace_s: float) -> None:
        """As Executor.stop, and end ranks that start."""
        self._executor.stop(grace_s)
        self._recovery.stop()

    def record_end(self) -> None:
        """When the engine dies of an error, write the folded events and the event that could not be folded."""
        try:
            if self._unwritten or self._checks.new.digests:
                self._write_frame()
        except IllegalEvent as error:  # a redacted log cannot represent an illegal event
            log.warning("the engine's last turn could not be recorded: %s", error)
        self._recorder.close()

    def leave(self, sentence: str) -> None:
        """End the log; clients keep their requests for the engine core that follows."""
        self._clients.tell_all(EngineDied(message=sentence, is_followed=True))
        self.record_end()

    def shut_down(self) -> None:
        """Abort live requests, so that the log records their end, and notify the clients."""
        live = tuple(sorted(id_ for id_, _ in self.state.requests.items()))
        if live:
            self._fold(RequestAborted(ids=live, reason="shutdown"))
            self._carry_out()
        self.record_end()

    def _send_stats(self) -> None:
        """Send gauges and counters: a few times a second while something happens, and at once when activity ends."""
        now = time.monotonic()
        idle = not self.state.requests
        if now < self._stats_due_s and not idle:
            return
        self._stats_due_s = now + STATS_INTERVAL_S
        self._look_for_progress(now)
        self._clients.tell_stats(self._stats())

    def _look_for_progress(self, now_s: float) -> None:
        """Raise RanksStalled for a step past its second bound; report when a step is late and when it recovers."""
        in_flight, progress = self.state.in_flight, self._progress
        progress.look(now_s, in_flight[0].step if in_flight else -1, in_flight[0].tokens if in_flight else 0)
        if not progress.is_late:
            if self._stalled:
                log.warning("The ranks go on.")
                self._stalled = ""
            return
        step = in_flight[0].step
        sentence = f"step {step} has had no result for {progress.silent_s:.0f} s: {self._executor.why_silent(step)}"
        if progress.is_over:
            raise RanksStalled(sentence)
        if not self._stalled:
            log.warning("The engine is stalled: %s.", sentence)
        self._stalled = f"The engine is stalled: {sentence}."

    def _stats(self) -> EngineStats:
        state, counters, recovery = self.state, self.state.counters, self._recovery
        return EngineStats(
            running=len(state.rows),
            waiting=len(state.waiting),
            blocks_total=state.pool.page_count,
            blocks_held=state.pool.page_count - state.pool.free,
            blocks_kept=state.pool.kept,
            steps=state.planned,
            arrived=state.next_id,
            finished=counters.finished,
            aborted=counters.aborted,
            preempted=counters.preempted,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_queried_tokens=counters.prefix_queried_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            ring_stalls=recovery.stall_count + self._executor.stall_count,
            ring_stall_seconds=recovery.stall_seconds + self._executor.stall_seconds,
            log_bytes=self._recorder.bytes_written,
            log_frames_lost=self._recorder.frames_lost,
            step_seconds_sum=self._step_seconds,
            plan_seconds_sum=self._plan_seconds,
            digest_checks=self._checks.count,
            stalled=self._stalled,
            step_silent_seconds=self._progress.silent_s,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            spoilt=self._failures.spoilt,
            recovering=recovery.sentence,
            recoveries=recovery.count,
            recovery_seconds=recovery.seconds,
            **{name: value for facility in self._facilities for name, value in facility.stats(state).items()},
        )
