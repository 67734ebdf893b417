"""Timestamps: when each frame of a log was written, as bytes. Pure: files belong to `vnext.runtime.record.timestamp_file`.

They lie beside the log's segments and are no part of it: no decision depends on a time, and two runs that decide alike have the
same bytes in their frames. A file is blocks, each with an event, a time and a step of its own (a lost one costs no other), and
a record for each frame: so many events later, so many us later, so many us of work. Bytes: docs/log-format.md.
`MAGIC`, `head` and `stamp` are the open form: one head, then pairs of u64 (event behind the frame, monotonic ns), or (step with
the highest bit set, ns that rank 0 was busy with it). It stands behind the blocks while an engine writes, until it becomes one;
files of the first version have nothing else.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from vnext.log.codec import SEGMENT_SUFFIX
from vnext.log.log_plain import checksum

TIMESTAMPS_SUFFIX = ".vnexttimes"
BLOCK_MAGIC = b"vnextTI2"
block_start = struct.Struct("<8sI")
block_head = struct.Struct("<IqQQQ")
RECORD_SIZE = 8
EVENT_SHIFT, TIME_SHIFT = 54, 27
EVENTS_END, TIME_END, FURTHER_BUSY_END = 1 << 10, 1 << 27, 1 << 54

MAGIC = b"vnextTIM"
head = struct.Struct("<8sQQ")
stamp = struct.Struct("<QQ")
STEP_BIT = 1 << 63


class Timestamps(msgspec.Struct, frozen=True):
    """`events` and `times_ns` int64[n], ascending: the frame that ends before this event was written at this monotonic
    time. `wall_minus_monotonic_ns` turns it into the clock of arrivals. `busy_ns`: how long a step took on rank 0."""

    events: np.ndarray
    times_ns: np.ndarray
    wall_minus_monotonic_ns: int
    busy_ns: dict[int, int]


def timestamps_name(segment_name: str) -> str:
    """The file name of a segment's timestamps."""
    return segment_name.removesuffix(SEGMENT_SUFFIX) + TIMESTAMPS_SUFFIX


# ---- writing -----------------------------------------------------------------------------------------------------


class TimestampEncoder:
    """Timestamps being packed, in order. Mutable; `data` are the blocks that were ended; the writer empties it."""

    def __init__(self, wall_minus_monotonic_ns: int) -> None:
        self._wall_minus_monotonic_ns = wall_minus_monotonic_ns
        self._event = self._now_us = self._step = self._busy_us = 0
        self._begun = (0, 0, 0)
        self._records: list[int] = []
        self.data = bytearray()

    def took(self, step: int, busy_us: int) -> None:
        """Record that rank 0 was busy with a step for `busy_us`; the step's result is in the next frame."""
        self.set_apart()
        if step != self._step:
            self.end_block()
            self._begun = (*self._begun[:2], step)
        self._step, self._busy_us = step + 1, min(max(busy_us, 1), FURTHER_BUSY_END - 1)
        if busy_us >= TIME_END:
            self.set_apart()

    def set_apart(self) -> None:
        """A result that no frame of these stamps holds, or not alone, gets a record of its own."""
        if self._busy_us:
            self._records.append(self._busy_us)
            self._busy_us = 0

    def add(self, next_event: int, now_us: int) -> None:
        """A frame that ends before this event was written at this time. One without events gets no stamp."""
        events, passed_us = next_event - self._event, now_us - self._now_us
        if not events:
            return
        if not (0 < events < EVENTS_END and 0 <= passed_us < TIME_END):
            self._jump(next_event - 1, now_us)
            events, passed_us = 1, 0
        self._records.append(events << EVENT_SHIFT | passed_us << TIME_SHIFT | self._busy_us)
        self._event, self._now_us, self._busy_us = next_event, now_us, 0

    def _jump(self, event: int, now_us: int) -> None:
        """What comes is too far off for a record: a block begins there."""
        first_step = self._step - bool(self._busy_us)
        self.end_block()
        self._begun = (now_us, event, first_step)

    def end_block(self) -> None:
        """Move what was added to `data`."""
        if self._records:
            records = struct.pack(f"<{len(self._records)}Q", *self._records)
            rest = block_head.pack(len(self._records), self._wall_minus_monotonic_ns, *self._begun) + records
            self.data += block_start.pack(BLOCK_MAGIC, checksum(rest)) + rest
            self._records.clear()
        self._begun = (self._now_us, self._event, self._step - bool(self._busy_us))


