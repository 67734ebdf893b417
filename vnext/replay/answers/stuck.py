"""Detects an engine that is alive but makes no progress, from its events alone.

Owns three signs. A healthy engine never shows any of them, whatever its policy and however small its cache:
    idle        requests live, nothing runs, and nothing is planned in IDLE_FRAMES frames in a row
    livelock    since the last reported token, steps have computed everything that lives PATIENCE + 2 times over
    law S6      the scheduler itself decides to do nothing although something could be computed

A fourth sign needs a clock and belongs to watch: a log that stops growing while requests live.
"""

from __future__ import annotations

from vnext.log.codec import Frame
from vnext.sched.policies import BUILT_IN
from vnext.sched.ranking import PATIENCE
from vnext.sched.schedule import schedule
from vnext.state.adapters import may_run
from vnext.state.events import AnyEvent, EngineRecovered, StepPlanned
from vnext.state.state import State

IDLE_FRAMES = 3


class StuckDetector:
    """One engine's signs. Mutable: pass it every event with the state after it, and the end of every frame."""

    def __init__(self) -> None:
        self._idle_frames = 0
        self._reported = -1
        self._computed = 0
        self._recovers = False

    def event(self, event: AnyEvent, after: State) -> str:
        """Why the engine is stuck after this event, "" if it is not."""
        counters = after.counters
        progress = counters.generated_tokens + counters.aborted + after.next_id
        if progress != self._reported:
            self._reported, self._computed = progress, 0
        if isinstance(event, EngineRecovered):
            self._recovers, self._computed = True, 0
        if not isinstance(event, StepPlanned):
            return ""
        self._recovers = False
        self._computed += after.in_flight[-1].tokens
        in_flight = after.config.max_num_batched_tokens * (after.config.pipeline_depth + 1)
        if self._computed <= in_flight:
            return ""
        alive = int((after.rows.known + after.rows.placeholders).sum()) + sum(entry.known for entry in after.waiting)
        if self._computed > (PATIENCE + 2) * alive + in_flight:
            return f"livelock: {self._computed} tokens were computed since anybody was told one, of {alive} that live"
        return ""

    def frame(self, frame: Frame, after: State) -> str:
        """Why the engine is stuck after this frame, "" if it is not."""
        if any(isinstance(event, StepPlanned) for event in frame.events) or not after.requests or after.in_flight:
            self._idle_frames = 0
            return ""
        if self._recovers or after.paused or _awaits_adapter(after):  # ranks that start plan nothing
            return ""
        if _decides_nothing(after):
            return f"law S6: {len(after.requests)} requests live, nothing runs, and the decision is to do nothing"
        self._idle_frames += 1
        if self._idle_frames < IDLE_FRAMES:
            return ""
        return f"idle: {len(after.requests)} requests live, nothing runs, and {IDLE_FRAMES} frames in a row plan nothing"


def _awaits_adapter(state: State) -> bool:
    """Whether nothing runs and a request waits for an adapter that no slot holds: ranks read it, which may take frames."""
    return bool(state.slots) and not len(state.rows) and not all(may_run(state, entry.id) for entry in state.waiting)


def _decides_nothing(state: State) -> bool:
    """Whether the scheduler plans nothing. False if the policy is the engine's own: reading a log must not import it."""
    return state.config.policy in BUILT_IN and schedule(state) is None
