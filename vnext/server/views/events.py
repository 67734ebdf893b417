"""Event stream: GET /events, by which a router in front of several servers has the engine's exact state (vnext/routing/view.py).

Owns who may follow and how far behind. The bytes are those of vnext/log/stream.py, with the tokens of all prompts and
answers: a router carries them anyway, and names of blocks can only be made from them. So it is off by default, and a key
guards it. The engine core makes the stream only while somebody follows.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import LogHidden, Overloaded
from vnext.server.context.identity import ENGINES_HEADER
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.views.log_view import WRITE_TIMEOUT_S, require_trusted

FOLLOWERS_MAX = 4
"""Routers that follow the engines of this process at once."""
FOLLOWERS = web.AppKey("followers", set)
"""The tasks that stream events now, which a server that stops does not wait for."""

log = logging.getLogger("vnext.server")


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
    for task in tuple(app[FOLLOWERS]):
        task.cancel()
