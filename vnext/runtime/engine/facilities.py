"""Facilities: the parts of an engine core that have events of their own, behind one protocol, and which of them an engine has.

A facility that is off costs no call: what an engine cannot have is not in its list, and what has nothing to do has a false `is_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from vnext.runtime.protocol.messages import RankMessage, RankReady
from vnext.state.events import AnyEvent
from vnext.state.state import State

NO_ERRORS: Mapping[int, str] = MappingProxyType({})
Send = Callable[[bytes], None]
"""Broadcasts a ring message."""


class Facility(Protocol):
    """One part of an engine core. Mutable. Every turn of the loop asks it for events, in the order of the core's list.

    `answers`: the messages of ranks that it takes. `is_on`: whether it has anything to do. `goes_out`: whether the event that it
    returned last is broadcast before it is asked again, as commands to the ranks follow it. `precedes`, `asks_behind`: whether
    `precede` and `ask` do anything.
    """

    answers: ClassVar[tuple[type, ...]] = ()
    is_on: bool = True
    goes_out: bool = False
    precedes: ClassVar[bool] = False
    asks_behind: ClassVar[bool] = False

    def next_event(self, state: State) -> AnyEvent | None:
        """The next event; None while there is none or it waits. What it returned before has been folded."""

    def precede(self, state: State, event: AnyEvent) -> AnyEvent | None:
        """The event that comes before one from a client; None for none."""

    def ask(self, state: State) -> None:
        """Ask the ranks for work. They have been sent everything that has been folded."""

    def answered(self, message: Any, state: State) -> Mapping[int, str]:
        """Take a rank's answer; one of something that is over is dropped. Returns the requests that can never go on, and why."""
        return NO_ERRORS

    def lose_ranks(self) -> None:
        """The ranks are lost: what they were to do is not done."""

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """Other ranks are in the place of those that were lost: `ranks` is what they reported, `send` reaches them."""

    def wait_ms(self, state: State) -> int | None:
        """How long the engine core may wait for news at most; None for no limit."""
        return None

    def stats(self, state: State) -> Mapping[str, object]:
        """Fields of EngineStats."""
        return {}


def takers(facilities: Sequence[Facility]) -> dict[type[RankMessage], Facility]:
    """Which facility takes which message of a rank."""
    return {kind: facility for facility in facilities for kind in facility.answers}
