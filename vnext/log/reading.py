"""Reading a log: the longest valid prefix of its segments, as a stream of headers, frames and one end.

Owns every judgement about damaged bytes. It never raises on bad bytes and never yields an event that was not written:
a record counts only if its length, checksum, types, token widths and event numbers all agree; then reading ends with a
LogEnd that says where and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from vnext.log import codec as log, log_bytes
from vnext.log.codec import EndKind, Frame, LogEnd, SegmentHeader, SegmentStart
from vnext.log.log_plain import RECORD_HEAD, WIDTH_MAX, WIDTH_MIN
from vnext.log.skimming import Skimmed

SKIM_MAX = 1 << 16  # commits, and arrivals, of one run
STEADY_MIN, STEADY_MAX = 4, 1 << 16  # least frames of a run, most tokens
ZEROS_STEP = 1 << 12
SCAN_BYTES_MAX, SCAN_STEP = 1 << 28, 1 << 12  # that are checked to tell damage from a kill, and at once
BAD_FORM = (msgspec.MsgspecError, ValueError, RecursionError)  # text that is not UTF-8 is a ValueError of its own


class _Bad(Exception):
    """Bytes that cannot be a record: kind and sentence for the LogEnd."""

    def __init__(self, kind: EndKind, message: str) -> None:
        super().__init__(message)
        self.kind: EndKind = kind


class Skim(msgspec.Struct, frozen=True, kw_only=True):
    """A run of plain frames, counted instead of decoded.

    `batches` int32[n] are the samples of each commit; `prompts` int32[m] and `times` int64[m] the tokens and the
    arrival_ns of each request.
    """

    counts: Skimmed
    batches: np.ndarray
    prompts: np.ndarray
    times: np.ndarray


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """A run of steady frames, a commit and the expected plan each, not decoded; bytes of `data` from `offset` on.

    `ends` int64[n] is where each frame ends, `counts` int32[n] the samples of its commit, `tokens` int32[m] all of them.
    The first frame commits step `committed` and plans step `planned`; `digest` is the last one's.
    """

    data: bytes | memoryview
    offset: int
    first_event: int
    committed: int
    planned: int
    ends: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    digest: int

    def frame(self, place: int) -> Frame:
        """One of the frames, decoded."""
        start = self.offset if not place else int(self.ends[place - 1])
        return _decode_frame(memoryview(self.data)[start + RECORD_HEAD : int(self.ends[place])])


Item = SegmentStart | Frame | Skim | Steady | LogEnd


def read(segments: Iterable[bytes | memoryview], skim: bool = False, steady: bool = False) -> Iterator[Item]:
    """Headers and frames in order, then exactly one LogEnd. The segments are read lazily, one at a time.

    With `skim`, frames that can be counted without being seen (skimming.py) come as runs: a hundred times as fast. With
    `steady`, steady frames come as runs of STEADY_MIN or more.
    """
    place, offset, size = -1, 0, 0
    before: _Reading | None = None
    room = SKIM_MAX if skim else 0
    buffers = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int64)
    rest = iter(segments)
    try:
        for place, data in enumerate(rest):  # noqa: B007  reported below
            offset, size = 0, len(data)
            reading = _Reading(data)
            yield reading.open(before)
            while (offset := reading.offset) < size:
                item = reading.skim(buffers) if skim else reading.steady() if steady else None
                yield item or reading.frame()
            before = reading
    except _Bad as bad:
        if bad.kind == "torn" and next(rest, None) is not None:
            bad = _Bad("damaged", f"{bad}, and another segment follows")
        yield LogEnd(
            kind=bad.kind, message=str(bad), segment=place, offset_bytes=offset, ignored_bytes=size - offset
        )
        return
    yield LogEnd(kind="complete", message="", segment=place, offset_bytes=offset, ignored_bytes=0)


def read_frames(
    data: bytes | memoryview, next_event: int, segment: int = 0, steady: bool = False
) -> Iterator[tuple[int, Frame | Steady | LogEnd]]:
    """(offset, frame) of each frame in a part of a segment that begins with one, then (offset, the one LogEnd).

    `next_event` is the number of the part's first event; a gap is seen as in a whole segment. `steady` as in `read`.
    """
    reading = _Reading(data)
    reading.next_event = next_event
    offset, end = 0, LogEnd(kind="complete", message="", segment=segment, offset_bytes=len(data), ignored_bytes=0)
    try:
        while (offset := reading.offset) < len(data):
            yield offset, (reading.steady() if steady else None) or reading.frame()
    except _Bad as bad:
        ignored = len(data) - offset
        end = LogEnd(kind=bad.kind, message=str(bad), segment=segment, offset_bytes=offset, ignored_bytes=ignored)
    yield offset, end


class _Reading:
    """One segment being read: `offset` is behind the last good record."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.offset = 0
        self.chain = 0
        self.next_event = 0
        self._uneven_until = 0
        self._buffers: tuple[np.ndarray, ...] | None = None

    def open(self, before: _Reading | None) -> SegmentStart:
        """Read the header and see that it follows the segment before."""
        kind: EndKind = "unusable" if before is None else "damaged"
        payload, end = self._header_payload(kind, "unusable" if before is None else "torn")
        header = _decode_header(payload, kind)
        if before is not None:
            _require_chained(header, before)
        self.offset, self.chain, self.next_event = end, log.header_chain(payload), header.first_event
        return SegmentStart(header=header, chain=self.chain)

    def _header_payload(self, kind: EndKind, kind_if_cut: EndKind) -> tuple[bytes | memoryview, int]:
        if not log.MAGIC.startswith(self.data[: len(log.MAGIC)]):
            raise _Bad(kind, "this is not a segment of a vnext log")
        try:
            end = _record_end(self.data, len(log.MAGIC))
            return self.data[len(log.MAGIC) + RECORD_HEAD : end], end
        except _Bad as bad:
            if bad.kind == "torn" and (behind := _whole_frame_behind(self.data, len(log.MAGIC), 0)):
                raise _Bad(kind, f"the header's length is wrong, and a whole record follows at byte {behind:,}") from bad
            if bad.kind == "torn":
                raise _Bad(kind_if_cut, "the engine was stopped before it had written this segment's header") from bad
            raise _Bad(kind, f"the header is damaged ({bad})") from bad

    def frame(self) -> Frame:
        """Read the next frame and step behind it."""
        try:
            end = _record_end(self.data, self.offset)
        except _Bad as bad:
            if bad.kind == "torn" and (behind := _whole_frame_behind(self.data, self.offset, self.next_event + 1)):
                raise _Bad("damaged", f"a record's length is wrong, and a whole record follows at byte {behind:,}") from bad
            raise
        frame = _decode_frame(memoryview(self.data)[self.offset + RECORD_HEAD : end])
        gap = frame.first_event - self.next_event
        if gap < 0 or (gap and not frame.lost):
            raise _Bad("damaged", f"event {frame.first_event} follows where event {self.next_event} is due")
        self.offset, self.chain = end, frame.digest
        self.next_event = frame.first_event + len(frame.events)
        return frame

    def skim(self, buffers: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Skim | None:
        """Step behind as many plain frames as follow and as the buffers have room for; None if it is none."""
        counts = Skimmed(*log_bytes.skim(self.data, self.offset, self.next_event, *buffers))
        if not counts.frames:
            return None
        self.offset, self.chain, self.next_event = counts.offset, counts.digest, counts.next_event
        sizes = (counts.commits, counts.arrivals, counts.arrivals)
        batches, prompts, times = (buffer[:size].copy() for buffer, size in zip(buffers, sizes))
        return Skim(counts=counts, batches=batches, prompts=prompts, times=times)

    def steady(self) -> Steady | None:
        """Step behind a run of steady frames; None if none is here, or a short one."""
        if self.offset < self._uneven_until:
            return None
        if self._buffers is None:
            self._buffers = tuple(np.empty(STEADY_MAX, dtype=dtype) for dtype in (np.int32, np.int32, np.int64))
        found = log_bytes.skim_steady(self.data, self.offset, self.next_event, *self._buffers)
        offset, digest, frames, taken, committed, planned = found
        if frames < STEADY_MIN:
            self._uneven_until = offset + 1
            return None
        tokens, counts, ends = (each[:size].copy() for each, size in zip(self._buffers, (taken, frames, frames)))
        run = Steady(
            data=self.data, offset=self.offset, first_event=self.next_event, committed=committed, planned=planned,
            ends=ends, counts=counts, tokens=tokens, digest=digest,
        )  # fmt: skip
        self.offset, self.chain, self.next_event = offset, digest, self.next_event + 2 * frames
        return run


def _decode_header(payload: bytes | memoryview, kind: EndKind) -> SegmentHeader:
    try:
        header = log.header_decoder.decode(payload)
    except BAD_FORM as error:
        raise _Bad(kind, f"the header has another form ({error})") from error
    if header.format_version > log.FORMAT_VERSION:
        newer = f"its format {header.format_version} is newer than {log.FORMAT_VERSION}"
        raise _Bad(kind, f"{newer}: read it with a newer vnext")
    if not WIDTH_MIN <= header.token_width <= WIDTH_MAX:
        raise _Bad(kind, f"the header has another form ({header.token_width} bytes a token)")
    return header


def _require_chained(header: SegmentHeader, before: _Reading) -> None:
    if (header.previous, header.first_event) != (before.chain, before.next_event):
        raise _Bad("unchained", f"segment {header.index} does not continue the segment before it")


def _record_end(data: bytes | memoryview, offset: int) -> int:
    end = log_bytes.impl.record_end(data, offset)
    if end > 0:
        return end
    if end == 0 or _is_zero(memoryview(data)[offset:]):
        raise _Bad("torn", "the segment ends inside a record")
    raise _Bad("damaged", "a record's checksum is wrong")


def _whole_frame_behind(data: bytes | memoryview, offset: int, event_min: int) -> int:
    """Where a later frame is whole behind a record that seems to go beyond the data, 0 for none. A kill cuts the last record and
    leaves nothing behind it, so such a frame proves that the record's length was changed."""
    left = SCAN_BYTES_MAX
    for start, size in _lengths(data, offset + 1):
        if (left := left - size) < 0:
            break
        if (end := log_bytes.impl.record_end(data, start)) <= 0:
            continue
        try:
            frame = _decode_frame(memoryview(data)[start + RECORD_HEAD : end])
        except _Bad:
            continue
        if frame.first_event >= event_min:
            return start
    return 0


def _lengths(data: bytes | memoryview, offset: int) -> Iterator[tuple[int, int]]:
    """(place, length) of what may be a record, from `offset` on."""
    for start in range(offset, len(data) - RECORD_HEAD, SCAN_STEP):
        piece = np.frombuffer(data, np.uint8, min(SCAN_STEP + 3, len(data) - start), start).astype(np.uint32)
        sizes = piece[:-3] | piece[1:-2] << 8 | piece[2:-1] << 16 | piece[3:] << 24
        ends = np.arange(start + RECORD_HEAD, start + RECORD_HEAD + len(sizes)) + sizes
        for place in np.flatnonzero((sizes >= log.FRAME_LENGTH_MIN) & (ends <= len(data))).tolist():
            yield start + place, int(sizes[place])


def _is_zero(data: memoryview) -> bool:
    """Whether nothing but zeros is left, as a power cut leaves a file."""
    return all(not any(data[at : at + ZEROS_STEP]) for at in range(0, len(data), ZEROS_STEP))


def _decode_frame(payload: memoryview) -> Frame:
    """The frame in a record's payload, of which the body is copied, once."""
    if len(payload) < log.FRAME_LENGTH_MIN:
        raise _Bad("damaged", "a record is too short for a frame")
    body = bytes(payload[log.digest_word.size :])
    try:
        decoded = log.frame_decoder.decode(body)
        events = log.widen_events(decoded.events, decoded.width)
    except BAD_FORM as error:
        raise _Bad("damaged", f"a frame has another form ({error})") from error
    return Frame(
        first_event=decoded.first_event,
        events=events,
        rank_digests=decoded.rank_digests,
        lost=decoded.lost,
        digest=log.digest_word.unpack_from(payload)[0],
        body=body,
        details=decoded.details,
    )


Reading = _Reading
BadRecord = _Bad
"""For a reader that follows a log while it grows (vnext/replay/reading/tail.py)."""
