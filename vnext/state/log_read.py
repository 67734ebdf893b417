"""Reading a log: the longest valid prefix of its segments, as a stream of headers, frames and one end.

Owns every judgement about damaged bytes. It never raises on bad bytes and never yields an event that was not written:
a record counts only if its length, checksum, types, token widths and event numbers all agree; then reading ends with a
LogEnd that says where and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vnext.state import log, log_pack
from vnext.state.log import EndKind, Frame, FrameBody, LogEnd, SegmentHeader, SegmentStart

Item = SegmentStart | Frame | LogEnd
BAD_FORM = (msgspec.MsgspecError, ValueError)  # text that is not UTF-8 is a ValueError of its own


class _Bad(Exception):
    """Bytes that cannot be a record: kind and sentence for the LogEnd."""

    def __init__(self, kind: EndKind, message: str) -> None:
        super().__init__(message)
        self.kind: EndKind = kind


def read(segments: Iterable[bytes | memoryview]) -> Iterator[Item]:
    """Headers and frames in order, then exactly one LogEnd. The segments are read lazily, one at a time."""
    place, offset, size = -1, 0, 0
    before: _Reading | None = None
    rest = iter(segments)
    try:
        for place, data in enumerate(rest):
            offset, size = 0, len(data)
            reading = _Reading(memoryview(data))
            yield reading.open(before)
            offset = reading.offset
            while offset < size:
                frame = reading.frame()
                offset = reading.offset
                yield frame
            before = reading
    except _Bad as bad:
        if bad.kind == "torn" and next(rest, None) is not None:
            bad = _Bad("damaged", f"{bad}, and another segment follows")
        yield LogEnd(
            kind=bad.kind, message=str(bad), segment=place, offset_bytes=offset, ignored_bytes=size - offset
        )
        return
    yield LogEnd(kind="complete", message="", segment=place, offset_bytes=offset, ignored_bytes=0)


class _Reading:
    """One segment being read: `offset` is behind the last good record."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0
        self.chain = 0
        self.next_event = 0

    def open(self, before: _Reading | None) -> SegmentStart:
        """Read the header and see that it follows the segment before."""
        kind: EndKind = "unusable" if before is None else "damaged"
        payload, end = self._header_payload(kind, "unusable" if before is None else "torn")
        header = _decode_header(payload, kind)
        if before is not None:
            _require_chained(header, before)
        self.offset, self.chain, self.next_event = end, log.header_chain(payload), header.first_event
        return SegmentStart(header=header, chain=self.chain)

    def _header_payload(self, kind: EndKind, kind_if_cut: EndKind) -> tuple[memoryview, int]:
        magic = bytes(self.data[: len(log.MAGIC)])
        if not log.MAGIC.startswith(magic):
            raise _Bad(kind, "this is not a segment of a vnext log")
        try:
            return _record(self.data, len(log.MAGIC))
        except _Bad as bad:
            if bad.kind == "torn":
                raise _Bad(kind_if_cut, "the engine was stopped before it had written this segment's header") from bad
            raise _Bad(kind, f"the header is damaged ({bad})") from bad

    def frame(self) -> Frame:
        """Read the next frame and step behind it."""
        payload, end = _record(self.data, self.offset)
        frame = _decode_frame(payload)
        gap = frame.first_event - self.next_event
        if gap < 0 or (gap and not frame.lost):
            raise _Bad("damaged", f"event {frame.first_event} follows where event {self.next_event} is due")
        self.offset, self.chain = end, frame.digest
        self.next_event = frame.first_event + len(frame.events)
        return frame


def _decode_header(payload: memoryview, kind: EndKind) -> SegmentHeader:
    try:
        header = log.header_decoder.decode(payload)
    except BAD_FORM as error:
        raise _Bad(kind, f"the header has another form ({error})") from error
    if header.format_version > log.FORMAT_VERSION:
        newer = f"its format {header.format_version} is newer than {log.FORMAT_VERSION}"
        raise _Bad(kind, f"{newer}: read it with a newer vnext")
    return header


def _require_chained(header: SegmentHeader, before: _Reading) -> None:
    if (header.previous, header.first_event) != (before.chain, before.next_event):
        raise _Bad("unchained", f"segment {header.index} does not continue the segment before it")


def _record(data: memoryview, offset: int) -> tuple[memoryview, int]:
    """The payload of the record at `offset` and the offset behind it."""
    start = offset + log.record_head.size
    if start > len(data):
        raise _Bad("torn", "the segment ends inside a record")
    length, checksum = log.record_head.unpack_from(data, offset)
    payload = data[start : start + length]
    if len(payload) < length or not (length or any(data[offset:])):
        raise _Bad("torn", "the segment ends inside a record")
    if log.checksum(payload) != checksum:
        raise _Bad("damaged", "a record's checksum is wrong")
    return payload, start + length


def _decode_frame(payload: memoryview) -> Frame:
    if len(payload) < log.FRAME_LENGTH_MIN:
        raise _Bad("damaged", "a record is too short for a frame")
    body = bytes(payload[log.digest_word.size :])
    try:
        decoded = log.frame_decoder.decode(body)
        events = _unpacked(decoded)
    except BAD_FORM as error:
        raise _Bad("damaged", f"a frame has another form ({error})") from error
    return Frame(
        first_event=decoded.first_event,
        events=events,
        rank_digests=decoded.rank_digests,
        lost=decoded.lost,
        digest=log.digest_word.unpack_from(payload)[0],
        body=body,
    )


def _unpacked(body: FrameBody) -> tuple[log.AnyEvent, ...]:
    if not log_pack.WIDTH_MIN <= body.width <= log_pack.WIDTH_MAX:
        raise ValueError(f"{body.width} bytes a token")
    return tuple(log_pack.unpack(event, body.width) for event in body.events)
