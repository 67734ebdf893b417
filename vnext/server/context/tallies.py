"""Tallies: a histogram and a counter whose updates cost one search in a short tuple, and one in a dict; their values lie in a
file, which the API servers of one port sum.

Prometheus' own take a lock and some ten calls per value, which several values of every answer would pay. Only the event loop's
thread updates these; the library still writes the exposition. A tally file has rows of float64 by name: 8 bytes that count those
used behind them, then records, each with the length of its name (uint32), the number of its values (uint32), the name, padded to
8 bytes, and the values. Records are appended and never change place; one counts from the moment at which the first 8 bytes say
so. A process that is killed leaves whole rows, and its successor goes on with them.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Sums = Mapping[str, Sequence[float]]
"""What TallyFile.sums returns."""
SIZE_BYTES = 4 * 2**20
_USED, _RECORD = struct.Struct("<Q"), struct.Struct("<II")


class TallyFile:
    """The rows of the process at `place` of `place_count`, in `folder` ("": in memory; then there are no others). Mutable; a row
    belongs to one thread."""

    def __init__(self, folder: str = "", place: int = 0, place_count: int = 1) -> None:
        paths = [Path(folder) / f"api-{each}.tallies" for each in range(place_count if folder else 0)]
        self._others = [path for number, path in enumerate(paths) if number != place]
        self._memory = memoryview(_mapped(paths[place]) if folder else mmap.mmap(-1, SIZE_BYTES))
        self._rows = dict(_rows(self._memory))

    def row(self, name: str, count: int) -> memoryview[float]:
        """The row of this name with `count` values (float64), which are 0 in a new one. A file that is full takes no more: the row
        is then this process's alone."""
        found = self._rows.get(name)
        if found is None or len(found) != count:
            found = self._rows[name] = self._appended(name.encode(), count)
        return found

    def sums(self) -> dict[str, list[float]]:
        """Every row, summed over the processes."""
        found: dict[str, list[float]] = {name: list(row) for name, row in self._rows.items()}
        for path in self._others:
            for name, values in _read(path):
                own = found.get(name)
                found[name] = list(values) if own is None else [sum(pair) for pair in zip(own, values, strict=True)]
        return found

    def _appended(self, name: bytes, count: int) -> memoryview[float]:
        (used,) = _USED.unpack_from(self._memory)
        at = _USED.size + used
        values_at = at + _RECORD.size + _padded(len(name))
        end = values_at + 8 * count
        if end > SIZE_BYTES:
            return memoryview(bytearray(8 * count)).cast("d")
        self._memory[at:end] = bytes(end - at)  # what a process that was killed has left
        _RECORD.pack_into(self._memory, at, len(name), count)
        self._memory[at + _RECORD.size :][: len(name)] = name
        _USED.pack_into(self._memory, 0, end - _USED.size)
        return self._memory[values_at:end].cast("d")


def _rows(memory: memoryview) -> Iterator[tuple[str, memoryview[float]]]:
    (used,) = _USED.unpack_from(memory)
    at, end = _USED.size, _USED.size + used
    while at < end:
        size, count = _RECORD.unpack_from(memory, at)
        name_at = at + _RECORD.size
        at = name_at + _padded(size) + 8 * count
        yield bytes(memory[name_at : name_at + size]).decode(), memory[at - 8 * count : at].cast("d")


def _read(path: Path) -> list[tuple[str, memoryview[float]]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # it has not started yet
        return []
    return list(_rows(memoryview(data))) if len(data) == SIZE_BYTES else []


def _mapped(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, SIZE_BYTES)
        return mmap.mmap(fd, SIZE_BYTES)
    finally:
        os.close(fd)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


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
        self._rows: dict[tuple[str, ...], memoryview[float]] = {}

    def add(self, *values: str) -> None:
        """Count one, by the labels' values."""
        if (row := self._rows.get(values)) is None:
            row = self._rows[values] = self._file.row(msgspec.json.encode((self._name, *values)).decode(), 1)
        row[0] += 1

    def collect(self) -> Iterator[Metric]:
        yield self.family(self._file.sums())

    def family(self, sums: Sums) -> Metric:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        found = {name: values for name, values in sums.items() if name.startswith(f'["{self._name}"')}
        if not self._labels and not found:
            family.add_metric((), 0)  # an increase is seen from a value that was there before
        for name, (count,) in found.items():
            family.add_metric(msgspec.json.decode(name)[1:], count)
        return family
