"""Engine core: a pure engine (vnext/sched/engine.py), which folds and decides, with sockets, a log, ranks and a clock.

Carries out what the engine says, in its order: writes a frame of the log before the frame's effects, so that ranks hear of a plan
and clients of a token only then. With asynchronous scheduling it plans step t+1 while the ranks run step t; the code here is the
same.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from time import monotonic, perf_counter

import zmq
from msgspec.structs import replace

from vnext.base.version import __version__
from vnext.log import snapshot as snapshots
from vnext.log.log_plain import WIDTH_MAX
from vnext.log.stream import EventStreams
from vnext.runtime.engine.clients import Clients
from vnext.runtime.engine.due_reports import NOTHING_REPORTED, RankChecks
from vnext.runtime.engine.executor import Executor, NoRanks
from vnext.runtime.engine.facilities import NOTHING_HELD, Facilities, Held
from vnext.runtime.engine.facility import NO_ERRORS
from vnext.runtime.engine.misses import CacheMisses
from vnext.runtime.engine.operations import Operations
from vnext.runtime.engine.owners import Beside, ClientNews, prompt_outputs
from vnext.runtime.engine.progress import Progress
from vnext.runtime.engine.recovery import LOSSES, WITHOUT_INPUT, WITHOUT_MEMORY, RankGaveUp, Recovery
from vnext.runtime.protocol.messages import (
    EngineDied,
    EngineStats,
    Operated,
    RankFailed,
    RankMessage,
    StepResult,
)
from vnext.runtime.protocol.reasons import NOT_A_NUMBER
from vnext.runtime.protocol.settings import EngineSettings
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.transport.ring.broadcast import encode_begin, encode_events
from vnext.sched.engine import Engine, Ready
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    EnginePaused,
    EngineRecovered,
    EngineStarted,
    RequestAborted,
    RequestId,
    WeightsChanged,
    plan_of,
)
from vnext.state.facilities.sought import who_lacks
from vnext.state.laws import check, check_cheap
from vnext.state.reduce import start
from vnext.state.state import State, still_owed

# ---- failures ------------------------------------------------------------------------------------------------------
# Failures of single requests, as the first rank reports them with a step: constraints that it could not follow, and NaN.
# Counts the latter and says so once. Decides nothing else.


class Failures:
    """`spoilt`: how many requests ended because of what is no number."""

    def __init__(self) -> None:
        self.spoilt = 0

    def errors(self, state: State, failed: tuple[tuple[int, str], ...]) -> Mapping[int, str]:
        """Which requests are to be aborted before they get the tokens that a rank chose nevertheless, and why. One that has given
        way since the step was planned fails again when it is back: it is still owed tokens."""
        if not failed:
            return NO_ERRORS
        owed = still_owed(state)
        found = {id_: why for id_, why in failed if id_ in owed}
        count = sum(why == NOT_A_NUMBER for why in found.values())
        if count and not self.spoilt:
            log.error("A request has ended because %s. More of them are counted in vnext_requests_spoilt_total.", NOT_A_NUMBER)
        self.spoilt += count
        return found


GONE = "an image or sound of this request is gone from the engine's store: send it again"
STATS_INTERVAL_S = 0.25
PATIENCE_MS, BEHIND_PATIENCE_MS, RECOVERY_PATIENCE_MS = 1000, 50, 20
log = logging.getLogger(__name__)


class EngineCore:
    """One engine. `step` does one turn of the loop without waiting; its caller waits for news between turns."""

    def __init__(
        self,
        started: EngineStarted,
        executor: Executor, recorder: Recorder, clients: Clients,
        settings: EngineSettings, recovery: Recovery | None = None, held: Held = NOTHING_HELD,
    ) -> None:
        """`recovery`: what replaces ranks that are lost; None: the engine ends with them."""
        self._started, self._executor, self._recorder, self._clients = started, executor, recorder, clients
        self._recovery = recovery or Recovery()
        self._poller: zmq.Poller | None = None
        operations = Operations(started, executor.send, self._answer, clients.notes)
        self._facilities = Facilities(started, executor.send, clients, operations, held)
        self.engine = Engine(start(started), self._facilities.all, check if settings.check_laws else check_cheap)
        self._news, self._failures, self._misses = ClientNews(), Failures(), CacheMisses()
        self._checks, self._progress = RankChecks(started.world_size), Progress(settings.step_timeout_s)
        self._stats_due_s = 0.0
        self._streams = EventStreams[bytes](started, __version__)
        executor.while_full = self._send_stats
        executor.send(encode_events([started]))

    @property
    def state(self) -> State:
        return self.engine.state

    def measure_draft_costs(self) -> None:
        """From now on, measure by the steps that are served what drafts cost. Call before any."""
        self._facilities.measure_draft_costs()

    def begin_after(self, recovered: EngineRecovered) -> None:
        """Another engine core had the requests that clients submit from now on, with its weights and its pause. Call first."""
        engine, handover = self.engine, self._facilities.operations.handover
        engine.fold(recovered)
        if (weights := handover.weights) is not None:
            engine.fold(EnginePaused(mode="keep"))
            engine.fold(WeightsChanged(version=weights.version, digest=weights.digest, path=weights.path))
        if engine.state.paused != handover.paused:
            engine.fold(EnginePaused(mode=handover.paused))
        self._carry_out(engine.take())

    # ---- one turn --------------------------------------------------------------------------------------------------

    def step(self, ready: Collection[object] | None = None) -> None:
        """Take everything that has arrived, decide as far ahead as the pipeline allows, carry out the effects.

        `ready` is what a poller reported, so that only those sources are asked; None asks all of them.
        """
        try:
            self._executor.check(ready)
            for event in self._clients.arrived(self.engine.state, ready):
                self.engine.arrive(event)
            if asked := self._clients.asked.operations:
                self._facilities.operations.ask_all(asked)
            messages = self._executor.receive()
            for message in messages:
                self._take_result(message, message is messages[-1])
            if self._recovery.sentence:
                self._await_ranks()
            else:
                self._advance()
            if self._clients.asked.subscribed:
                self._begin_streams()
            self._send_stats()
        except LOSSES as error:
            self._lose_ranks(error)

    def _advance(self) -> None:
        """Decide as far ahead as the pipeline allows, and carry out what is decided."""
        progress, goes_on, began_s = self._progress, True, perf_counter()
        while goes_on:
            goes_on = False
            for ready in self.engine.turn():
                if (plan := ready.plan) is not None:
                    goes_on = True
                    if plan.admitted:
                        ids = ready.state.rows.id[-len(plan.admitted) :].tolist()
                        self._clients.begun(ids, self._misses.admitted(ready.befores[-1], ready.state, ids))
                progress.plan_seconds += perf_counter() - began_s
                self._carry_out(ready)
                began_s = perf_counter()
        progress.plan_seconds += perf_counter() - began_s

    def _answer(self, peer: bytes, message: Operated) -> None:
        """Answer an operation, behind statistics that show what it did."""
        self._clients.tell_stats(self._stats())
        self._clients.answer(peer, message)

    def _carry_out(self, ready: Ready) -> None:
        """Write the frame, broadcast its events, then send the clients their outputs."""
        self._write_frame(ready)
        news, ended = self._news.of(ready)
        if ended:
            self._misses.ended(ready.befores[0], ended)
        self._executor.send(encode_events(ready.events))
        if self._streams.readers:
            for peer, frame in self._streams.frames(ready.events, ready.state, digest(ready.state)):
                if not self._clients.stream(peer, frame):
                    self._streams.end(peer)
        self._clients.tell(news if (handovers := self._facilities.handovers) is None else handovers.without_kept(news))

    def _begin_streams(self) -> None:
        """Begin and end event streams, as clients have asked. Every folded event is written by now."""
        asked = self._clients.asked.subscribed
        while asked:
            peer, is_on = asked.pop(0)
            if not (is_on and self._clients.stream(peer, self._streams.begin(peer, self.state))):
                self._streams.end(peer)

    def _write_frame(self, ready: Ready) -> None:
        """Record the events and the ranks' reports."""
        events, state_digest = ready.events, digest(ready.state)
        if events and (plan := plan_of(events[-1])) is not None and plan.step % ready.state.config.digest_interval == 0:
            self._checks.expect(plan.step, state_digest, ready.state)
        reported = self._checks.take_new() if self._checks.new.digests else NOTHING_REPORTED
        self._recorder.append(events, ready.befores, state_digest, reported.digests, ready.matched, reported.details)

    # ---- results of the ranks --------------------------------------------------------------------------------------

    def _take_result(self, message: RankMessage, is_last: bool) -> None:
        """Take one rank's message. If it `is_last` of the arrived ones, the next plan may be folded with it."""
        if type(message) is not StepResult:
            if isinstance(message, RankFailed):
                raise RankGaveUp(f"rank {message.rank} failed: {message.message}")
            taker = self._facilities.taker(message)
            assert taker is not None, "a rank says that it is ready once, before the engine starts"
            self._abort_with(taker.answered(message, self.engine.state))
            return
        if message.short:
            self._lack_memory(message)
            return
        if message.step % self._started.config.digest_interval == 0:
            self._checks.compare(message)
        if message.rank == 0:
            self._take_step(message, is_last)

    def _take_step(self, result: StepResult, is_last: bool) -> None:
        engine, event = self.engine, result.commit
        if self._checks.due:
            for due in self._checks.due.values():
                due.commits[result.step] = event
        ended = engine.state.in_flight[0]
        self._recorder.took(result.step, result.seconds)
        self._progress.took(ended.tokens, result.seconds)
        if (costs := self._facilities.draft_costs) is not None:
            costs.took(ended, event, result.seconds)
        if result.experts is not None:
            self._facilities.experts = result.experts
        if result.failed:
            self._abort_with(self._failures.errors(engine.state, result.failed))
        scored = bool(result.logprobs) and any(result.logprobs)
        note = Beside(prompt_outputs(engine.state, result.prompts), result.logprobs) if scored or result.prompts else None
        if is_last and not scored:
            engine.fold_last(event, note)
        else:
            engine.fold(event, note, apart=not scored)

    def _lack_memory(self, result: StepResult) -> None:
        """No rank computes a step: what rank 0 says, all say. Nothing is in flight behind it. Who needs what is gone ends."""
        state = self.engine.state
        if result.rank or not state.in_flight or result.step != state.in_flight[0].step:
            return
        self.engine.fold(self._facilities.shortages.lacking(state, result.short, WITHOUT_INPUT if result.gone else WITHOUT_MEMORY))
        self._checks.lose_steps(result.step)
        self._facilities.lose_steps()
        if result.gone:
            self._abort_with(dict.fromkeys(who_lacks(self.engine.state, result.gone), GONE))

    def _abort_with(self, errors: Mapping[int, str]) -> None:
        """Abort these requests and tell their clients why."""
        if errors:
            self.engine.fold(RequestAborted(ids=tuple(map(RequestId, sorted(errors))), reason="error"), Beside(errors=errors))

    # ---- ranks that are lost ---------------------------------------------------------------------------------------

    def _lose_ranks(self, error: Exception) -> None:
        """Go on without ranks until others have started. Raises `error` or NoMoreRanks if there can be none."""
        recovered, errors = self._recovery.begin(error, self._executor, self.engine.state)
        self._executor = NoRanks()
        self._checks.due.clear()
        self._progress.lose_ranks()
        self._abort_with(errors)
        self.engine.fold(recovered)
        self._carry_out(self.engine.take())
        self._facilities.lose_ranks()
        self._clients.tell_stats(self._stats())

    def _await_ranks(self) -> None:
        """Record and report what has happened meanwhile. New ranks that are ready begin with the state behind it."""
        if self.engine.has_news:
            self._carry_out(self.engine.take())
        if (found := self._recovery.look()) is None:
            return
        executor, ranks = found
        self._executor = executor
        executor.while_full = self._send_stats
        self._facilities.begin_again(executor.send, ranks)
        if self._poller is not None:
            executor.watch(self._poller)
        executor.send(encode_begin(self._started, snapshots.encode(snapshots.snapshot(self.state), WIDTH_MAX)))
        self._advance()

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def poll_timeout_ms(self) -> int | None:
        """How long to wait for news that a poller can see, None for no limit: steps and slow clients need looks, and what has
        arrived that no poller can see does not wait."""
        if self._executor.has_results:
            return 0
        if self._recovery.sentence:
            return RECOVERY_PATIENCE_MS
        if self._clients.is_behind:
            return BEHIND_PATIENCE_MS
        return self.engine.wait_ms(PATIENCE_MS)

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
            if self.engine.has_news or self._checks.new.digests:
                self._write_frame(self.engine.take())
        except IllegalEvent as error:  # a redacted log cannot represent an illegal event
            log.warning("the engine's last turn could not be recorded: %s", error)
        self._recorder.close()

    def leave(self, sentence: str) -> None:
        """End the log; clients keep their requests for the engine core that follows."""
        self._clients.tell_all(EngineDied(message=sentence, is_followed=True))
        self.record_end()

    def shut_down(self) -> None:
        """Abort live requests, so that the log records their end, and notify the clients."""
        live = tuple(RequestId(id_) for id_ in sorted(self.state.requests.mapping()))
        if live:
            self.engine.fold(RequestAborted(ids=live, reason="shutdown"))
            self._carry_out(self.engine.take())
        self.record_end()

    def _send_stats(self) -> None:
        """Send gauges and counters: a few times a second while something happens, and at once when activity ends."""
        now = monotonic()
        if now < self._stats_due_s and self.engine.state.requests:
            return
        self._stats_due_s = now + STATS_INTERVAL_S
        self._progress.watch(now, self.engine.state.in_flight, self._executor)
        self._clients.tell_stats(self._stats())

    def _stats(self) -> EngineStats:
        state, recovery, pages = self.engine.state, self._recovery, self._started.config.page_count
        counters, (stalls, stall_seconds) = state.counters, self._executor.stalls
        stats = EngineStats(
            running=len(state.rows),
            waiting=len(state.waiting),
            blocks_total=pages,
            blocks_held=pages - state.pool.free,
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
            ring_stalls=recovery.stall_count + stalls,
            ring_stall_seconds=recovery.stall_seconds + stall_seconds,
            log_bytes=self._recorder.bytes_written,
            log_frames_lost=self._recorder.frames_lost,
            step_seconds_sum=self._progress.step_seconds,
            plan_seconds_sum=self._progress.plan_seconds,
            digest_checks=self._checks.count,
            stalled=self._progress.stalled,
            step_silent_seconds=self._progress.silent_s,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            spoilt=self._failures.spoilt,
            lost=self._misses.losses,
            recovering=recovery.sentence,
            recoveries=recovery.count,
            recovery_seconds=recovery.seconds,
        )
        return replace(stats, **self._facilities.stats(state))
