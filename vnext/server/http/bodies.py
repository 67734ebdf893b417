"""Bodies: reads, decompresses, bounds and decodes request bodies, for all views.

Owns the content type (declared JSON only: a web page of another site may send any other type without a preflight), the pace at
which a body must come, the total bytes of the bodies held at once, and the number of values in one body. It counts the values
while the body comes, decompressed and before decoding, because every other request waits while the decoder runs. A body with
`Content-Encoding: gzip` or `deflate` comes in small pieces: a few kilobytes may decompress to gigabytes.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import msgspec
from aiohttp import StreamReader, web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.admission import Quota
from vnext.server.context.errors import BodyTooSlow, ClientGone, ContentRefused, invalid_body
from vnext.server.context.identity import client_of
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.fields import without_unknown
from vnext.server.http.origins import is_from_a_page

Body = TypeVar("Body", bound=msgspec.Struct)

_UNKNOWN_FIELD = "Object contains unknown field"  # how the decoder's message begins
PIECE_BYTES = 2**16  # a tenth of a millisecond
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
PAUSE_S = 30.0  # without a byte
BYTES_PER_S_MIN = 1_000  # on average, after the first PAUSE_S: less than a modem sends
NUMBERS_MAX = 2**18 + 2**16  # 10 to 20 ns each in the decoder; OpenAI's embeddings take 300,000 tokens; a model's length if more
STRINGS_MAX = 2**18  # 30 ns
UNSAID = ("", "application/x-www-form-urlencoded", "application/octet-stream", "text/plain")  # what programs send that set no type
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
_CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([^;\"'\s]+)", re.IGNORECASE)
GROUPS_MAX = 2**15  # lists and objects, 300 ns


def numbers_max(model_length: int) -> int:
    """NUMBERS_MAX, or more where a model reads more tokens."""
    return max(NUMBERS_MAX, model_length + 2**16)


class Values:
    """Counts the values of a JSON text part by part, skipping the contents of strings. Mutable."""

    def __init__(self, numbers_max: int) -> None:
        self._bounds = ((b",", numbers_max, "values"), (b"[", GROUPS_MAX, "lists"), (b"{", GROUPS_MAX, "objects"))
        self._counts = [0] * len(self._bounds)
        self._quotes = 0
        self._escape = b""

    def count(self, part: bytes | bytearray) -> None:
        """Take in the next part. Raises InvalidRequest."""
        text = self._escape + part
        odd = (len(text) - len(text.rstrip(b"\\"))) % 2
        text, self._escape = text[: len(text) - odd], text[len(text) - odd :]
        pieces = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._quotes % 2 :: 2])
        self._quotes += len(pieces) - 1
        self._check(self._quotes // 2, STRINGS_MAX, "texts")
        for place, (byte, bound, words) in enumerate(self._bounds):
            self._counts[place] += outside.count(byte)
            self._check(self._counts[place], bound, words)

    @staticmethod
    def _check(count: int, bound: int, words: str) -> None:
        if count > bound:
            raise InvalidRequest(f"The body has more than {bound} {words}: send several requests.")


async def _part(content: StreamReader, size: int, started_s: float) -> bytes:
    """The next part of a body of which `size` bytes have come since `started_s`. Accepts a slow upload that makes progress; refuses
    one that only holds the connection. Raises BodyTooSlow, ClientGone, InvalidRequest."""
    try:
        if content.is_eof():  # all of it is here
            return content.read_nowait()
        left_s = started_s + PAUSE_S + size / BYTES_PER_S_MIN - time.monotonic()
        async with asyncio.timeout(min(PAUSE_S, max(left_s, 0))):
            return await content.readany()
    except TimeoutError:
        raise BodyTooSlow(
            f"The body came too slowly: {size} bytes in {time.monotonic() - started_s:.0f} s, at least "
            f"{BYTES_PER_S_MIN} in each second and one in {PAUSE_S:g} s are needed."
        ) from None
    except ConnectionError as error:
        raise ClientGone from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("The body is cut off, or does not match its headers: send all of it.") from error


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
        if not part:
            return
        inner = self._inner = self._inner or zlib.decompressobj(_bits(part, self._encoding))
        piece = b"more"
        while part or len(piece) == PIECE_BYTES:
            try:
                piece = inner.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                words = f"The header Content-Encoding says {self._encoding}, and the body is none"
                raise InvalidRequest(f"{words}: leave the header out, or pack the body.") from error
            if inner.unused_data:
                raise InvalidRequest(f"The body's {self._encoding} data continues after its end: compress the body as one piece.")
            part = inner.unconsumed_tail
            yield piece

    def end(self) -> None:
        """There are no more parts. Raises InvalidRequest for a body that is cut off."""
        if self._is_needed and (self._inner is None or not self._inner.eof):
            raise InvalidRequest(f"The body's {self._encoding} data is cut off: send all of it.")


def _bits(part: bytes, encoding: str) -> int:
    if encoding != "deflate":
        return _GZIP_BITS
    return _ZLIB_BITS if part[0] & 0xF == 8 else _RAW_BITS


async def body_pieces(request: web.Request, quota: Quota | None, client: str, size_max: int) -> AsyncIterator[bytes]:
    """A request's body, decompressed, as it comes. Each piece is taken from `quota`, if the body is held; the caller gives all that
    it got back. Raises InvalidRequest, ContentRefused, BodyTooSlow, ClientGone, Overloaded, HTTPException (413)."""
    if (length := request.content_length or 0) > size_max:
        raise web.HTTPRequestEntityTooLarge(size_max, length)
    encoding, started_s, come, size = request.headers.get("Content-Encoding"), time.monotonic(), 0, 0
    unpacker = Unpacker(encoding) if encoding else None
    while not request.content.at_eof():
        part = await _part(request.content, come, started_s)
        come += len(part)
        for piece in (part,) if unpacker is None else unpacker.pieces(part):
            size += len(piece)
            if size > size_max:
                raise web.HTTPRequestEntityTooLarge(size_max, size)
            if quota is not None:
                quota.take(len(piece), client)
            yield piece
    if unpacker is not None:
        unpacker.end()


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The request's body as what `decoder` makes. Raises as `body_pieces`."""
    if request.headers.get("Content-Type") != "application/json":
        _check_content_type(request)
    context, client = request.app[SERVER_CONTEXT], client_of(request)
    data, counted, values = bytearray(), 0, None
    try:
        async for piece in body_pieces(request, context.body_bytes, client, context.settings.body_bytes_max):
            data += piece
            if len(data) > GROUPS_MAX:  # fewer bytes hold no more values
                values = values or Values(numbers_max(context.bounds.model_length))
                await _count(values, data[counted:])
                counted = len(data)
        return await _decode(decoder, data)
    finally:
        context.body_bytes.give(len(data), client)


