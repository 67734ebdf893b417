"""A facility: one part of an engine core that has events of its own and works with ranks, behind one protocol.

A facility that is off costs no call: what an engine cannot have is not among its facilities (facilities.py), and what has nothing
to do has a false `is_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from vnext.runtime.protocol.messages import RankReady
from vnext.sched.engine import Source
from vnext.state.state import State

NO_ERRORS: Mapping[int, str] = MappingProxyType({})
Send = Callable[[bytes], None]
"""Broadcasts a ring message."""


class Facility(Source, Protocol):
    """One part of an engine core. Mutable. `answers`: the messages of ranks that it takes."""

    answers: ClassVar[tuple[type, ...]] = ()

    def answered(self, message: Any, state: State) -> Mapping[int, str]:
        """Take a rank's answer; one of something that is over is dropped. Returns the requests that can never go on, and why."""
        return NO_ERRORS

    def lose_steps(self) -> None:
        """The steps in flight are over, because memory ran short: ranks have not done what was asked behind them."""
        return

    def lose_ranks(self) -> None:
        """The ranks are lost: what they were to do is not done."""
        return

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """Other ranks are in the place of those that were lost: `ranks` is what they reported, `send` reaches them."""
        return

    def stats(self, state: State) -> Mapping[str, object]:
        """Fields of EngineStats."""
        return {}