# ---- reading -----------------------------------------------------------------------------------------------------


def parse(data: bytes) -> Timestamps | None:
    """The stamps of one file, None if it holds none. Those behind a damaged block, or one that goes backwards, are left out."""
    blocks, offset = [], 0
    while (block := _block(data, offset)) is not None:
        blocks.append(block)
        offset += block_start.size + block_head.size + RECORD_SIZE * block_head.unpack_from(data, offset + block_start.size)[0]
    if data.startswith(MAGIC, offset):
        last = _open_form(data[offset:])
        if last is not None:
            blocks.append(last)
    return joined(ascending(blocks)) if blocks else None


def joined(parts: list[Timestamps]) -> Timestamps:
    events, times = (np.concatenate([getattr(each, name) for each in parts]) for name in ("events", "times_ns"))
    busy = {step: took for each in parts for step, took in each.busy_ns.items()}
    return Timestamps(events, times, parts[0].wall_minus_monotonic_ns, busy)


def ascending(parts: list[Timestamps]) -> list[Timestamps]:
    """The parts before the first that goes backwards, in events or in time."""
    before: Timestamps | None = None
    for place, part in enumerate(parts):
        if len(part.events):
            if before is not None and (part.events[0] <= before.events[-1] or part.times_ns[0] < before.times_ns[-1]):
                return parts[:place]
            before = part
    return parts


def _block(data: bytes, offset: int) -> Timestamps | None:
    """The block at an offset; None if there is no whole one."""
    at = offset + block_start.size
    if len(data) < at + block_head.size:
        return None
    magic, crc = block_start.unpack_from(data, offset)
    count, wall_minus_monotonic_ns, now_us, event, step = block_head.unpack_from(data, at)
    end = at + block_head.size + RECORD_SIZE * count
    if magic != BLOCK_MAGIC or end > len(data) or checksum(data[at:end]) != crc:
        return None
    if max(now_us, event, step) >= 1 << 53:
        return None
    records = np.frombuffer(data, dtype="<u8", offset=at + block_head.size, count=count).astype(np.int64)
    events, low = records >> EVENT_SHIFT & (EVENTS_END - 1), records & (FURTHER_BUSY_END - 1)
    frames = events > 0
    busy_us = np.where(frames, low & (TIME_END - 1), low)
    busy_us = busy_us[busy_us > 0]
    times_us = now_us + np.cumsum(low[frames] >> TIME_SHIFT)
    busy = dict(zip(range(step, step + len(busy_us)), (busy_us * 1000).tolist()))
    return Timestamps(event + np.cumsum(events[frames]), times_us * 1000, wall_minus_monotonic_ns, busy)


def _open_form(data: bytes) -> Timestamps | None:
    """The timestamps that no block holds yet, or those of a file of the first version."""
    if len(data) < head.size:
        return None
    _, wall_ns, monotonic_ns = head.unpack_from(data)
    whole = (len(data) - head.size) // stamp.size * stamp.size
    pairs = np.frombuffer(data, dtype="<u8", offset=head.size, count=whole // 8).astype(np.int64).reshape(-1, 2)
    steps = pairs[:, 0] < 0  # the highest bit
    busy = dict(zip((pairs[steps, 0] & (STEP_BIT - 1)).tolist(), pairs[steps, 1].tolist()))
    pairs = pairs[~steps]
    back = np.flatnonzero((np.diff(pairs, axis=0) < 0).any(axis=1))
    pairs = pairs[: back[0] + 1] if len(back) else pairs
    return Timestamps(pairs[:, 0], pairs[:, 1], wall_ns - monotonic_ns, busy)
