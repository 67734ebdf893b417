"""The overview: a few whole numbers for every step of a log, for a time line that shows all of it at once.

Owns the columns, their computation in the background, and their cache beside the log. Like the index's cache
(cachefile.py), it is derived and disposable: if other code made it, or it belongs to another log, it is rebuilt.
"""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import msgspec
import numpy as np

from vnext.replay.reading.cachefile import made_by, replace_file
from vnext.replay.reading.folding import Broken, Folded, fold
from vnext.replay.reading.show import Json
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.state.events import RequestArrived, StepCommitted
from vnext.state.fold_commit import match_samples
from vnext.state.state import State

COLUMNS = ("tokens", "running", "waiting", "held", "kept", "admitted", "preempted", "ended")
"""For each step: tokens computed, requests running, requests waiting, blocks held, blocks kept for reuse; requests
admitted and preempted in it, and those that ended since the step before."""
SUMMED = (5, 6, 7)
TIMES = ("took", "frame", "ttft", "itl")
"""For each step of a log with times: the microseconds that it took, as `slow` has them, the event behind its plan's frame, and of
the requests that it gave a token the longest time to a first one and the longest gap to another (microseconds)."""
TOOK, FRAME, TTFT, ITL = range(len(COLUMNS), len(COLUMNS) + len(TIMES))
PEAKS = (*COLUMNS, "took", "", "ttft", "itl")
PARTS_MAX = 20_000
"""Steps of a part whose latencies are read again."""
SUFFIX = ".vnextsteps"
MAGIC = b"vnextSTEPS"
GROWTH = 65_536


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a cache says about its log, and the shape of the data after it."""

    made_by: tuple[int, str, int, int]
    columns: tuple[str, ...]
    segments: tuple[tuple[str, int, int], ...]
    chain: int
    first_step: int
    count: int
    broken: str


_head_decoder = msgspec.msgpack.Decoder(Head)


class Overview:
    """Columns int32[len(COLUMNS) + len(TIMES), count] from `first_step` on. `done` is true when no more will come."""

    def __init__(self, log: Log, first: State) -> None:
        self.first_step = first.planned
        self.count = 0
        self.broken = ""
        self.done = False
        self._log = log
        self._ended = _ended(first)
        self._values = np.zeros((len(COLUMNS) + len(TIMES), GROWTH), dtype=np.int32)
        self._clock, self._wall_us = Clock(None), 0.0

    def start(self) -> None:
        """Load from the cache if there is one; otherwise fold the log in a separate thread."""
        self._read_times()
        if not self._load():
            Thread(target=self.make, name="overview", daemon=True).start()

    def make(self) -> None:
        """Fold the whole log."""
        self._read_times()
        planned_us: dict[int, float | None] = {}
        last_us: float | None = None
        tokens = _Tokens()
        try:
            for item in fold(self._log):
                if isinstance(item, Folded) and isinstance(item.event, RequestArrived):
                    tokens.came(item.event, self._clock.frame_us(item.frame_end))
                elif isinstance(item, Folded) and (plan := item.plan) is not None:
                    self._add(item.after, len(plan.admitted), len(plan.preempted), item.frame_end)
                    planned_us[plan.step] = self._clock.frame_us(item.frame_end)
                elif isinstance(item, Folded) and isinstance(item.event, StepCommitted):
                    starts_us = [us for us in (planned_us.pop(item.event.step, None), last_us) if us is not None]
                    last_us = self._clock.frame_us(item.frame_end)
                    self._took(item.event.step, starts_us, last_us)
                    self._waited(item, tokens, last_us)
                elif isinstance(item, Broken):
                    self.broken = item.message
            self._store()
        finally:
            self.done = True

    def points(self, first: int, last: int, count: int) -> Json:
        """Steps [first, last] in at most `count` buckets of equal size, with each column's largest value, or the sum
        for events. {"first", "each" steps in a bucket, one list a column}."""
        first = max(first, self.first_step)
        places = slice(first - self.first_step, max(0, min(last + 1 - self.first_step, self.count)))
        values = self._values[:, places]
        each = max(1, -(-values.shape[1] // max(1, count)))
        starts = np.arange(0, values.shape[1], each)
        found = {"first": first, "each": each, "steps": values.shape[1]}
        for number, name in enumerate(COLUMNS):
            merge = np.add if number in SUMMED else np.maximum
            found[name] = merge.reduceat(values[number], starts).tolist() if len(starts) else []
        if len(starts) and self._clock.timestamped:
            us = self._clock.frames_us(np.maximum.reduceat(values[FRAME], starts)) + self._wall_us
            for name, place in (("took", TOOK), ("ttft", TTFT), ("itl", ITL)):
                found[name] = np.maximum.reduceat(values[place], starts).tolist()
            found["at"] = [None if np.isnan(each) else each / 1e6 for each in us.tolist()]
        return found

    def peaks(self) -> dict[str, int]:
        """The largest value of each column so far."""
        return {name: int(self._values[number, : self.count].max(initial=0)) for number, name in enumerate(PEAKS) if name}

    def part(self, first: int, last: int) -> Json:
        """What happened in steps [first, last], and `window`: from the first one's plan to the last one's end (microseconds since
        the machine's start), None where the log has no times."""
        first, last = max(first, self.first_step), min(last, self.first_step + self.count - 1)
        values = self._values[:, first - self.first_step : max(0, last + 1 - self.first_step)]
        found: Json = {"first": first, "last": last, "window": None}
        for number, name in enumerate(COLUMNS):
            found[name] = int(values[number].sum() if number in SUMMED or name == "tokens" else values[number].max(initial=0))
        if not values.shape[1] or not self._clock.timestamped:
            return found
        begin_us, end_us = self._clock.frames_us(values[FRAME][[0, -1]]).tolist()
        if not np.isnan(begin_us + end_us):
            found["window"] = (begin_us, end_us + int(values[TOOK, -1]) + 1)
        found["took"] = [float(each) for each in np.percentile(values[TOOK], (50, 99))]
        return found

    def since_us(self, step: int) -> float:
        """When a step was planned, after the first one (microseconds). Raises UnusableLog where the log does not say."""
        place = step - self.first_step
        since_us = float(np.subtract(*self._planned_us()[[place, 0]])) if 0 <= place < self.count else np.nan
        if np.isnan(since_us):
            raise UnusableLog(f"the time of step {step} is not known")
        return since_us

    def step_since(self, us: float) -> int:
        """The last step that was planned at most so long after the first one; the last of all where the log has no more."""
        planned_us = self._planned_us()
        known = np.fmax.accumulate(planned_us) if len(planned_us) else planned_us
        if not len(known) or np.isnan(known[0]):
            raise UnusableLog("the log has no times, so its steps have only numbers")
        return self.first_step + max(0, int(np.searchsorted(known - known[0], us, side="right")) - 1)

    def _planned_us(self) -> np.ndarray:
        """When each step was planned (float64[count], nan where the log does not say)."""
        return self._clock.frames_us(self._values[FRAME, : self.count])

    def next_with(self, column: str, step: int, forwards: bool) -> int | None:
        """The next step after (or before) `step` in which this column is not zero."""
        values = self._values[COLUMNS.index(column), : self.count]
        here = step - self.first_step
        found = np.flatnonzero(values[here + 1 :]) if forwards else np.flatnonzero(values[: max(0, here)])
        if not len(found):
            return None
        return self.first_step + (here + 1 + int(found[0]) if forwards else int(found[-1]))

    def _read_times(self) -> None:
        timestamps = timestamps_of(self._log)
        self._clock = Clock(timestamps, absolute=True)
        self._wall_us = timestamps.wall_minus_monotonic_ns / 1e3 if timestamps is not None else 0.0

    def _took(self, step: int, starts_us: list[float], end_us: float | None) -> None:
        """Note how long a step took, from the latest of `starts_us`."""
        if step >= self.first_step and starts_us and end_us is not None:
            self._values[TOOK, step - self.first_step] = min(max(end_us - max(starts_us), 0.0), np.iinfo(np.int32).max)

    def _waited(self, item: Folded, tokens: _Tokens, us: float | None) -> None:
        """Note how long the requests that got a token had waited for it."""
        event, before = item.event, item.before
        assert isinstance(event, StepCommitted), "a step that gave tokens"
        found = tokens.given(before.rows.id[match_samples(before, event).rows].tolist(), us)
        if event.step >= self.first_step:
            most = np.iinfo(np.int32).max
            self._values[TTFT : ITL + 1, event.step - self.first_step] = [min(each, most) for each in found]

    def _add(self, after: State, admitted: int, preempted: int, frame_end: int = 0) -> None:
        if self.count == self._values.shape[1]:
            grown = np.zeros((len(self._values), 2 * self.count), dtype=np.int32)
            grown[:, : self.count] = self._values
            self._values = grown
        pool, ended = after.pool, _ended(after)
        self._values[:, self.count] = (
            after.in_flight[-1].tokens, len(after.rows), len(after.waiting), pool.page_count - pool.free, pool.kept,
            admitted, preempted, ended - self._ended, 0, frame_end, 0, 0,
        )  # fmt: skip
        self._ended = ended
        self.count += 1

    # ---- the cache -----------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self._log.paths[0].with_suffix(SUFFIX)

    def _head(self) -> Head:
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._log.paths]
        return Head(made_by(), COLUMNS + TIMES, tuple(stats), self._log.chain, self.first_step, self.count, self.broken)

    def _load(self) -> bool:
        try:
            with self._path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    return False
                head = _head_decoder.decode(file.read(int.from_bytes(file.read(4), "little")))
                data = file.read()
            wanted = msgspec.structs.replace(self._head(), count=head.count, broken=head.broken)
        except (OSError, ValueError, RecursionError, MemoryError):
            return False
        if head != wanted or len(data) != 4 * len(self._values) * head.count:
            return False
        self._values = np.frombuffer(data, dtype="<i4").reshape(len(self._values), head.count)
        self.count, self.broken, self.done = head.count, head.broken, True
        return True

    def _store(self) -> None:
        """Write the cache; if nothing can be written, there is none."""
        try:
            head = msgspec.msgpack.encode(self._head())
        except OSError:
            return  # a segment has been deleted since
        columns = [np.ascontiguousarray(values[: self.count], dtype="<i4").tobytes() for values in self._values]
        replace_file(self._path, (MAGIC, len(head).to_bytes(4, "little"), head, *columns))


class _Tokens:
    """When each live request came and got its last token. Mutable."""

    def __init__(self) -> None:
        """Knows no request."""
        self._last: dict[int, tuple[float | None, bool]] = {}  # by request: the time, and whether it is of a token

    def came(self, event: RequestArrived, us: float | None) -> None:
        self._last[event.id] = (us if not event.generated else None), bool(event.generated)

    def given(self, ids: list[int], us: float | None) -> tuple[int, int]:
        """The longest times to a first token and to another one (microseconds, 0 for none) of these requests, which get one now."""
        longest = [0.0, 0.0]
        for id_ in ids:
            before_us, is_token = self._last.get(id_, (None, True))
            if us is not None and before_us is not None:
                longest[is_token] = max(longest[is_token], us - before_us)
            self._last[id_] = us, True
        return int(longest[0]), int(longest[1])


def _ended(state: State) -> int:
    """The number of requests that have ended since the engine started."""
    return state.counters.finished + state.counters.aborted
