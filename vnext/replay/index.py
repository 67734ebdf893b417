"""Index once, then any step at once: states in the middle of a log, from keyframes in a cache beside it.

Owns the choice of places that are kept and the way to a step or a request. Each segment has a cache of its own, made when
somebody first asks for a place in it: older segments may go, and the newest may grow. A cache is believed only as far as
it fits: it must be of this segment, whole, and the frame behind a keyframe must have the digest that the state gives it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from vnext.replay import cachefile
from vnext.replay.cachefile import Directory, Entry
from vnext.replay.folding import IMPOSSIBLE, first_state
from vnext.replay.source import Log, UnusableLog, contents, open_log, part_of, size_of
from vnext.replay.tally import Tally, Tallying
from vnext.replay.times import Clock, stamps_of_segment
from vnext.state import keyframe as keyframes, log as logs
from vnext.state.digest import DIGEST_VERSION, digest
from vnext.state.errors import IllegalEvent
from vnext.state.keyframe import BadKeyframe, keyframe
from vnext.state.log import Frame, LogEnd
from vnext.state.log_read import Item, read, read_frames
from vnext.state.packed import Content
from vnext.state.reduce import reduce
from vnext.state.state import State

COST_BETWEEN = 10_000
"""Folding from one keyframe to the next costs about so many microseconds."""
FRAME_COST = 25
ROW_COST = 1
COUNTED = ("sequence", "planned", "next_id")
Progress = Callable[[int, int], None]  # bytes done and all bytes


class Place(msgspec.Struct, frozen=True):
    """A state, and all of the log that comes after it."""

    state: State
    items: Iterator[Item]


class Unindexed(Exception):
    """Whoever asks does not wait for the index of `segment`, and it has none yet: have it `made`, then ask again."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(f"{segment.path} has no index yet")
        self.segment = segment


