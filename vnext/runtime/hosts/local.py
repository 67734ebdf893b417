"""Ranks of one host as this folder sees them: the part of an executor (core/executor.py) that it uses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import zmq

from vnext.runtime.protocol.messages import RankMessage, RankReady


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
    def stall_count(self) -> int: ...

    @property
    def stall_seconds(self) -> float: ...

    def stop(self, grace_s: float = ...) -> None: ...
