"""Tallies: a histogram and a counter whose updates cost one search in a short tuple, and one in a dict.

Prometheus' own take a lock and some ten calls per value, which several values of every answer would pay. Only the event loop's
thread updates these; the library still writes the exposition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Histogram(Collector):
    """Counts by bucket. `bounds` ascend; an extra bucket counts values above the last."""

    def __init__(self, name: str, help_: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help_, tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` things of this value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, self._bounds), "+Inf"]
        yield HistogramMetricFamily(self._name, self._help, list(zip(bounds, accumulate(self._counts))), self._sum)


class LabelledCounter(Collector):
    """Counts by the values of `labels`."""

    def __init__(self, name: str, help_: str, labels: Sequence[str]) -> None:
        self._name, self._help, self._labels = name, help_, tuple(labels)
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *values: str) -> None:
        """Count one, by the labels' values."""
        self._counts[values] += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family
