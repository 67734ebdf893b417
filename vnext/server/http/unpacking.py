"""Unpacking: decompresses a body with `Content-Encoding: gzip` or `deflate`.

Yields small pieces, so that the caller can stop at its bound: a few kilobytes may decompress to gigabytes.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator

from vnext.sampling_params import InvalidRequest
from vnext.server.context.errors import ContentRefused

PIECE_BYTES = 2**16  # a tenth of a millisecond
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def unpacked(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the decompressed body in pieces. `deflate` is zlib's format or the raw one: clients send both.

    Raises ContentRefused for another encoding, InvalidRequest for a body that does not match its encoding.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        async for part in parts:
            yield part
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ContentRefused(f"The body's Content-Encoding is {encoding[:40]!r}: send it as gzip, as deflate or plain.")
    unpacker = None
    async for part in parts:
        if unpacker is None and part:
            unpacker = zlib.decompressobj(_bits(part, encoding))
        for piece in _pieces(unpacker, part, encoding):
            yield piece
            await asyncio.sleep(0)  # let other tasks run
    if unpacker is None or not unpacker.eof:
        raise InvalidRequest(f"The body's {encoding} data is cut off: send all of it.")


def _pieces(unpacker: zlib._Decompress, part: bytes, encoding: str) -> Iterator[bytes]:
    """Decompress one more part."""
    piece = b"more"
    while part or len(piece) == PIECE_BYTES:
        try:
            piece = unpacker.decompress(part, PIECE_BYTES)
        except zlib.error as error:
            raise InvalidRequest(
                f"The header Content-Encoding says {encoding}, and the body is none: leave the header out, or pack the body."
            ) from error
        if unpacker.unused_data:
            raise InvalidRequest(f"The body's {encoding} data continues after its end: compress the body as one piece.")
        part = unpacker.unconsumed_tail
        yield piece


def _bits(part: bytes, encoding: str) -> int:
    if encoding != "deflate":
        return _GZIP_BITS
    return _ZLIB_BITS if part[0] & 0xF == 8 else _RAW_BITS
