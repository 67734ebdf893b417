"""Log view: serves the engine's log files to a viewer (`vnext-replay ui --live URL`).

Owns who may read and how much at once. The engine core and the ranks never learn of a viewer: it reads bytes of files that
the engine writes anyway. The server keeps no state between its requests, and disconnects a viewer that reads too slowly.
Off by default, because a log reveals lengths, times and shared prefixes, and a full log every text.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import web

from vnext.log.compression import Content
from vnext.server.context.errors import LogGone, LogHidden, Overloaded
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.origins import LOOPBACK, host_name
from vnext.server.settings import ServerSettings

READERS_MAX = 4
PART_BYTES_MAX = 1 << 20
WRITE_BYTES = 1 << 16
WRITE_TIMEOUT_S = 10.0

log = logging.getLogger("vnext.server")


class Readers:
    """Counts the viewers that this process is answering. Mutable."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        if self.count >= READERS_MAX:
            raise Overloaded(f"{READERS_MAX} viewers read the log at this moment: try again.")
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


READERS = web.AppKey("readers", Readers)


async def list_segments(request: web.Request) -> web.Response:
    """GET /log: the log's name, its segments as [number, bytes], oldest first, and `part`, the most bytes of one answer."""
    folder = _folder(request)
    segments = await asyncio.to_thread(_segments, folder)
    return web.json_response({"log": folder.name, "segments": segments, "part": PART_BYTES_MAX})


async def read_segment(request: web.Request) -> web.StreamResponse:
    """GET /log/{segment}?offset=BYTES: the bytes from the offset on, at most PART_BYTES_MAX; empty at the end."""
    folder, number, offset = _folder(request), int(request.match_info["segment"]), request.query.get("offset", "0")
    if not offset.isascii() or not offset.isdigit() or len(offset) > 15:
        raise web.HTTPBadRequest(reason="offset must be a whole number of bytes")
    from vnext.log.codec import segment_name

    with request.app[READERS]:
        try:
            part = await asyncio.to_thread(_part, folder / segment_name(number), int(offset))
        except FileNotFoundError:
            raise LogGone(f"Segment {number} is not there: the log keeps to its bounds and has deleted it.") from None
        return await _send(request, part)


async def _send(request: web.Request, part: bytes) -> web.StreamResponse:
    """Send the answer in pieces; disconnects a client that reads none of them within WRITE_TIMEOUT_S."""
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Cache-Control": "no-store"})
    response.content_length = len(part)
    await response.prepare(request)
    try:
        for at in range(0, len(part), WRITE_BYTES):
            await asyncio.wait_for(response.write(part[at : at + WRITE_BYTES]), WRITE_TIMEOUT_S)
        await response.write_eof()
    except TimeoutError:
        log.warning("a viewer of the log was cut off: it took nothing for %g s", WRITE_TIMEOUT_S)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client disconnected first
    return response


def _folder(request: web.Request) -> Path:
    """The log's folder, if this client may read it. Raises LogHidden."""
    context = request.app[SERVER_CONTEXT]
    settings: ServerSettings = context.settings
    if not settings.log_dir:
        raise LogHidden("This server does not show its log: start it with --show-log.")
    require_trusted(request, settings, "The log is shown")
    return Path(context.client.ready.log_dir or settings.log_dir)  # the present engine core's


def require_trusted(request: web.Request, settings: ServerSettings, what: str) -> None:
    """Raise LogHidden unless a key guards the server or the client is on its machine. `what`: how the sentence begins."""
    if not settings.needs_key and not (request.remote in LOOPBACK and host_name(request.host) in LOOPBACK):
        raise LogHidden(f"{what} on the server's own machine only: start it with an --api-key to do so elsewhere.")


def _segments(folder: Path) -> list[list[int]]:
    """[number, bytes] of each segment. It lists names before it reads sizes, so that all segments but the last are complete."""
    from vnext.log.codec import SEGMENT_SUFFIX

    found = []
    for path in sorted(folder.glob(f"*{SEGMENT_SUFFIX}")):
        try:
            with path.open("rb") as file:
                size = Content(file).size
            found.append([int(path.name.removesuffix(SEGMENT_SUFFIX).rpartition("-")[2]), size])
        except FileNotFoundError:
            continue  # deleted meanwhile
    return found


def _part(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        return Content(file).read(offset, PART_BYTES_MAX)
