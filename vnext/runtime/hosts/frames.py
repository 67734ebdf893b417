"""The messages between an engine's master and the agents of its other hosts. Typed msgpack.

`generation` counts the sets of ranks that an engine core has started, so that nothing of an earlier set is taken for one of the
present.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
import zmq

from vnext.runtime.protocol.messages import RankMessage, RankReady
from vnext.runtime.protocol.settings import EngineSettings, RankSettings


class Frame(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all messages."""


class HostHere(Frame, frozen=True, tag=1):
    """An agent's first message: which host it is, and under which address the others reach it."""

    node: int
    address: str


class Beat(Frame, frozen=True, tag=2):
    """Says only that its sender is alive."""


class StartRanks(Frame, frozen=True, tag=3):
    """End what there is, and start these ranks; the agent puts its own model folder, ring and sockets into their settings."""

    generation: int
    engine: EngineSettings
    ranks: tuple[RankSettings, ...]


class RingMessage(Frame, frozen=True, tag=4):
    """One message of the ring, for all ranks of the host."""

    generation: int
    data: bytes


class EndRanks(Frame, frozen=True, tag=5):
    """End the ranks at once; answered by RanksEnded."""

    generation: int


class FromRank(Frame, frozen=True, tag=6):
    """A rank's message to the engine core."""

    generation: int
    data: bytes


class RanksEnded(Frame, frozen=True, tag=7):
    """The host's ranks have ended. `why` is "" where the master has asked for it; `refused`: they could not start, and why."""

    generation: int
    why: str = ""
    refused: bool = False


AnyFrame = HostHere | Beat | StartRanks | RingMessage | EndRanks | FromRank | RanksEnded
encode = msgspec.msgpack.Encoder().encode
decoder = msgspec.msgpack.Decoder(AnyFrame)
BEAT_S, SILENCE_S = 1.0, 10.0
"""Between two beats; and after how long without any message a host is lost."""


# ---- ranks of one host -------------------------------------------------------------------------------------------


class LocalRanks(Protocol):
    """See core/executor.py, Executor."""

    while_full: Callable[[], None]

    def begin(self) -> None: ...

    def started(self) -> tuple[RankReady, ...] | None: ...

    def send(self, message: bytes) -> None: ...

    def receive(self) -> list[RankMessage]: ...

    def watch(self, poller: zmq.Poller) -> None: ...

    def check(self, ready: Collection[object] | None = None) -> None: ...

    def why_silent(self, step: int) -> str: ...

    def stacks(self, step: int) -> dict[int, str]: ...

    def kill(self) -> None: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_results(self) -> bool: ...

    @property
    def stalls(self) -> tuple[int, float]: ...

    def stop(self, grace_s: float = ...) -> None: ...
