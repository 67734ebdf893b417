"""Random numbers: a counter-based stream from one integer seed (SplitMix64, Steele, Lea and Flood 2014).

The simulator draws every fault from it, so a seed identifies a run on any machine and in any version of Python. It is
the only randomness in `vnext/sched`, and the engine's decisions never see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

WORD = 2**64 - 1
STRIDE = 0x9E3779B97F4A7C15
Option = TypeVar("Option")


class Rng:
    """Draws of one seed, in order. Mutable: it counts its draws."""

    def __init__(self, seed: int) -> None:
        self._counter = seed & WORD

    def word(self) -> int:
        """A uint64: the counter through SplitMix64's finaliser, a bijection."""
        self._counter = value = (self._counter + STRIDE) & WORD
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
        return value ^ (value >> 31)

    def below(self, bound: int) -> int:
        """A number in [0, bound); `bound` is at least 1 and far below 2**64."""
        return self.word() % bound

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def happens(self, percent: int) -> bool:
        """True with this probability (in percent). Takes one draw, or none if the probability is 0."""
        return percent > 0 and self.word() % 100 < percent

    def choose(self, options: Sequence[Option]) -> Option:
        return options[self.below(len(options))]

    def fork(self) -> Rng:
        """An independent stream; drawing from it does not advance this one."""
        return Rng(self.word())
