"""Bodies: reads, bounds and decodes request bodies, for all views.

Owns the content type (declared JSON only: a web page of another site may send any other type without a preflight), the total
bytes of the bodies held at once, and the number of values in one body. It counts the values while the body comes, decompressed
and before decoding, because every other request waits while the decoder runs.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from vnext.server.context.errors import ContentRefused, invalid_body
from vnext.server.context.identity import client_of
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.context.values import GROUPS_MAX, Values, numbers_max
from vnext.server.http.fields import without_unknown
from vnext.server.http.unpacking import Unpacker
from vnext.server.http.upload import Upload

Body = TypeVar("Body", bound=msgspec.Struct)

_PIECE_BYTES = 2**16
_UNKNOWN_FIELD = "Object contains unknown field"  # how the decoder's message begins


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[Body], kind: type[Body]) -> Body:
    """The request's body as `kind`. Raises InvalidRequest, ContentRefused, BodyTooSlow, Overloaded, HTTPException (413)."""
    _check_content_type(request)
    context = request.app[SERVER_CONTEXT]
    size_max, client, size, counted = context.settings.body_bytes_max, client_of(request), 0, 0
    if (request.content_length or 0) > size_max:
        raise web.HTTPRequestEntityTooLarge(size_max, request.content_length)
    unpacker, upload = Unpacker(request.headers.get("Content-Encoding", "")), Upload(request.content)
    data, values = bytearray(), None
    try:
        while not request.content.at_eof():
            for piece in unpacker.pieces(await upload.part()):
                context.body_bytes.take(len(piece), client)
                size += len(piece)
                if size > size_max:
                    raise web.HTTPRequestEntityTooLarge(size_max, size)
                data += piece
                if size > GROUPS_MAX:  # fewer bytes hold no more values
                    values = values or Values(numbers_max(context.model_length))
                    await _count(values, data[counted:])
                    counted = size
        unpacker.end()
        return await _decode(decoder, data, kind)
    finally:
        context.body_bytes.give(size, client)


async def _count(values: Values, part: bytes) -> None:
    """Count in pieces, yielding to other tasks after each."""
    for start in range(0, len(part), _PIECE_BYTES):
        values.count(part[start : start + _PIECE_BYTES])
        await asyncio.sleep(0)


def _check_content_type(request: web.Request) -> None:
    header = request.headers.get("Content-Type", "")
    kind = header if header in ("", "application/json") else request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        given = f"The body's Content-Type is {kind}" if kind else "The body has no Content-Type"
        raise ContentRefused(f"{given}: send JSON with the header 'Content-Type: application/json' (curl -H, or curl --json).")


async def _decode(decoder: msgspec.json.Decoder[Body], data: bytearray, kind: type[Body]) -> Body:
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise
        if len(data) <= _PIECE_BYTES:
            return decoder.decode(without_unknown(data, kind))
        return decoder.decode(await asyncio.to_thread(without_unknown, data, kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_body(error) from error
