"""Runs the ranks of one engine as threads, one at a time, which take turns at each collective.

Owns their collectives. Sums are taken by one tree in float32 and rounded once, as in vnext/runtime/transport/collectives, so
the bits equal those of rank processes. This saves no time, but needs nothing else on the machine.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from vnext.kernels.shards import joined
from vnext.models.layers.sharding import Parallel, alone

Result = TypeVar("Result")
MEETING_TIMEOUT_S = 600.0


class Turns:
    """`run` does a piece of work on every rank; collectives may be called only within it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._turn = threading.Lock()
        self._meeting = threading.Barrier(ranks, timeout=MEETING_TIMEOUT_S)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * ranks
        self._threads = ThreadPoolExecutor(ranks) if ranks > 1 else None

    def parallel(self, rank: int) -> Parallel:
        """One rank's view of the group."""
        if self.ranks == 1:
            return alone()
        return Parallel(
            rank=rank,
            world_size=self.ranks,
            all_reduce=lambda tensor: added(self._exchanged(rank, tensor)),
            all_gather=lambda tensor, dim: torch.cat(self._exchanged(rank, tensor), dim),
        )

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Run `work(rank)` on all ranks; returns the results in rank order and raises the first error again."""
        if self._threads is None:
            return [work(0)]
        self._meeting.reset()
        started = [self._threads.submit(contextvars.copy_context().run, self._turned, work, rank) for rank in range(self.ranks)]
        errors = [error for each in started if (error := each.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [each.result() for each in started]

    def _turned(self, work: Callable[[int], Result], rank: int) -> Result:
        with self._turn:
            try:
                return work(rank)
            except BaseException:
                self._meeting.abort()
                raise

    def _exchanged(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors; another rank runs while this one waits."""
        self._parts[rank] = tensor
        self._meet()
        parts = list(self._parts)
        self._meet()
        return parts

    def _meet(self) -> None:
        self._turn.release()
        try:
            self._meeting.wait()
        finally:
            self._turn.acquire()


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum by one tree, in float32, rounded once."""
    rounded: torch.Tensor = joined([part.float() for part in parts]).to(parts[0].dtype)
    return rounded
