"""Progress: how long the oldest step in flight has had no result, and when that is too long.

Owns both bounds, which follow the recent durations of steps of the same size. Past the first bound a step is late: that is
reported, and may pass. Past the second bound the step is over. Time is counted from look to look, at most LOOK_MAX_S each:
time during which this process itself was stopped does not count against the ranks. Reads no clock.
    late     LATE_FACTOR times the longest step of its size (a power of two of tokens), at least LATE_MIN_S
             UNSEEN_TOKEN_S a token, at least UNSEEN_MIN_S, where none of its size has ended yet: kernels may still be compiled
    over     OVER_FACTOR times that, at least the timeout; never for a timeout of 0
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from vnext.state.state import StepInFlight

LATE_MIN_S = 10.0
LATE_FACTOR = 10.0
UNSEEN_MIN_S = 60.0
UNSEEN_TOKEN_S = 0.5
OVER_FACTOR = 3.0
LOOK_MAX_S = 2.0
KEPT = 0.99
"""Factor on the longest step, applied as each step ends: some hundred steps later a single slow one is forgotten."""


log = logging.getLogger(__name__)


class Suspects(Protocol):
    """Ranks that may say why a step has had no result."""

    def why_silent(self, step: int) -> str:
        """In a part of a sentence."""


class RanksStalled(RuntimeError):
    """A step is over without a result."""


class Progress:
    """The steps of one engine. Mutable. `silent_s`: how long the oldest step in flight has been the oldest, counted in looks.
    `is_late`: when last looked at; `stalled`: a sentence meanwhile. `step_seconds`, `plan_seconds`: of all steps, and of their
    decisions."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_s: dict[int, float] = {}
        self._step, self._looked_s = -1, 0.0
        self._late_after_s = 0.0
        self.silent_s = self.step_seconds = self.plan_seconds = 0.0
        self.is_late = False
        self.stalled = ""

    def took(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens has ended after `seconds`."""
        self.step_seconds += seconds
        size = tokens.bit_length()
        self._longest_s[size] = max(seconds, self._longest_s.get(size, 0.0) * KEPT)

    def look(self, now_s: float, step: int, tokens: int) -> None:
        """Note the oldest step in flight and its tokens; step -1 for none. `now_s` is monotonic."""
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_MAX_S), now_s
        if step != self._step:
            self._step, self.silent_s, self._late_after_s = step, 0.0, self._bound_s(tokens)
        elif step >= 0:
            self.silent_s += passed_s
        self.is_late = step >= 0 and self.silent_s > self._late_after_s

    def watch(self, now_s: float, in_flight: Sequence[StepInFlight], ranks: Suspects) -> None:
        """Look at the oldest step in flight; report when it is late and when ranks go on. Raises RanksStalled when it is over."""
        self.look(now_s, in_flight[0].step if in_flight else -1, in_flight[0].tokens if in_flight else 0)
        if not self.is_late:
            if self.stalled:
                log.warning("The ranks go on.")
                self.stalled = ""
            return
        step = in_flight[0].step
        sentence = f"step {step} has had no result for {self.silent_s:.0f} s: {ranks.why_silent(step)}"
        if self.is_over:
            raise RanksStalled(sentence)
        if not self.stalled:
            log.warning("The engine is stalled: %s.", sentence)
        self.stalled = f"The engine is stalled: {sentence}."

    def lose_ranks(self) -> None:
        """There are no ranks now that could be late."""
        self.stalled = ""

    @property
    def is_over(self) -> bool:
        return self.is_late and 0 < self._timeout_s < self.silent_s and self.silent_s > OVER_FACTOR * self._late_after_s

    def _bound_s(self, tokens: int) -> float:
        seen_s = self._longest_s.get(tokens.bit_length())
        if seen_s is None:
            return max(self._at_least_s(UNSEEN_MIN_S), UNSEEN_TOKEN_S * tokens)
        return max(self._at_least_s(LATE_MIN_S), LATE_FACTOR * seen_s)

    def _at_least_s(self, usual_s: float) -> float:
        """The floor of the first bound; a short timeout lowers it."""
        return min(usual_s, self._timeout_s / OVER_FACTOR) if self._timeout_s else usual_s
