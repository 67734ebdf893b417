"""Throughput: how much of an amount ends in a second, measured over the last half minute in which there was any.

Owns the decay. Refusals say with it when to come back. Reads no clock: callers give monotonic seconds.
"""

from __future__ import annotations

from math import ceil, exp

MEMORY_S = 30.0
RETRY_MIN_S, RETRY_MAX_S = 1, 60


class Throughput:
    """A decayed mean: what ended t seconds ago counts e^(-t / MEMORY_S). Idle time does not count. Mutable."""

    def __init__(self) -> None:
        self._amount = self._seconds = self._seen_s = 0.0

    def begin(self, now_s: float) -> None:
        """There is some again, after there was none."""
        self._seen_s = now_s

    def ended(self, amount: float, now_s: float) -> None:
        """So much has ended."""
        self._amount, self._seconds = self._until(now_s)
        self._amount += amount
        self._seen_s = now_s

    def per_second(self, now_s: float) -> float:
        """The rate at this moment, 0 if none has ended. A time in which nothing ends lowers it."""
        amount, seconds = self._until(now_s)
        return amount / seconds if seconds > 0 else 0.0

    def _until(self, now_s: float) -> tuple[float, float]:
        passed = exp(-max(0.0, now_s - self._seen_s) / MEMORY_S)
        return self._amount * passed, self._seconds * passed + MEMORY_S * (1 - passed)


def retry_after_s(amount: float, per_second: float) -> int:
    """Whole seconds in which `amount` ends at a rate, within the bounds above; the least where nothing was measured."""
    if per_second <= 0:
        return RETRY_MIN_S
    return max(RETRY_MIN_S, ceil(min(amount / per_second, RETRY_MAX_S)))