class Segment:
    """One segment and its index. `source` says where that came from: "cache", "built" or "extended"; "" as long as
    nobody has asked. `waits`: who asks for an index that is not there waits until it is made, else gets Unindexed."""

    def __init__(self, log: Log, progress: Progress | None, waits: bool = True) -> None:
        self.log = log
        self.path = log.paths[0]
        self.source = ""
        self._progress = progress
        self._waits = waits
        self._first: State | None = None
        self._directory: Directory | None = None
        self._built: list[bytes] = []

    @property
    def first(self) -> State:
        """The state in which it begins. Not to be folded: what is kept of an old state is all that was folded since."""
        if self._first is None:
            self._first = first_state(self.log)
        return self._first

    @property
    def counts(self) -> tuple[int, int, int]:
        """What has been counted where it begins (_counts), without making a state of it."""
        header = self.log.header
        try:
            kept = keyframes.decode(header.keyframe) if header.index and self._first is None else None
        except BadKeyframe as error:
            raise UnusableLog(f"{self.path} cannot be folded: its keyframe is of no use ({error})") from error
        return _counts(self.first) if kept is None else (kept.sequence, kept.planned, kept.next_id)

    @property
    def directory(self) -> Directory:
        if self._directory is None:
            self._directory = self._cached()
        if self._directory is None and not self._waits:
            raise Unindexed(self)
        return self.made()

    def made(self) -> Directory:
        """The index, made if there is none yet. Another thread may ask meanwhile, and learns that there is none."""
        if self._directory is None:
            self._directory = self._cached() or self._extended() or self._build([self._begin()], [])
        return self._directory

    def place(self, entry: Entry) -> Place:
        """The state at an entry of the directory, and the rest of this segment, a part at a time."""
        state = self._state(entry)
        if state is None or not self._fits(entry, state):
            entry = self._rebuilt(entry)
            state = self._state(entry)
            assert state is not None, "a keyframe that was just made is one"
        return Place(state, self._items(entry))

    # ---- the cache -----------------------------------------------------------------------------------------------

    def _cached(self) -> Directory | None:
        """The directory of the cache if it is this segment's as it is now."""
        found = cachefile.read(cachefile.cache_path(self.path))
        now = (self.log.chain, size_of(self.path), self.path.stat().st_mtime_ns)
        if found is None or (found.start, found.size, found.mtime_ns) != now:
            return None
        self.source = "cache"
        return found

    def _extended(self) -> Directory | None:
        """The cache's index goes on behind its last keyframe if the segment has grown since. None where that is not as it
        was, or there is none."""
        found = cachefile.read(cachefile.cache_path(self.path))
        if found is None or found.start != self.log.chain or found.size >= size_of(self.path):
            return None
        if found.end.kind not in ("complete", "torn"):
            return None
        path, kept = cachefile.cache_path(self.path), found.entries[1:]
        data = [cachefile.read_keyframe(path, entry) for entry in kept]
        if not kept or None in data or not self._fits(kept[-1], self._loaded(data[-1]), must_follow=True):
            return None
        return self._build(list(found.entries), data, "extended", found.tally)

    def _rebuilt(self, entry: Entry) -> Entry:
        """The place again, from an index that is made anew."""
        self._directory = self._build([self._begin()], [])
        return self._directory.entries[self.before(entry.sequence, "sequence")]

    def before(self, value: int, field: str) -> int:
        """Number of the last entry that has counted no more than `value`."""
        return max(0, bisect_right(self.directory.entries, value, key=lambda entry: getattr(entry, field)) - 1)

    def _state(self, entry: Entry) -> State | None:
        if not entry.size:
            return first_state(self.log)
        if self._built:
            return self._loaded(self._built[self.directory.entries.index(entry) - 1])
        return self._loaded(cachefile.read_keyframe(cachefile.cache_path(self.path), entry))

    def _loaded(self, data: bytes | None) -> State | None:
        try:
            return None if data is None else keyframes.load(keyframes.decode(data), self.log.header.started.config)
        except BadKeyframe:
            return None

    def _fits(self, entry: Entry, state: State | None, must_follow: bool = False) -> bool:
        """Whether the frame behind this state has the digest that it must have.

        Unknown digests are believed, and so is a state behind which nothing comes, unless something `must_follow`.
        """
        if state is None or (entry.sequence, entry.planned, entry.next_id) != _counts(state):
            return False
        if self.log.header.digest_version != DIGEST_VERSION or self._built or not entry.size:
            return True
        frame = next(self._items(entry), None)
        if not isinstance(frame, Frame):
            return not must_follow
        try:
            after = _folded(state, frame)
        except IMPOSSIBLE:
            return False
        return logs.chained(entry.chain, digest(after), frame.body) == frame.digest

    # ---- making it -----------------------------------------------------------------------------------------------

    def _begin(self) -> Entry:
        header = self.log.header
        size = _header_size(self.path)
        sequence, planned, next_id = _counts(self.first)
        if sequence != header.first_event:
            raise UnusableLog(f"{self.path} cannot be folded: event {header.first_event} comes first, {sequence} is due")
        return Entry(offset=size, chain=self.log.chain, sequence=sequence, planned=planned, next_id=next_id)

    def _build(
        self, entries: list[Entry], kept: list[bytes], source: str = "built", counted: Tally = Tally()
    ) -> Directory:
        """Fold from the last entry to the end, keeping states on the way."""
        self.source = source
        stat, data = self.path.stat(), part_of(self.path)
        state = self._loaded(kept[-1]) if kept else first_state(self.log)
        making = _Making(entries, kept, cachefile.bytes_max(len(data)), self.log.header.token_width)
        tallying = Tallying(counted, state, Clock(stamps_of_segment(self.path)))
        base, stopped, offset = entries[-1].offset, "", 0
        for offset, item in read_frames(memoryview(data)[base:], entries[-1].sequence, self.log.header.index):
            if isinstance(item, LogEnd):
                end = msgspec.structs.replace(item, offset_bytes=base + item.offset_bytes)
                break
            making.meet(state, base + offset)
            try:
                state = _folded(state, item)
            except IMPOSSIBLE as error:
                stopped = str(error)
                end = LogEnd(kind="damaged", message=stopped, segment=0, offset_bytes=base + offset, ignored_bytes=0)
                break
            making.pass_by(item, len(state.rows))
            tallying.meet(item, state)
            if self._progress is not None:
                self._progress(base + offset, len(data))
        making.close(state, end.offset_bytes)
        found = Directory(
            made_by=cachefile.made_by(), start=self.log.chain, size=len(data), mtime_ns=stat.st_mtime_ns,
            entries=cachefile.placed(making.entries, making.keyframes), end=end, stopped=stopped,
            tally=tallying.done(),
        )  # fmt: skip
        written = cachefile.write(cachefile.cache_path(self.path), found, making.keyframes)
        self._built = [] if written else making.keyframes
        return found

    def _items(self, entry: Entry) -> Iterator[Item]:
        """Frames from an entry on, one part between two entries at a time."""
        entries, end = self.directory.entries if self._directory else (entry,), None
        with self.path.open("rb") as file:
            content = Content(file)
            for place in range(entries.index(entry), len(entries)):
                here = entries[place]
                until = entries[place + 1].offset if place + 1 < len(entries) else content.size
                for _, item in read_frames(content.read(here.offset, until - here.offset), here.sequence, self.log.header.index):
                    if isinstance(item, LogEnd):
                        end = msgspec.structs.replace(item, offset_bytes=here.offset + item.offset_bytes)
                        break
                    yield item
                if end is not None and end.kind != "complete":
                    break
        if end is not None:
            yield end


