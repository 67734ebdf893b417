"""Forms: bodies of multipart/form-data, read whole within the bounds of all bodies."""

from __future__ import annotations

from email.parser import BytesHeaderParser

from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import ContentRefused
from vnext.server.context.identity import client_of
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.bodies import body_pieces

PARTS_MAX = 64
FIELD_BYTES_MAX = 2**16


async def read_form(request: web.Request, file: str) -> dict[str, list[bytes]]:
    """Each field's values, in order, one unless its name ends in []; `file` may be large. Raises ContentRefused, InvalidRequest
    and as `body_pieces`."""
    if request.content_type != "multipart/form-data":
        raise ContentRefused(f"Send the body as multipart/form-data, with the part {file} (curl -F).")
    context, client, data = request.app[SERVER_CONTEXT], client_of(request), bytearray()
    try:
        async for piece in body_pieces(request, context.body_bytes, client, context.settings.body_bytes_max):
            data += piece
        return fields_of(bytes(data), request.headers.get("Content-Type", ""), file)
    finally:
        context.body_bytes.give(len(data), client)


def fields_of(data: bytes, content_type: str, file: str) -> dict[str, list[bytes]]:
    """The fields of a body. Raises InvalidRequest."""
    header = BytesHeaderParser().parsebytes(b"Content-Type: " + content_type.encode("latin-1", "replace"))
    boundary = header.get_boundary("").encode("latin-1", "replace")
    parts = (b"\r\n" + data).split(b"\r\n--" + boundary) if boundary else []
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise InvalidRequest("The body is no valid multipart/form-data: it does not end with its boundary.")
    if len(parts) > PARTS_MAX:
        raise InvalidRequest(f"The body has more than {PARTS_MAX} parts: leave some out.")
    found: dict[str, list[bytes]] = {}
    for part in parts[1:-1]:
        head, _, value = part.lstrip(b" \t").removeprefix(b"\r\n").partition(b"\r\n\r\n")
        named = BytesHeaderParser().parsebytes(head[:FIELD_BYTES_MAX])
        name = str(named.get_param("name", "", header="Content-Disposition"))
        if not name:
            raise InvalidRequest("The body is no valid multipart/form-data: a part has no name.")
        if name in found and not name.endswith("[]"):
            raise InvalidRequest(f"{name[:80]} is given twice: send it once.", name[:80])
        if name != file and len(value) > FIELD_BYTES_MAX:
            raise InvalidRequest(f"The part {name[:80]!r} has {len(value)} bytes: at most {FIELD_BYTES_MAX} are read.", name[:80])
        found.setdefault(name, []).append(value)
    return found
