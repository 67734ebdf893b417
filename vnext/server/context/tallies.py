"""Tallies: a histogram and a counter whose updates cost one search in a short tuple, and one in a dict.

Prometheus' own take a lock and some ten calls per value, which several values of every answer would pay. Only the event loop's
thread updates these; the library still writes the exposition. Their values lie in a tally file, their own if none is given:
those of several API servers are summed there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vnext.server.context.tally_file import TallyFile

Sums = Mapping[str, Sequence[float]]
"""What TallyFile.sums returns."""


class Histogram(Collector):
    """Counts by bucket. `bounds` ascend; an extra bucket counts values above the last, and the last value is the sum."""

    def __init__(self, name: str, help_: str, bounds: Sequence[float], file: TallyFile | None = None) -> None:
        self._name, self._help, self._bounds = name, help_, tuple(map(float, bounds))
        self._file = file or TallyFile()
        self._values = self._file.row(name, len(bounds) + 2)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` things of this value."""
        self._values[bisect_left(self._bounds, value)] += count
        self._values[-1] += value * count

    def collect(self) -> Iterator[Metric]:
        yield self.family(self._file.sums())

    def family(self, sums: Sums) -> Metric:
        bounds = [*map(str, self._bounds), "+Inf"]
        *counts, total = sums[self._name]
        return HistogramMetricFamily(self._name, self._help, list(zip(bounds, accumulate(counts))), total)


class LabelledCounter(Collector):
    """Counts by the values of `labels`."""

    def __init__(self, name: str, help_: str, labels: Sequence[str], file: TallyFile | None = None) -> None:
        self._name, self._help, self._labels = name, help_, tuple(labels)
        self._file = file or TallyFile()
        self._rows: dict[tuple[str, ...], memoryview] = {}

    def add(self, *values: str) -> None:
        """Count one, by the labels' values."""
        if (row := self._rows.get(values)) is None:
            row = self._rows[values] = self._file.row(msgspec.json.encode((self._name, *values)).decode(), 1)
        row[0] += 1

    def collect(self) -> Iterator[Metric]:
        yield self.family(self._file.sums())

    def family(self, sums: Sums) -> Metric:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for name, (count,) in ((name, values) for name, values in sums.items() if name.startswith(f'["{self._name}"')):
            family.add_metric(msgspec.json.decode(name)[1:], count)
        return family