class _Making:
    """The places that are kept while a segment is folded: every second one goes when they take too much."""

    def __init__(self, entries: list[Entry], kept: list[bytes], bytes_max: int, width: int) -> None:
        self.entries, self.keyframes = entries, kept
        self._bytes_max, self._width = bytes_max, width
        self._between = COST_BETWEEN
        self._cost = 0
        self._chain = entries[-1].chain

    def meet(self, state: State, offset: int) -> None:
        """The state before the frame at this offset."""
        if self._cost >= self._between:
            self._keep(state, offset)

    def pass_by(self, frame: Frame, rows: int) -> None:
        self._cost += FRAME_COST + ROW_COST * rows
        self._chain = frame.digest

    def _keep(self, state: State, offset: int) -> None:
        sequence, planned, next_id = _counts(state)
        data = keyframes.encode(keyframe(state), self._width)
        entry = Entry(
            offset=offset, chain=self._chain, sequence=sequence, planned=planned, next_id=next_id, size=len(data)
        )
        self.entries.append(entry)
        self.keyframes.append(data)
        self._cost = 0
        while sum(map(len, self.keyframes)) > self._bytes_max and len(self.keyframes) > 1:
            del self.entries[1::2], self.keyframes[::2]
            self._between *= 2

    def close(self, state: State, offset: int) -> None:
        """The last state is kept too: the log's end is the place that is asked for most."""
        if state.sequence > self.entries[-1].sequence:
            self._keep(state, offset)


def _counts(state: State) -> tuple[int, int, int]:
    return state.sequence, state.planned, state.next_id


def _folded(state: State, frame: Frame) -> State:
    """The state after a frame. IllegalEvent where it does not follow."""
    if frame.first_event != state.sequence:
        raise IllegalEvent(f"{frame.lost} frames are missing before event {frame.first_event}")
    for event in frame.events:
        state = reduce(state, event)
    return state


def _header_size(path: Path) -> int:
    """Bytes of a segment before its first frame."""
    return len(logs.MAGIC) + logs.record_head.size + int.from_bytes(part_of(path, len(logs.MAGIC), 4), "little")


class Index:
    """A whole log's places. Segments that cannot be opened end it, as they end a reading. `waits` as in Segment."""

    def __init__(self, log: Log, progress: Progress | None = None, waits: bool = True) -> None:
        self.log = log
        cachefile.forget_orphans(log.paths[0].parent)
        self.segments = [Segment(each, progress, waits) for each in _openable(log)]

    @property
    def first(self) -> State:
        return self.segments[0].first

    @property
    def last(self) -> Entry:
        """The log's last place."""
        return self.segments[-1].directory.entries[-1]

    def at_step(self, step: int) -> Place:
        """A state in which `step` is not planned yet, not long before."""
        return self._at(step, 1)

    def at_request(self, request_id: int) -> Place:
        """A state in which the request has not come yet, not long before; the first one if it is older."""
        return self._at(request_id, 2)

    def at_event(self, number: int) -> Place:
        """A state in which event `number` is not folded yet, not long before."""
        return self._at(number, 0)

    def at_end(self) -> Place:
        return self._at(self.last.sequence, 0)

    def _at(self, value: int, field: int) -> Place:
        """The last place that has counted no more than `value` in this field of _counts."""
        number = max(0, bisect_right(self.segments, value, key=lambda segment: segment.counts[field]) - 1)
        segment = self.segments[number]
        found = segment.place(segment.directory.entries[segment.before(value, COUNTED[field])])
        return Place(found.state, self._onwards(number, found.items))

    def _onwards(self, number: int, items: Iterator[Item]) -> Iterator[Item]:
        """The rest of a segment, then all segments after it."""
        rest = self.log.paths[number + 1 :]
        for item in items:
            if not isinstance(item, LogEnd) or item.kind != "complete" or not rest:
                yield item
        if rest:
            yield from read(contents(rest))


def _openable(log: Log) -> Iterator[Log]:
    yield Log(paths=log.paths[:1], header=log.header, chain=log.chain)
    for path in log.paths[1:]:
        try:
            found = open_log(path)
        except UnusableLog:
            return
        if not found.header.keyframe:
            return
        yield found
