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
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from vnext.log.codec import RankDetail, RankDigest
from vnext.runtime.core.adapters import AdapterLoading
from vnext.runtime.core.clients import Clients
from vnext.runtime.core.draft_counts import NO_DRAFTS, DraftCounts
from vnext.runtime.core.due_reports import DueReports
from vnext.runtime.core.executor import Executor
from vnext.runtime.core.owners import News
from vnext.runtime.core.progress import Progress, RanksStalled
from vnext.runtime.messages import (
    AdapterRead,
    EngineDied,
    EngineStats,
    PromptResult,
    RankFailed,
    RankMessage,
    RequestOutput,
    StepResult,
    TokenLogprobs,
)
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.ring.broadcast import encode_events
from vnext.sched.schedule import schedule
from vnext.sched.turn import steady_turn
from vnext.state.digest import digest, requests_otherwise
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import AnyEvent, EngineRecovered, EngineStarted, RequestAborted, RequestId, StepCommitted, StepPlanned
from vnext.state.fold_commit import MatchedSamples
from vnext.state.laws import check, check_cheap
from vnext.state.outputs import Output, outputs, outputs_apart
from vnext.state.reduce import fold, start
from vnext.state.samples import still_owed
from vnext.state.state import State

STATS_INTERVAL_S = 0.25
PATIENCE_MS, BEHIND_PATIENCE_MS = 1000, 50
NO_ERRORS: Mapping[int, str] = MappingProxyType({})
log = logging.getLogger(__name__)


