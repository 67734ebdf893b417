"""Forms: bodies of multipart/form-data (RFC 7578), part by part as they come.

Owns how values of headers are read: in time proportional to their length, within bounds, and without what the parsers of mail in
the standard library do for 200 ms with a kilobyte of brackets or semicolons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import ContentRefused
from vnext.server.context.identity import client_of
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.bodies import body_pieces, kind_of

KIND = "multipart/form-data"
PARTS_MAX = 64
FIELD_BYTES_MAX = 2**16
HEAD_BYTES_MAX = 2**13  # of a part
_PARAMETER = re.compile(r""";\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^";\s]*))""", re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BROKEN = f"The body is no valid {KIND}"


class Begun(NamedTuple):
    """A part begins: its name, and that of its file, "" for none."""

    name: str
    filename: str


class FormReader:
    """The parts of one body, as its pieces come: names are unique unless they end in []. Mutable."""

    def __init__(self, request: web.Request, parts: str) -> None:
        """Has met no piece. `parts`: what the form needs, in words. Raises ContentRefused, InvalidRequest."""
        if kind_of(request) != KIND:
            raise ContentRefused(f"Send the body as {KIND}, with {parts} (curl -F).")
        boundary = parameter_of(request.headers["Content-Type"], "boundary")
        if not boundary:
            raise InvalidRequest(f"{_BROKEN}: its Content-Type names no boundary.")
        self._mark = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._rest, self._in_head, self._is_over = bytearray(b"\r\n"), False, False
        self._names: list[str] = []

    def read(self, piece: bytes) -> Iterator[Begun | bytes]:
        """What one more piece brings: the beginnings of parts, and their bytes. Raises InvalidRequest."""
        rest = self._rest
        rest += piece
        while not self._is_over:
            if self._in_head:
                if rest.startswith(b"--"):
                    self._is_over = True
                    return
                if (size := rest.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)) < 0:
                    if len(rest) >= HEAD_BYTES_MAX:
                        raise InvalidRequest(f"{_BROKEN}: a part's headers have more than {HEAD_BYTES_MAX} bytes.")
                    return
                yield self._begun(bytes(rest[:size]))
                self._in_head = False
                del rest[: size + 4]
                continue
            at = rest.find(self._mark)
            size = at if at >= 0 else max(0, len(rest) - len(self._mark) + 1)  # the mark may have begun
            if size and self._names:
                yield bytes(rest[:size])
            del rest[: size + len(self._mark) if at >= 0 else size]
            if at < 0:
                return
            self._in_head = True

    def end(self) -> None:
        """There are no more pieces. Raises InvalidRequest for a body that is cut off."""
        if not self._is_over:
            raise InvalidRequest(f"{_BROKEN}: it does not end with its boundary.")

    def _begun(self, head: bytes) -> Begun:
        if _CONTROL.search(head):
            raise InvalidRequest(f"{_BROKEN}: a part has a header that is none.")
        if len(self._names) == PARTS_MAX:
            raise InvalidRequest(f"The body has more than {PARTS_MAX} parts: leave some out.")
        headers = (line.partition(":") for line in head.decode(errors="replace").split("\r\n"))
        value = next((value for name, _, value in headers if name.strip().lower() == "content-disposition"), "")
        name = parameter_of(value, "name")
        if not name:
            raise InvalidRequest(f"{_BROKEN}: a part has no name.")
        if name in self._names and not name.endswith("[]"):
            raise InvalidRequest(f"{name[:80]} is given twice: send it once.", name[:80])
        self._names.append(name)
        filename = parameter_of(value, "filename") or unquote(parameter_of(value, "filename*").rpartition("'")[2])
        return Begun(name, filename)


def parameter_of(header: str, name: str) -> str:
    """A parameter of a header's value, "" for none."""
    found = next((each for each in _PARAMETER.finditer(header) if each[1].lower() == name), None)
    if found is None:
        return ""
    return found[3] if found[2] is None else re.sub(r'\\(["\\])', r"\1", found[2])


async def read_form(request: web.Request, file: str) -> dict[str, list[bytes]]:
    """Each field's values, in order, one unless its name ends in []; `file` may be large. Raises ContentRefused, InvalidRequest
    and as `body_pieces`."""
    reader, context, client = FormReader(request, f"the part {file}"), request.app[SERVER_CONTEXT], client_of(request)
    found: dict[str, list[bytearray]] = {}
    size, name = 0, ""
    try:
        async for piece in body_pieces(request, context.body_bytes, client, context.settings.body_bytes_max):
            size += len(piece)
            for each in reader.read(piece):
                if isinstance(each, Begun):
                    name = each.name
                    found.setdefault(name, []).append(bytearray())
                    continue
                found[name][-1] += each
                if name != file and len(found[name][-1]) > FIELD_BYTES_MAX:
                    words = f"The part {name[:80]!r} has too many bytes: at most {FIELD_BYTES_MAX} are read."
                    raise InvalidRequest(words, name[:80])
        reader.end()
        return {name: [bytes(value) for value in values] for name, values in found.items()}
    finally:
        context.body_bytes.give(size, client)
