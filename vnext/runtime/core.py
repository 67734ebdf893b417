"""Engine core: orders events, decides, records and broadcasts. The loop everybody can recite:

    for event in arrived():                    requests, aborts, commits: one numbered stream
        state = reduce(state, event)
    plan  = schedule(state)
    state = reduce(state, plan)                and the same event goes to the log and to every rank

Owns the one true order. A frame of the log is written before its effects: ranks hear of a plan and clients of a token
only then. With asynchronous scheduling step t+1 is planned while the ranks run step t; nothing here is different then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NoReturn

from vnext.runtime.broadcast import encode_events
from vnext.runtime.clients import Clients
from vnext.runtime.executor import Executor
from vnext.runtime.messages import EngineStats, RankFailed, RankMessage, RequestOutput, StepResult, TokenLogprobs
from vnext.runtime.recorder import Recorder
from vnext.sched.schedule import schedule
from vnext.state.committing import Settled, settle
from vnext.state.digest import digest, requests_otherwise
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import AnyEvent, EngineStarted, RequestAborted, StepCommitted, StepPlanned
from vnext.state.laws import check, check_cheap
from vnext.state.log import RankDetail, RankDigest
from vnext.state.outputs import Output, outputs
from vnext.state.reduce import reduce, start
from vnext.state.state import State

STATS_INTERVAL_S = 0.25
log = logging.getLogger(__name__)


class EngineCore:
    """One engine. `step` does one turn of the loop without waiting; whoever drives it waits for news between turns."""

    def __init__(
        self,
        started: EngineStarted,
        executor: Executor,
        recorder: Recorder,
        clients: Clients,
        all_laws: bool = False,
    ) -> None:
        self.state: State = start(started)
        self._executor = executor
        self._recorder = recorder
        self._clients = clients
        self._check: Callable[[State], None] = check if all_laws else check_cheap
        self._world_size = started.world_size
        self._unwritten: list[tuple[AnyEvent, State, Settled | None]] = []
        self._untold: list[tuple[Output, TokenLogprobs | None]] = []
        self._digests: dict[int, tuple[int, State, int]] = {}  # step -> structure, state, ranks still to report
        self._rank_digests: list[RankDigest] = []
        self._rank_details: list[RankDetail] = []
        self._digest_checks = 0
        self._step_seconds = 0.0
        self._plan_seconds = 0.0
        self._stats_due_s = 0.0
        executor.send(encode_events([started]))

    # ---- one turn --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take what has arrived, decide as far ahead as the pipeline allows, carry out the effects."""
        self._executor.check()
        for event in self._clients.arrived(self.state):
            self._fold(event)
        for message in self._executor.receive():
            self._take_result(message)
        self._advance()
        self._send_stats()

    def _advance(self) -> None:
        while True:
            began = time.perf_counter()
            if (plan := schedule(self.state)) is not None:
                self._fold(plan)
            self._plan_seconds += time.perf_counter() - began
            if self._unwritten:
                self._carry_out()
            if plan is None:
                return

    def _fold(self, event: AnyEvent, logprobs: tuple[TokenLogprobs | None, ...] = ()) -> None:
        before = self.state
        self._unwritten.append((event, before, None))  # first: an event that breaks the engine belongs into its log
        settled = settle(before, event) if isinstance(event, StepCommitted) else None
        self.state = reduce(before, event, settled)
        self._unwritten[-1] = (event, before, settled)
        self._check(self.state)
        for output in outputs(before, event, self.state, settled):
            self._untold.append((output, logprobs[output.sample] if logprobs and output.sample >= 0 else None))

    def _carry_out(self) -> None:
        """Write the frame, then broadcast its events, then tell the clients."""
        events = self._write_frame()
        self._executor.send(encode_events(events))
        told, self._untold = self._untold, []
        self._clients.tell((output.id, to_client(output, logprobs)) for output, logprobs in told)

    def _write_frame(self) -> tuple[AnyEvent, ...]:
        """Record what was folded since the last frame and what the ranks reported; returns the events."""
        events, befores, settled = zip(*self._unwritten) if self._unwritten else ((), (), ())
        self._unwritten = []
        state_digest = digest(self.state)
        if events and isinstance(events[-1], StepPlanned):
            self._expect_digests(events[-1].step, state_digest)
        self._recorder.append(events, befores, state_digest, self._rank_digests, settled, self._rank_details)
        self._rank_digests, self._rank_details = [], []
        return events

    # ---- results of the ranks --------------------------------------------------------------------------------------

    def _take_result(self, message: RankMessage) -> None:
        if isinstance(message, RankFailed):
            raise RuntimeError(f"rank {message.rank} failed: {message.message}")
        assert isinstance(message, StepResult), "a rank says that it is ready once, before the engine starts"
        self._compare_digests(message)
        if message.rank == 0:
            self._step_seconds += message.seconds
            self._recorder.took(message.step, message.seconds)
            self._fold(StepCommitted(step=message.step, tokens=message.tokens), message.logprobs)

    def _expect_digests(self, step: int, state_digest: int) -> None:
        """The digests that every rank must report for a step, if one is due: those of the state in which it runs."""
        if step % self.state.config.digest_interval == 0:
            self._digests[step] = (state_digest, self.state, self._world_size)

    def _compare_digests(self, result: StepResult) -> None:
        if result.step % self.state.config.digest_interval:
            return
        structure, state, missing = self._digests[result.step]
        self._rank_digests.append(RankDigest(result.rank, result.step, result.digest))
        if (result.digest, result.token_digest) != (structure, state.token_digest):
            self._drifted(result, state, "state" if result.digest != structure else "token")
        self._digest_checks += 1
        if missing == 1:
            del self._digests[result.step]
        else:
            self._digests[result.step] = (structure, state, missing - 1)

    def _drifted(self, result: StepResult, state: State, what: str) -> NoReturn:
        """End, after the log has named the rank, the step, and what it had otherwise than `state`."""
        requests = requests_otherwise(state, result.histories) if what == "token" else ()
        told = RankDetail(result.rank, result.step, result.details, result.token_digest, requests)
        self._rank_details.append(told)
        self._write_frame()
        whose = f" (requests {', '.join(map(str, requests))})" if requests else ""
        raise LawBroken("Y1", f"rank {result.rank} has drifted: its {what} digest differs at step {result.step}{whose}")

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Something has come that no poller can see."""
        return self._executor.has_results

    def record_end(self) -> None:
        """Write what was folded, and the event that could not be, when the engine dies of an error."""
        try:
            if self._unwritten or self._rank_digests:
                self._write_frame()
        except IllegalEvent as error:  # a log without texts has no shape for an event that may not happen
            log.warning("the engine's last turn could not be recorded: %s", error)
        self._recorder.close()

    def shut_down(self) -> None:
        """Abort what lives, so that the log ends with the truth, and tell the clients."""
        live = tuple(sorted(id_ for id_, _ in self.state.requests.items()))
        if live:
            self._fold(RequestAborted(ids=live, reason="shutdown"))
            self._carry_out()
        self.record_end()

    def _send_stats(self) -> None:
        """Gauges and counters, a few times a second while something happens, and at once when it ends."""
        now = time.monotonic()
        idle = not self.state.requests
        if now < self._stats_due_s and not idle:
            return
        self._stats_due_s = now + STATS_INTERVAL_S
        self._clients.tell_stats(self._stats())

    def _stats(self) -> EngineStats:
        state, counters = self.state, self.state.counters
        return EngineStats(
            running=len(state.rows),
            waiting=len(state.waiting),
            blocks_total=state.pool.block_count,
            blocks_held=state.pool.block_count - state.pool.free,
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
        )


def to_client(output: Output, logprobs: TokenLogprobs | None) -> RequestOutput:
    """A request's news as its client reads it."""
    return RequestOutput(
        name=output.name,
        tokens=b"" if output.token < 0 else output.token.to_bytes(4, "little"),
        finish=output.finish,
        stop_token=output.stop_token,
        cached_tokens=output.cached_tokens,
        logprobs=() if logprobs is None else (logprobs,),
    )


