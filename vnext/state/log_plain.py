"""The log's work on bytes in plain Python: what each function means. `_log.c` is the compiled twin; tests compare them.

Owns packing, the usual frame and the end of a record. Every other frame is log.py's; `skim` is in log_skim.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import msgspec

RECORD_HEAD = 8
FRAME_HEAD = 16
"""Bytes before a frame's body: length u32, CRC32 u32, chained digest u64."""
WIDTH_MIN = 2
WIDTH_MAX = 4
PLANNED, COMMITTED = 3, 4  # tags of events.py

_encoder = msgspec.msgpack.Encoder()
_record_head = struct.Struct("<II")
_frame_head = struct.Struct("<IIQ")
_digests = struct.Struct("<QQ")


def checksum(payload: bytes | memoryview) -> int:
    """CRC32 of the payload's length (u32) and the payload, so that no other length can pass with the same sum."""
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))


def narrow(tokens: bytes, width: int) -> bytes | None:
    """int32 bytes to `width` bytes a token (2 to 4); None where a token is not a number of so many bytes."""
    _require_width(width)
    count = len(tokens) // 4
    if any(tokens[place::4].count(0) != count for place in range(width, WIDTH_MAX)):
        return None
    packed = bytearray(count * width)
    for place in range(width):
        packed[place::width] = tokens[place::4]
    return bytes(packed)


def widen(packed: bytes, width: int) -> bytes:
    """The inverse of `narrow`. ValueError if `packed` is not a whole number of tokens."""
    _require_width(width)
    if len(packed) % width:
        raise ValueError(f"{len(packed)} bytes are not a whole number of tokens of {width} bytes")
    wide = bytearray(len(packed) // width * 4)
    for place in range(width):
        wide[place::4] = packed[place::width]
    return bytes(wide)


def _require_width(width: int) -> None:
    if not WIDTH_MIN <= width <= WIDTH_MAX:
        raise ValueError(f"{width} bytes a token")


def put_steady(frame: bytearray, first_event: int, committed: int, tokens: bytes, planned: int, width: int) -> bool:
    """Make `frame` FRAME_HEAD bytes for `seal_frame`, and the body of a commit and a plan as expected.

    `committed` and `planned` are their steps, `tokens` int32 bytes. False, nothing done, if one does not fit `width`.
    """
    packed = narrow(tokens, width)
    if packed is None:
        return False
    events = [[COMMITTED, committed, packed], [PLANNED, planned, [], [], []]]
    frame[:] = bytes(FRAME_HEAD) + _encoder.encode([first_event, events, [], 0, width])
    return True


def seal_frame(frame: bytearray, previous: int, state_digest: int, hashed: Callable[[bytearray], int]) -> int:
    """Chain and complete a frame: its first FRAME_HEAD bytes become length, checksum and chained digest.

    Returns that digest (uint64): `hashed` of the previous one, the state's and the body.
    """
    size = len(frame) - RECORD_HEAD
    if size < FRAME_HEAD - RECORD_HEAD:
        raise ValueError(f"a frame of {size} bytes")
    _digests.pack_into(frame, 0, previous, state_digest)
    digest = hashed(frame)
    _frame_head.pack_into(frame, 0, size, 0, digest)
    _record_head.pack_into(frame, 0, size, checksum(bytes(frame[RECORD_HEAD:])))
    return digest


def record_end(data: bytes | memoryview, offset: int) -> int:
    """Where the record at `offset` ends; 0 where the data ends before it does, -1 where its checksum is wrong."""
    start = offset + RECORD_HEAD
    if offset < 0 or start > len(data):
        return 0
    length, due = _record_head.unpack_from(data, offset)
    payload = data[start : start + length]
    if len(payload) < length:
        return 0
    return start + length if checksum(payload) == due else -1
