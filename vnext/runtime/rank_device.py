"""A rank on a device: the same replica, whose steps are asked for and answered later.

Owns the steps on their way. A step's digest is of the state in which it was asked for; its result is sent when its tokens are
here. A commit that comes before this rank has its own tokens (another rank was quicker) waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from vnext.runtime.device_steps import DeviceSteps, Flying
from vnext.runtime.group import require_whole_group
from vnext.runtime.messages import StepResult
from vnext.runtime.rank import Rank
from vnext.state.events import EngineStarted, pack_tokens
from vnext.state.reduce import start
from vnext.state.state import State

LOOK_S = 100e-6
"""How long to wait for a message before looking at a step on its way: the device has the next one by then."""


class DeviceRank(Rank):
    """As Rank; `handle` never has a result, `collect` has them in the order of the steps."""

    def __init__(self, rank: int, make_steps: Callable[[State], DeviceSteps]) -> None:
        """`make_steps` takes the cache's memory and captures, given the engine's first state."""
        super().__init__(rank, None)
        self._make_steps = make_steps
        self.steps: DeviceSteps | None = None
        self._flying: deque[tuple[Flying, StepResult]] = deque()
        self._landed: deque[StepResult] = deque()

    @property
    def patience_s(self) -> float | None:
        return LOOK_S if self._flying or self._landed else None

    def collect(self) -> list[StepResult]:
        while self._flying and self._flying[0][0].is_there():
            self._land()
        landed = list(self._landed)
        self._landed.clear()
        return landed

    def _start(self, event: EngineStarted) -> None:
        self._state = start(event)
        self.steps = self._make_steps(self._state)

    def _run_step(self) -> None:
        flying = self.steps.launch(self._state)
        self._flying.append((flying, self._result(flying.step, b"", (), 0.0)))

    def _own(self, step: int) -> bytes:
        while step not in self._own_tokens:
            self._land()
        return self._own_tokens.pop(step)

    def _land(self) -> None:
        """Wait for the oldest step; its tokens are known from now on, and its result is to be sent."""
        flying, result = self._flying.popleft()
        outputs = flying.outputs()
        require_whole_group()
        self._own_tokens[flying.step] = tokens = pack_tokens(outputs.tokens)
        told = {"tokens": tokens, "logprobs": outputs.logprobs} if self._rank == 0 else {}
        self._landed.append(replace(result, seconds=time.perf_counter() - flying.asked_s, **told))
