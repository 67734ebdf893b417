"""Log view: the engine's log files for a viewer (`vnext-replay ui --live URL`), and its events for a router (GET /events).

Owns who may read, how much at once and how far behind. The engine core and the ranks never learn of a viewer: it reads bytes of
files that the engine writes anyway. The bytes of an event stream are those of vnext/log/stream.py, with the tokens of all prompts
and answers: a router carries them anyway, and names of blocks can only be made from them. The engine core makes it only while
somebody follows. Both are off by default, because a log reveals lengths, times and shared prefixes, and a full log every text; a
key guards them, and a client that reads too slowly is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import web

from vnext.log.compression import Content
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import LogGone, LogHidden, Overloaded
from vnext.server.context.identity import ENGINES_HEADER
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.origins import LOOPBACK, host_name
from vnext.server.settings import ServerSettings

READERS_MAX = 4
PART_BYTES_MAX = 1 << 20
WRITE_BYTES = 1 << 16
WRITE_TIMEOUT_S = 10.0

FOLLOWERS_MAX = 4
"""Routers that follow the engines of this process at once."""
FOLLOWERS = web.AppKey("followers", set)
"""The tasks that stream events now, which a server that stops does not wait for."""

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
    folder = log_folder(request)
    segments = await asyncio.to_thread(_segments, folder)
    return web.json_response({"log": folder.name, "segments": segments, "part": PART_BYTES_MAX})


async def read_segment(request: web.Request) -> web.StreamResponse:
    """GET /log/{segment}?offset=BYTES: the bytes from the offset on, at most PART_BYTES_MAX; empty at the end."""
    folder, number, offset = log_folder(request), int(request.match_info["segment"]), request.query.get("offset", "0")
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


def log_folder(request: web.Request) -> Path:
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


class _Parts:
    """What a follower has not been sent yet. Mutable."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._news = asyncio.Event()

    def put(self, data: bytes) -> None:
        self._parts.append(data)
        self._news.set()

    async def take(self) -> bytes:
        """All that has come; waits for some. b"" where the stream has ended and no other has begun yet."""
        await self._news.wait()
        self._news.clear()
        parts, self._parts = self._parts, []
        return b"".join(parts)


async def stream_events(request: web.Request) -> web.StreamResponse:
    """GET /events?engine=N: a snapshot of an engine's state and then every event, until the client leaves or the engine is dead. Of
    several engines one has to be named; a header says how many there are. Raises LogHidden, InvalidRequest, Overloaded."""
    context = request.app[SERVER_CONTEXT]
    if not context.settings.show_events:
        raise LogHidden("This server does not stream its events: start it with --show-events.")
    require_trusted(request, context.settings, "Events are streamed")
    engines, followers = context.client.engines, request.app[FOLLOWERS]
    client = engines[_number(request, len(engines))]
    context.check_engine()
    if len(followers) >= FOLLOWERS_MAX * len(engines):
        raise Overloaded(f"{FOLLOWERS_MAX} routers follow this server at this moment: try again.")
    headers = {"Content-Type": "application/octet-stream", "Cache-Control": "no-store", ENGINES_HEADER: str(len(engines))}
    response, parts, task = web.StreamResponse(headers=headers), _Parts(), asyncio.current_task()
    followers.add(task)
    try:
        await response.prepare(request)
        client.followers.add(parts.put)
        while client.death is None:
            await asyncio.wait_for(response.write(await parts.take()), WRITE_TIMEOUT_S)
    except TimeoutError:
        log.warning("a router was cut off from the events: it took nothing for %g s", WRITE_TIMEOUT_S)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client disconnected first
    finally:
        followers.discard(task)
        client.followers.remove(parts.put)
    return response


def _number(request: web.Request, count: int) -> int:
    """The engine that a request names. Raises InvalidRequest."""
    given = request.query.get("engine", "0" if count == 1 else "")
    if not (given.isdecimal() and len(given) < 5 and int(given) < count):
        raise InvalidRequest(f"engine is {given[:20]!r}: this server has {count}, so name one from 0 to {count - 1}.", "engine")
    return int(given)


async def end_streams(app: web.Application) -> None:
    """The server stops: nobody waits for streams that never end."""
    followers = app[FOLLOWERS]
    for task in tuple(followers):
        task.cancel()
