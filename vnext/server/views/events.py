"""Event stream: GET /events, by which a router in front of several servers has the engine's exact state (vnext/router/view.py).

Owns who may follow and how far behind. The bytes are those of vnext/log/stream.py, with the tokens of all prompts and
answers: a router carries them anyway, and names of blocks can only be made from them. So it is off by default, and a key
guards it. The engine core makes the stream only while somebody follows.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from vnext.server.context.errors import LogHidden
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.views.log_view import READERS, WRITE_TIMEOUT_S, require_trusted

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
    """GET /events: a snapshot of the engine's state and then every event, until the client leaves or the engine is dead."""
    context = request.app[SERVER_CONTEXT]
    if not context.settings.show_events:
        raise LogHidden("This server does not stream its events: start it with --show-events.")
    require_trusted(request, context.settings, "Events are streamed")
    if len(context.client.engines) > 1:
        raise LogHidden("This server has several engines, and the events of one would say little: it routes among them itself.")
    context.check_engine()
    with request.app[READERS]:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        parts, task = _Parts(), asyncio.current_task()
        context.client.followers.add(parts.put)
        request.app[FOLLOWERS].add(task)
        try:
            while context.client.death is None:
                await asyncio.wait_for(response.write(await parts.take()), WRITE_TIMEOUT_S)
        except TimeoutError:
            log.warning("a router was cut off from the events: it took nothing for %g s", WRITE_TIMEOUT_S)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client disconnected first
        finally:
            request.app[FOLLOWERS].discard(task)
            context.client.followers.remove(parts.put)
        return response


async def end_streams(app: web.Application) -> None:
    """The server stops: nobody waits for streams that never end."""
    for task in tuple(app[FOLLOWERS]):
        task.cancel()
