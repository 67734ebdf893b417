"""Packed segments: a closed segment in less room, of which any part can be read without the rest.

Pure: files belong to vnext/runtime/record/compressor.py, which writes them, and to their readers, which hand them in open.

    packed = "vnextPAK", size u64, block bytes u32, blocks u32, where each block ends u64..., CRC32 u32 of all before, block...
    block  = so many bytes of the segment, the last one fewer, as a zlib stream

A packed segment has the name of the plain one and reads as it, byte for byte. What is damaged in it reads as bytes that no
record has, so that a reading ends before it, and says so.
"""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO

MAGIC = b"vnextPAK"
BLOCK_BYTES, BLOCK_BYTES_MAX = 1 << 18, 1 << 20
GROWTH_MAX = 2
"""A segment's size is capped at this multiple of its file's, which bounds the memory that a reader reserves for it."""
LEVEL = 1
"""zlib's fastest level. On logs its best level saves no space and takes six times as long."""
NO_RECORD = b"\x01\0\0\0"
"""Repeated in place of damaged data: a record of one byte with a wrong checksum."""
_head = struct.Struct("<8sQII")


def compress_block(data: bytes) -> bytes:
    return zlib.compress(data, LEVEL)


def head_size(size: int) -> int:
    """The number of bytes before the first block of a segment of `size` bytes."""
    return _head.size + 8 * -(-size // BLOCK_BYTES) + 4


def head_of(size: int, lengths: list[int]) -> bytes:
    """The bytes before the blocks of a segment of `size` bytes that are compressed to these lengths."""
    ends, at = [], head_size(size)
    for length in lengths:
        at += length
        ends.append(at)
    reported = _head.pack(MAGIC, size, BLOCK_BYTES, len(ends)) + struct.pack(f"<{len(ends)}Q", *ends)
    return reported + struct.pack("<I", zlib.crc32(reported))


class Content:
    """The bytes of a segment's file, compressed or not. `size` is that of the segment. The caller closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._ends: tuple[int, ...] = ()
        self._block_bytes, self._number, self._block = 0, -1, b""
        file_size = self.size = file.seek(0, 2)
        file.seek(0)
        start = file.read(_head.size)
        if start[: len(MAGIC)] == MAGIC and len(start) == _head.size:
            self._open(start, file_size)

    def _open(self, start: bytes, file_size: int) -> None:
        """Read the head if it is valid. Otherwise the file is read as it is and is not a valid segment."""
        _, size, block_bytes, count = _head.unpack(start)
        if not 0 < block_bytes <= BLOCK_BYTES_MAX or count != -(-size // block_bytes) or 8 * count > file_size:
            return
        rest = self._file.read(8 * count + 4)
        ends = struct.unpack(f"<{count}Q", rest[: 8 * count]) if len(rest) == 8 * count + 4 else ()
        rising = all(before < after for before, after in zip((_head.size + len(rest) - 1, *ends), ends))
        if not ends or not rising or struct.pack("<I", zlib.crc32(start + rest[:-4])) != rest[-4:]:
            return
        self._ends, self._block_bytes, self._begin = ends, block_bytes, _head.size + len(rest)
        self.size = min(size, GROWTH_MAX * file_size)

    def read(self, at: int = 0, count: int | None = None) -> bytes:
        """Up to `count` bytes from `at`, or all bytes from there; fewer at the end."""
        if not self._ends:
            self._file.seek(at)
            return self._file.read() if count is None else self._file.read(count)
        end = self.size if count is None else min(at + count, self.size)
        if at >= end:
            return b""
        first, last = at // self._block_bytes, (end - 1) // self._block_bytes
        data = b"".join(map(self._unpacked, range(first, last + 1)))
        return data[at - first * self._block_bytes : end - first * self._block_bytes]

    def _unpacked(self, number: int) -> bytes:
        """One block. Caches the newest, because reads are usually sequential."""
        if number != self._number:
            begin = self._ends[number - 1] if number else self._begin
            self._file.seek(begin)
            due = min(self._block_bytes, self.size - number * self._block_bytes)
            self._block = _inflated(self._file.read(self._ends[number] - begin), due)
            self._number = number
        return self._block


def _inflated(data: bytes, due: int) -> bytes:
    """Exactly `due` bytes, whatever the data are."""
    try:
        found = zlib.decompressobj().decompress(data, due)
    except zlib.error:
        found = b""
    return found if len(found) == due else (NO_RECORD * (due // len(NO_RECORD) + 1))[:due]
