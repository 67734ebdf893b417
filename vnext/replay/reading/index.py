"""The index: finds the state at any step quickly, from snapshots in a cache beside the log.

Owns the choice of places that are kept, and the search for a step or a request. Each segment has its own cache, built
on the first question about that segment, because older segments may be deleted and the newest may grow. A cache is used
only as far as it fits: it must belong to this segment and be whole, and the frame after a snapshot must carry the
digest that the state gives it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vnext.log import codec, snapshot as snapshots
from vnext.log.codec import Frame, LogEnd
from vnext.log.compression import Content
from vnext.log.reading import Item, read, read_frames
from vnext.log.snapshot import BadSnapshot
from vnext.replay.reading import cachefile
from vnext.replay.reading.cachefile import Directory, Entry, Known, Progress
from vnext.replay.reading.folding import IMPOSSIBLE, first_state
from vnext.replay.reading.source import Log, UnusableLog, contents, open_log, part_of, size_of
from vnext.replay.reading.times import timestamps_size
from vnext.state.digest import DIGEST_VERSION, digest
from vnext.state.errors import IllegalEvent
from vnext.state.reduce import reduce
from vnext.state.state import State

COUNTED = ("sequence", "planned", "next_id")


class Place(msgspec.Struct, frozen=True):
    """A state, and all of the log that follows it."""

    state: State
    items: Iterator[Item]


class Unindexed(Exception):
    """The index of `segment` does not exist yet and the caller does not wait: call `made`, then ask again."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(f"{segment.path} has no index yet")
        self.segment = segment


class Segment:
    """One segment and its index. `source` says where the index came from: "cache", "built" or "extended"; "" until the
    first question. With `waits`, a question waits until a missing index is built; otherwise it raises Unindexed."""

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
        """The state in which the segment begins. Do not fold it: holding an old version keeps everything folded from it
        alive."""
        if self._first is None:
            self._first = first_state(self.log)
        return self._first

    @property
    def counts(self) -> tuple[int, int, int]:
        """The counters at the segment's beginning (_counts), without building a state."""
        header = self.log.header
        try:
            kept = snapshots.decode(header.snapshot) if header.index and self._first is None else None
        except BadSnapshot as error:
            raise UnusableLog(f"{self.path} cannot be folded: its snapshot is of no use ({error})") from error
        return _counts(self.first) if kept is None else (kept.sequence, kept.planned, kept.next_id)

    @property
    def directory(self) -> Directory:
        if self.known is None and not self._waits:
            raise Unindexed(self)
        return self.made()

    @property
    def known(self) -> Directory | None:
        if self._directory is None:
            self._directory = self._cached()
        return self._directory

    def made(self) -> Directory:
        """The index, built if missing. Meanwhile another thread may call `known`, which returns None."""
        if self._directory is None:
            self._directory = self._cached() or self._extended() or self._build([self._begin()], [])
        return self._directory

    def place(self, entry: Entry) -> Place:
        """The state at an entry of the directory, and the rest of this segment in parts."""
        state = self._state(entry)
        if state is None or not self._fits(entry, state):
            entry = self._rebuilt(entry)
            state = self._state(entry)
            assert state is not None, "a snapshot that was just made is one"
        return Place(state, self._items(entry))

    # ---- the cache -----------------------------------------------------------------------------------------------

    def _cached(self) -> Directory | None:
        """The directory of the cache if it matches this segment as it is now."""
        found = cachefile.read(cachefile.cache_path(self.path))
        now = (self.log.chain, size_of(self.path), self.path.stat().st_mtime_ns, timestamps_size(self.path))
        if found is None or (found.start, found.size, found.mtime_ns, found.timestamps_size) != now:
            return None
        self.source = "cache"
        return found

    def _extended(self) -> Directory | None:
        """The cache's index, extended from the last snapshot whose times are known, if the segment or its timestamps
        have grown. None if the older part has changed or there is no cache. Timestamps shrink when they become a
        block.
        """
        found = cachefile.read(cachefile.cache_path(self.path))
        if found is None or found.start != self.log.chain or found.end.kind not in ("complete", "torn"):
            return None
        grown = size_of(self.path) - found.size, timestamps_size(self.path) - found.timestamps_size
        if grown[0] < 0 or grown <= (0, 0) or (grown[1] and not (found.timestamped and timestamps_size(self.path))):
            return None
        known = found.known or Known(entry=len(found.entries) - 1, step_counts=found.step_counts, latency=found.latency)
        path, entries = cachefile.cache_path(self.path), found.entries[: known.entry + 1]
        read = [cachefile.read_snapshot(path, entry) for entry in entries[1:]]
        data = [each for each in read if each is not None]
        if not data or len(data) < len(read) or not self._fits(entries[-1], self._loaded(data[-1]), must_follow=True):
            return None
        return self._build(list(entries), data, "extended", known)

    def _rebuilt(self, entry: Entry) -> Entry:
        """The same place, from an index that is built again."""
        self._directory = self._build([self._begin()], [])
        return self._directory.entries[self.before(entry.sequence, "sequence")]

    def before(self, value: int, field: str) -> int:
        """The number of the last entry whose counter is at most `value`."""
        return max(0, bisect_right(self.directory.entries, value, key=lambda entry: getattr(entry, field)) - 1)

    def _state(self, entry: Entry) -> State | None:
        if not entry.size:
            return first_state(self.log)
        if self._built:
            return self._loaded(self._built[self.directory.entries.index(entry) - 1])
        return self._loaded(cachefile.read_snapshot(cachefile.cache_path(self.path), entry))

    def _loaded(self, data: bytes | None) -> State | None:
        try:
            return None if data is None else snapshots.load(snapshots.decode(data), self.log.header.started.config)
        except BadSnapshot:
            return None

    def _fits(self, entry: Entry, state: State | None, must_follow: bool = False) -> bool:
        """Whether the frame after this state carries the digest that the state gives it.

        Unknown digests pass. So does a state that nothing follows, unless `must_follow`.
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
        return codec.chained(entry.chain, digest(after), frame.body) == frame.digest

    # ---- making it -----------------------------------------------------------------------------------------------

    def _begin(self) -> Entry:
        header = self.log.header
        size = _header_size(self.path)
        sequence, planned, next_id = _counts(self.first)
        if sequence != header.first_event:
            raise UnusableLog(f"{self.path} cannot be folded: event {header.first_event} comes first, {sequence} is due")
        return Entry(offset=size, chain=self.log.chain, sequence=sequence, planned=planned, next_id=next_id)

    def _build(
        self, entries: list[Entry], kept: list[bytes], source: str = "built", known: Known | None = None
    ) -> Directory:
        """Fold from the last entry to the end, keeping states on the way."""
        from vnext.replay.reading.making import made_of  # reading an existing index needs no scheduler

        self.source = source
        stat, timestamps, data = self.path.stat(), timestamps_size(self.path), part_of(self.path)
        made = made_of(self.log, data, entries, kept, known, self._progress)
        found = Directory(
            made_by=cachefile.made_by(),
            start=self.log.chain,
            size=len(data),
            mtime_ns=stat.st_mtime_ns,
            entries=cachefile.placed(made.entries, made.snapshots),
            end=made.end,
            stopped=made.stopped,
            step_counts=made.step_counts,
            latency=made.latency,
            timestamps_size=timestamps,
            timestamped=made.timestamped,
            known=made.known,
        )
        written = cachefile.write(cachefile.cache_path(self.path), found, made.snapshots)
        self._built = [] if written else made.snapshots
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


def _counts(state: State) -> tuple[int, int, int]:
    return state.sequence, state.planned, state.next_id


def _folded(state: State, frame: Frame) -> State:
    """The state after a frame. Raises IllegalEvent if the frame does not follow."""
    if frame.first_event != state.sequence:
        raise IllegalEvent(f"{frame.lost} frames are missing before event {frame.first_event}")
    for event in frame.events:
        state = reduce(state, event)
    return state


def _header_size(path: Path) -> int:
    """The size in bytes of a segment's header, before its first frame."""
    return len(codec.MAGIC) + codec.record_head.size + int.from_bytes(part_of(path, len(codec.MAGIC), 4), "little")


