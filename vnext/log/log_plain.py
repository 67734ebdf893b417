"""The log's operations on bytes in Python: the plain form, which defines each function. Tests compare `_log.c` with it.

Owns token packing, the steady frame and the end of a record. codec.py builds other frames; `skim` is in skimming.py.
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
    """CRC32 of the payload's length (u32) and the payload, so that the checksum also covers the length."""
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))


def narrow(tokens: bytes, width: int) -> bytes | None:
    """int32 bytes to `width` bytes a token (2 to 4); None if a token does not fit."""
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
    """Write into `frame` FRAME_HEAD bytes for `seal_frame`, then the body of a commit and the expected plan.

    `committed` and `planned` are their steps, `tokens` int32 bytes. False, with nothing done, if a token exceeds `width`.
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
    """The offset at which the record at `offset` ends; 0 if the data ends before it, -1 if its checksum is wrong."""
    start = offset + RECORD_HEAD
    if offset < 0 or start > len(data):
        return 0
    length, due = _record_head.unpack_from(data, offset)
    payload = data[start : start + length]
    if len(payload) < length:
        return 0
    return start + length if checksum(payload) == due else -1
