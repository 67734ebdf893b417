"""Times of work on a GPU: medians over events, the cache flushed before each round.

Owns the method. Work is timed as called (`eager_us`, which includes launches the GPU waits for) and as a captured graph
(`graph_us`, the GPU alone). The graph is timed in two halves; `spread_us` is their difference. Each round first reads more memory
than the L2 cache holds, which also lets the host launch ahead. It reads rather than writes, because writing dirty lines back
would take bandwidth from the work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

ROUNDS = 30
WARM_UPS = 3
FLUSH_BYTES_MIN = 512 * 2**20
COPY_BYTES = 4 * 2**30
MATRIX_SIZE = 8192

Work = Callable[[], Any]


class Times(NamedTuple):
    """Medians in microseconds; None in a dry run, `graph_us` and `spread_us` also where no graph could be captured."""

    eager_us: float | None = None
    graph_us: float | None = None
    spread_us: float | None = None
    why_no_graph: str = ""

    @property
    def best_us(self) -> float | None:
        """Return the time of the GPU alone if it is known, else the eager time."""
        return self.eager_us if self.graph_us is None else self.graph_us


class Clock(Protocol):
    """Takes times."""

    def times(self, work: Work) -> Times: ...
    def copy_rate(self) -> float | None: ...
    def matrix_rate(self) -> float | None: ...


class DryClock:
    """Does the work once and takes no time."""

    def times(self, work: Work) -> Times:
        work()
        return Times()

    def copy_rate(self) -> None:
        return None

    def matrix_rate(self) -> None:
        return None


class GpuClock:
    """Events on the current stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(max(FLUSH_BYTES_MIN, 4 * cache) // 4, device=device)

    def times(self, work: Work) -> Times:
        for _ in range(WARM_UPS):
            work()
        torch.cuda.synchronize(self._device)
        eager = self.median_us(work, ROUNDS)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except Exception as error:  # torch, CuPy and Numba have errors of their own; the eager time stands without a graph
            return Times(eager, why_no_graph=f"{type(error).__name__}: {error}".splitlines()[0])
        halves = [self.median_us(graph.replay, ROUNDS) for _ in range(2)]
        return Times(eager, statistics.mean(halves), abs(halves[0] - halves[1]))

    def median_us(self, work: Work, rounds: int) -> float:
        """Median of single calls."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        work()
        for begin, end in pairs:
            self._other.amax()
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize(self._device)
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3

    def copy_rate(self) -> float:
        """Bytes read and written a second by a large copy from device memory to device memory."""
        source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / (self.median_us(lambda: target.copy_(source), ROUNDS) * 1e-6)

    def matrix_rate(self) -> float:
        """Operations a second of a large bfloat16 product of random numbers."""
        a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=self._device).bfloat16() for _ in range(2))
        return 2 * MATRIX_SIZE**3 / (self.median_us(lambda: a @ b, ROUNDS) * 1e-6)