class Index:
    """The places of a whole log. A segment that cannot be opened ends the index, as it ends a reading. `waits` as in
    Segment."""

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
        """A state shortly before `step` is planned."""
        return self._at(step, 1)

    def at_request(self, request_id: int) -> Place:
        """A state shortly before the request arrives; the first state if the request is older."""
        return self._at(request_id, 2)

    def at_event(self, number: int) -> Place:
        """A state shortly before event `number` is folded."""
        return self._at(number, 0)

    def at_end(self) -> Place:
        return self._at(self.last.sequence, 0)

    def _at(self, value: int, field: int) -> Place:
        """The last place at which this field of _counts is at most `value`."""
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


def require_request(index: Index, request_id: int) -> None:
    """Raises UnusableLog if the log does not hold the request."""
    begin, end = index.first, index.last.next_id
    if request_id not in begin.requests and not begin.next_id <= request_id < end:
        raise UnusableLog(f"request {request_id} is not in this log: it holds {_ids(begin, end)}")


def _ids(begin: State, arrived: int) -> str:
    """Which requests a log that begins in this state knows, in words."""
    alive = sum(1 for _ in begin.requests.items())
    older = f" and {alive} older ones, those alive where it begins" if begin.next_id else ""
    return f"requests {begin.next_id} to {arrived - 1}{older}" if arrived > begin.next_id else f"no request{older}"


def _openable(log: Log) -> Iterator[Log]:
    yield Log(paths=log.paths[:1], header=log.header, chain=log.chain)
    for path in log.paths[1:]:
        try:
            found = open_log(path)
        except UnusableLog:
            return
        if not found.header.snapshot:
            return
        yield found
