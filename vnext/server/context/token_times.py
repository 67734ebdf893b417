"""Token times: a histogram of every token of every answer; an observation costs one search in a short tuple.

Prometheus' own histogram takes a lock and two method calls per value, and again for each value of a group. Only the event
loop's thread updates this one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenTimes(Collector):
    """Counts by bucket. `bounds_s` ascend; an extra bucket counts values above the last."""

    def __init__(self, name: str, help_: str, bounds_s: Sequence[float]) -> None:
        self._name, self._help, self._bounds_s = name, help_, tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` tokens that took `seconds` each."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, self._bounds_s), "+Inf"]
        yield HistogramMetricFamily(self._name, self._help, list(zip(bounds, accumulate(self._counts))), self._sum_s)