class EngineCore:
    """One engine. `step` does one turn of the loop without waiting; its caller waits for news between turns."""

    def __init__(
        self,
        started: EngineStarted,
        executor: Executor,
        recorder: Recorder,
        clients: Clients,
        all_laws: bool = False,
        step_timeout_s: float = 0.0,
    ) -> None:
        self.state: State = start(started)
        self._executor = executor
        self._recorder = recorder
        self._clients = clients
        self._check: Callable[[State], None] = check if all_laws else check_cheap
        self._world_size = started.world_size
        self._unwritten: list[tuple[AnyEvent, State, MatchedSamples | None]] = []
        self._untold: list[News] = []
        self._due: dict[int, DueReports] = {}  # by step
        self._drafts = DraftCounts()
        self._rank_digests: list[RankDigest] = []
        self._rank_details: list[RankDetail] = []
        self._digest_checks = 0
        self._step_seconds = 0.0
        self._plan_seconds = 0.0
        self._stats_due_s = 0.0
        self._progress = Progress(step_timeout_s)
        self._stalled = ""
        self._adapters = AdapterLoading(started.world_size, executor.send)
        executor.while_full = self._send_stats
        executor.send(encode_events([started]))

    def begin_after(self, recovered: EngineRecovered) -> None:
        """Another engine core had the requests that clients submit from now on. Call this first."""
        self._fold(recovered)
        self._carry_out()

    # ---- one turn --------------------------------------------------------------------------------------------------

    def step(self, ready: Collection[object] | None = None) -> None:
        """Take everything that has arrived, decide as far ahead as the pipeline allows, carry out the effects.

        `ready` is what a poller reported, so that only those sources are asked; None asks all of them.
        """
        self._executor.check(ready)
        for event in self._clients.arrived(self.state, ready):
            self._fold(event)
        messages = self._executor.receive()
        for message in messages:
            self._take_result(message, message is messages[-1])
        self._advance()
        self._send_stats()

    def _advance(self) -> None:
        while True:
            self._load_adapters()
            began = time.perf_counter()
            if (plan := schedule(self.state)) is not None:
                self._fold(plan)
                if plan.admitted:
                    self._clients.begun(self.state.rows.id[-len(plan.admitted) :].tolist())
            self._plan_seconds += time.perf_counter() - began
            if self._unwritten:
                self._carry_out()
            if plan is None:
                return

    def _load_adapters(self) -> None:
        """Give slots to adapters that the ranks have read; ask for those that waiting requests need."""
        if not self.state.slots:
            return
        files = self._clients.adapter_files
        while files:
            self._adapters.know(files.pop())
        while events := self._adapters.events(self.state):
            for event in events:
                self._fold(event)
            self._carry_out()  # a rank that is asked for the next adapter has given this one its slot

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
            going, ended = outputs_apart(before, matched)
            self._untold.append((going, self._news(ended)))
        elif news := outputs(before, event, self.state, matched):
            self._untold.append((None, self._news(news, logprobs, errors)))

    def _news(
        self, news: Sequence[Output], logprobs: Sequence[TokenLogprobs | None] | None = None, errors: Mapping[int, str] = NO_ERRORS
    ) -> list[RequestOutput]:
        """What clients read of these outputs; arguments as in `_fold`."""
        made = []
        for output in news:
            drafts = self._drafts.pop(output.id) if output.finish else NO_DRAFTS
            made.append(to_client(output, logprobs, errors.get(output.id, ""), drafts))
        return made

    def _carry_out(self) -> None:
        """Write the frame, broadcast its events, then send the clients their outputs."""
        events = self._write_frame()
        self._executor.send(encode_events(events))
        reported, self._untold = self._untold, []
        self._clients.tell(reported)

    def _write_frame(self) -> tuple[AnyEvent, ...]:
        """Record the events folded since the last frame and the ranks' reports; returns the events."""
        events, befores, matched = zip(*self._unwritten) if self._unwritten else ((), (), ())
        self._unwritten = []
        state_digest = digest(self.state)
        if events and isinstance(events[-1], StepPlanned):
            self._expect_digests(events[-1].step, state_digest)
        self._recorder.append(events, befores, state_digest, self._rank_digests, matched, self._rank_details)
        self._rank_digests, self._rank_details = [], []
        return events

    # ---- results of the ranks --------------------------------------------------------------------------------------

    def _take_result(self, message: RankMessage, is_last: bool) -> None:
        """Take one rank's message. If it `is_last` of the arrived ones, the next plan may be folded with it."""
        if isinstance(message, RankFailed):
            raise RuntimeError(f"rank {message.rank} failed: {message.message}")
        if isinstance(message, AdapterRead):
            self._abort_with(self._adapters.answered(message, self.state))
            return
        assert isinstance(message, StepResult), "a rank says that it is ready once, before the engine starts"
        self._compare_digests(message)
        if message.rank == 0:
            event = message.commit
            for due in self._due.values():
                due.commits[message.step] = event
            self._step_seconds += message.seconds
            self._recorder.took(message.step, message.seconds)
            self._progress.took(self.state.in_flight[0].tokens, message.seconds)
            self._abort_failed(message.failed)
            if message.prompts:
                self._untold.append((None, prompt_outputs(self.state, message.prompts)))
            if not is_last or not self._is_steady_turn(event, message.logprobs):
                self._fold(event, message.logprobs)

    def _abort_failed(self, failed: tuple[tuple[int, str], ...]) -> None:
        """Abort the requests whose constraint a rank could not follow, before the tokens that it chose nevertheless. One that has
        given way since the step was planned fails again when it is back: it is still owed tokens."""
        if failed:
            owed = still_owed(self.state)
            self._abort_with({id_: why for id_, why in failed if id_ in owed})

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
        self._unwritten = [
            (event, before, turn.matched),
            (turn.plan, before, None),
        ]  # nothing reads the state before such a plan
        self._untold.append((turn.going, ()))
        self._plan_seconds += time.perf_counter() - began
        return True

    def _expect_digests(self, step: int, state_digest: int) -> None:
        """Note the digests that every rank must report for a step, if one is due: those of the state in which it runs."""
        if step % self.state.config.digest_interval == 0:
            self._due[step] = DueReports(state_digest, self.state)

    def _compare_digests(self, result: StepResult) -> None:
        if result.step % self.state.config.digest_interval:
            return
        due = self._due[result.step]
        self._rank_digests.append(RankDigest(result.rank, result.step, result.digest))
        if (result.digest, result.token_digest) != (due.structure, due.state.token_digest):
            self._drifted(result, due.state, "state" if result.digest != due.structure else "token")
        self._digest_checks += 1
        due.reports.append(result)
        if len(due.reports) == self._world_size:
            del self._due[result.step]
            for report, fed in due.fed_otherwise():
                self._drifted(report, due.state, "batch", fed)

    def _drifted(self, result: StepResult, state: State, what: str, fed: tuple[str, ...] = ()) -> NoReturn:
        """Raise, after logging the rank, the step, and where it differs from `state`."""
        requests = requests_otherwise(state, result.histories) if what == "token" else ()
        reported = RankDetail(result.rank, result.step, result.details, result.token_digest, requests, fed)
        self._rank_details.append(reported)
        self._write_frame()
        whose = f" (requests {', '.join(map(str, requests))})" if requests else f" ({', '.join(fed)})" if fed else ""
        raise LawBroken("Y1", f"rank {result.rank} has drifted: its {what} digest differs at step {result.step}{whose}")

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something has arrived that no poller can see."""
        return self._executor.has_results

    @property
    def poll_timeout_ms(self) -> int | None:
        """How long to wait for news that a poller can see, None for no limit: steps and slow clients need looks."""
        if self._clients.is_behind:
            return BEHIND_PATIENCE_MS
        return PATIENCE_MS if self.state.in_flight else None

    def record_end(self) -> None:
        """When the engine dies of an error, write the folded events and the event that could not be folded."""
        try:
            if self._unwritten or self._rank_digests:
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
        state, counters = self.state, self.state.counters
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
            ring_stalls=self._executor.stall_count,
            ring_stall_seconds=self._executor.stall_seconds,
            log_bytes=self._recorder.bytes_written,
            log_frames_lost=self._recorder.frames_lost,
            step_seconds_sum=self._step_seconds,
            plan_seconds_sum=self._plan_seconds,
            digest_checks=self._digest_checks,
            stalled=self._stalled,
            step_silent_seconds=self._progress.silent_s,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            adapters=self._adapters.stats(state),
        )


def prompt_outputs(state: State, results: Sequence[PromptResult]) -> list[RequestOutput]:
    """What the requests that are live get of their prompts. It precedes the outputs of the step that computed it."""
    return [
        RequestOutput(name=state.requests[each.id].name, tokens=b"", number=each.id, prompt=(each,))
        for each in results
        if each.id in state.requests
    ]


def to_client(
    output: Output, logprobs: Sequence[TokenLogprobs | None] | None, error: str = "", drafts: tuple[int, int] = NO_DRAFTS
) -> RequestOutput:
    """A request's output as its client reads it; `logprobs` has one entry per sample of the step, `error` says why the engine
    aborts the request, and `drafts` are those accepted and rejected."""
    scored = logprobs[output.sample] if logprobs and output.sample >= 0 else None
    return RequestOutput(
        name=output.name,
        tokens=b"" if output.token < 0 else output.token.to_bytes(4, "little"),
        finish=output.finish,
        stop_token=output.stop_token,
        cached_tokens=output.cached_tokens,
        logprobs=() if scored is None else (scored,),
        number=output.id,
        error=error,
        accepted_drafts=drafts[0],
        rejected_drafts=drafts[1],
    )
