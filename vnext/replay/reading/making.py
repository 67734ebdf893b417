"""Builds an index: folds a segment once from a given place, keeps states on the way and notes what its steps were like.

Owns which places are kept. They lie about equal work apart, and every second one is dropped when they take too much
room. The last place always stays, and so does the last place whose times are all known. A segment being written grows
ahead of its timestamps, so an extension continues from that place. An index that grew with its log therefore equals one
built at the end.
"""

from __future__ import annotations

import msgspec

from vnext.log import snapshot as snapshots
from vnext.log.codec import Frame, LogEnd
from vnext.log.reading import STEADY_MIN, read_frames
from vnext.log.snapshot import snapshot
from vnext.replay.reading import cachefile
from vnext.replay.reading.cachefile import Entry, Known, Progress
from vnext.replay.reading.client_latency import ClientLatency, LatencyCollector, latency_decoder
from vnext.replay.reading.folding import IMPOSSIBLE, first_state
from vnext.replay.reading.source import Log
from vnext.replay.reading.step_counts import StepCounter, StepCounts
from vnext.replay.reading.strides import Folding, Run
from vnext.replay.reading.times import Clock, timestamps_of_segment
from vnext.state.state import State

COST_BETWEEN = 10_000
"""Folding from one snapshot to the next costs about this many microseconds."""
FRAME_COST = 25
ROW_COST = 1


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one folding; see cachefile.Directory."""

    entries: list[Entry]
    snapshots: list[bytes]
    end: LogEnd
    stopped: str
    step_counts: StepCounts
    latency: msgspec.Raw
    known: Known | None
    timestamped: bool


def made_of(log: Log, data: bytes, entries: list[Entry], kept: list[bytes], known: Known | None, progress: Progress | None) -> Made:
    """The index of a log's only segment `data`, from the last of these places on. `kept` are the snapshots of the
    places."""
    state = snapshots.load(snapshots.decode(kept[-1]), log.header.started.config) if kept else first_state(log)
    making = Making(state, entries, kept, log.header.token_width, len(data))
    clock = Clock(timestamps_of_segment(log.paths[0]), absolute=True)
    return making.made(memoryview(data), log.header.index, clock, known, progress)


class Making:
    """One folding of a segment's bytes, from its last entry on. Mutable, for one use."""

    def __init__(self, state: State, entries: list[Entry], kept: list[bytes], width: int, segment_size: int) -> None:
        self._entries, self._snapshots, self._width = list(entries), list(kept), width
        self._bytes_max = cachefile.bytes_max(segment_size)
        self._between, self._cost = COST_BETWEEN, 0
        self._offset, self._chain = entries[-1].offset, entries[-1].chain
        self._known: tuple[int, StepCounts, msgspec.Raw] | None = None
        self._first = state

    def made(self, data: memoryview, number: int, clock: Clock, known: Known | None, progress: Progress | None) -> Made:
        """Fold all that follows in `data`, the bytes of segment `number`."""
        latency = latency_decoder.decode(known.latency) if known is not None else None
        self._step_counter = StepCounter(known.step_counts if known is not None else StepCounts(), self._first, clock)
        self._latency_collector = LatencyCollector(latency, self._first, clock)
        self._known_until = clock.last_event
        self._folding = Folding(self._first, self._latency_collector.hear, self._room)
        if clock.timestamped and self._known_until <= self._state.sequence:
            self._known = self._noted()
        end, stopped = self._fold(data, number, progress)
        if self._state.sequence > self._entries[-1].sequence:
            self._keep()  # most questions are about the log's end
        return Made(
            entries=self._entries, snapshots=self._snapshots, end=end, stopped=stopped,
            step_counts=self._step_counter.done(), latency=_encoded(self._latency_collector.done()),
            known=self._known_entry(), timestamped=clock.timestamped,
        )  # fmt: skip

    def _fold(self, data: memoryview, number: int, progress: Progress | None) -> tuple[LogEnd, str]:
        """Fold to the end of `data`. Returns the end, and the error that stopped the folding before it, if any."""
        base = self._offset
        items = read_frames(data[base:], self._entries[-1].sequence, number, steady=True)
        try:
            for offset, item in self._folding.through(items):
                if isinstance(item, LogEnd):
                    return msgspec.structs.replace(item, offset_bytes=base + item.offset_bytes), ""
                assert isinstance(item, (Frame, Run)), "a segment that is read from its first frame on has these"
                self._pass_by(item, base + offset)
                if progress is not None:
                    progress(self._offset, len(data))
        except IMPOSSIBLE as error:
            stopped = str(error)
            end = LogEnd(kind="damaged", message=stopped, segment=0, offset_bytes=self._offset, ignored_bytes=0)
            return end, stopped
        raise AssertionError("frames end with a LogEnd")

    def _known_entry(self) -> Known | None:
        """What was noted at the last known time, with its place among the entries; None if that is the last one."""
        if self._known is None or self._known[0] == self._entries[-1].sequence:
            return None
        sequence, step_counts, latency = self._known
        place = [entry.sequence for entry in self._entries].index(sequence)
        return Known(entry=place, step_counts=step_counts, latency=latency)

    @property
    def _state(self) -> State:
        return self._folding.state

    def _room(self) -> int:
        """The most frames of the next run: up to the next snapshot, or to the end of known times."""
        frames = max(STEADY_MIN, (self._between - self._cost) // self._frame_cost())
        left = (self._known_until - self._state.sequence) // 2
        return min(frames, left) if left > 0 else frames

    def _frame_cost(self) -> int:
        return FRAME_COST + ROW_COST * len(self._state.rows)

    def _pass_by(self, item: Frame | Run, offset: int) -> None:
        """Note that something was folded that ends at this offset."""
        if isinstance(item, Run):
            self._step_counter.meet_run(item)
            self._latency_collector.meet_run(item)
        else:
            self._step_counter.meet(item, self._state)
        self._cost += self._frame_cost() * (item.frames if isinstance(item, Run) else 1)
        self._chain, self._offset = item.digest, offset
        is_known = self._state.sequence == self._known_until
        if is_known or self._cost >= self._between:
            self._keep()
        if is_known:
            self._known = self._noted()

    def _noted(self) -> tuple[int, StepCounts, msgspec.Raw]:
        return self._state.sequence, self._step_counter.done(), _encoded(self._latency_collector.done())

    def _keep(self) -> None:
        state = self._state
        data = snapshots.encode(snapshot(state), self._width)
        self._entries.append(Entry(
            offset=self._offset, chain=self._chain, sequence=state.sequence, planned=state.planned, next_id=state.next_id,
            size=len(data),
        ))  # fmt: skip
        self._snapshots.append(data)
        self._cost = 0
        while sum(map(len, self._snapshots)) > self._bytes_max and self._thinned():
            self._between *= 2

    def _thinned(self) -> bool:
        """Drop every second place except those that are needed; returns whether any was dropped."""
        needed = {self._entries[-1].sequence, self._known_until}
        kept = [place for place, entry in enumerate(self._entries) if place % 2 == 0 or entry.sequence in needed]
        went = len(kept) < len(self._entries)
        self._snapshots = [self._snapshots[place - 1] for place in kept if place]
        self._entries = [self._entries[place] for place in kept]
        return went


def _encoded(latency: ClientLatency) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(latency))