async def _count(values: Values, part: bytearray) -> None:
    """Count in pieces, yielding to other tasks after each."""
    for start in range(0, len(part), PIECE_BYTES):
        values.count(part[start : start + PIECE_BYTES])
        await asyncio.sleep(0)


def _check_content_type(request: web.Request) -> None:
    if not is_json(request):
        kind = kind_of(request)
        given = f"The body's Content-Type is {kind[:80]}" if kind else "The body has no Content-Type"
        raise ContentRefused(f"{given}: send JSON with the header 'Content-Type: application/json' (curl -H, or curl --json).")
    charset = _CHARSET.search(request.headers.get("Content-Type", ""))
    if charset and charset[1].lower() not in CHARSETS:
        raise ContentRefused(f"The body's charset is {charset[1][:40]!r}: JSON is sent in UTF-8, leave the charset out.")


def is_json(request: web.Request) -> bool:
    """Whether a body is to be read as JSON: it is said to be, or a program that is no browser says nothing of it, as `curl -d`."""
    kind = kind_of(request)
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return True
    return kind in UNSAID and not is_from_a_page(request)


def kind_of(request: web.Request) -> str:
    """The media type of a body, in small letters, "" for none. aiohttp's own reading of the header takes up to 200 ms."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def _decode(decoder: msgspec.json.Decoder[Body], data: bytearray) -> Body:
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise
        if len(data) <= PIECE_BYTES:
            return decoder.decode(without_unknown(data, decoder.type))
        return decoder.decode(await asyncio.to_thread(without_unknown, data, decoder.type))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_body(error) from error
