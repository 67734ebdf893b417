"""Unpacking: decompresses a body with `Content-Encoding: gzip` or `deflate`.

Yields small pieces, so that the caller can stop at its bound: a few kilobytes may decompress to gigabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import ContentRefused

PIECE_BYTES = 2**16  # a tenth of a millisecond
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Unpacker:
    """Decompresses one body. `deflate` is zlib's format or the raw one: clients send both. Mutable."""

    def __init__(self, encoding: str) -> None:
        """Raises ContentRefused."""
        self._encoding = encoding.strip().lower()
        self._inner: zlib._Decompress | None = None
        self._is_needed = self._encoding not in ("", "identity")
        if self._is_needed and self._encoding not in ("gzip", "x-gzip", "deflate"):
            raise ContentRefused(f"The body's Content-Encoding is {self._encoding[:40]!r}: send it as gzip, as deflate or plain.")

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Decompress one more part. Raises InvalidRequest for a body that does not match its encoding."""
        if not self._is_needed:
            yield part
            return
        if self._inner is None and part:
            self._inner = zlib.decompressobj(_bits(part, self._encoding))
        piece = b"more"
        while part or len(piece) == PIECE_BYTES:
            try:
                piece = self._inner.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                words = f"The header Content-Encoding says {self._encoding}, and the body is none"
                raise InvalidRequest(f"{words}: leave the header out, or pack the body.") from error
            if self._inner.unused_data:
                raise InvalidRequest(f"The body's {self._encoding} data continues after its end: compress the body as one piece.")
            part = self._inner.unconsumed_tail
            yield piece

    def end(self) -> None:
        """There are no more parts. Raises InvalidRequest for a body that is cut off."""
        if self._is_needed and (self._inner is None or not self._inner.eof):
            raise InvalidRequest(f"The body's {self._encoding} data is cut off: send all of it.")


def _bits(part: bytes, encoding: str) -> int:
    if encoding != "deflate":
        return _GZIP_BITS
    return _ZLIB_BITS if part[0] & 0xF == 8 else _RAW_BITS
