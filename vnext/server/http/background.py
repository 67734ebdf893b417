"""Background: responses that are made without their clients, and streams that a client picks up again where it left.

Owns the responses in progress of one API process and the events of those that stream, which go to the store with the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vnext.server.context.api_keys import Tenant
from vnext.server.context.errors import DOMAIN_ERRORS, Failure, failure_of
from vnext.server.http.streaming import Events

Make = Callable[["Running"], Awaitable[None]]
log = logging.getLogger("vnext.server")


class Running:
    """One response in progress, and what takes its events in the place of `Events`. `now`: the response as it stands. Mutable."""

    def __init__(self, owner: str, now: dict[str, Any]) -> None:
        self.owner, self.now = owner, now
        self.frames: list[bytes] = []
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def send(self, *frames: bytes) -> bool:
        """Keep frames for those who follow."""
        self.frames += frames
        self._tell()
        return True

    send_with_end = send

    async def room(self) -> None:
        """There always is: an answer has a bounded length."""

    async def follow(self, events: Events, place: int) -> None:
        """Send the frames from `place` on, also those to come. Raises ClientGone."""
        while True:
            news = self._news
            frames = self.frames[place:]
            await send_all(events, frames)  # more may come meanwhile
            place += len(frames)
            if self.is_over:
                return
            if news is self._news:
                await news.wait()

    def end(self) -> None:
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Background:
    """The responses in progress by id. Mutable; only the event loop uses it."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}

    def get(self, id_: str, tenant: Tenant) -> Running | None:
        """The response, if it is in progress and the tenant sees it."""
        found = self._running.get(id_)
        return found if found is not None and tenant.sees(found.owner) else None

    def begin(self, running: Running, make: Make, failed: Callable[[Failure], None], cancelled: Callable[[], None]) -> None:
        """Make a response in a task of its own. One of the last two is called where it does not come to its end."""
        running.task = asyncio.create_task(self._run(running, make, failed, cancelled))
        self._running[running.now["id"]] = running

    async def end(self, running: Running) -> None:
        """Cancel a response, and wait until it has ended."""
        assert running.task is not None
        await asyncio.sleep(0)  # a task that has not begun would end without giving back what it holds
        running.task.cancel()
        await asyncio.wait({running.task})

    async def close(self) -> None:
        """Cancel all."""
        for running in [*self._running.values()]:
            await self.end(running)

    async def _run(self, running: Running, make: Make, failed: Callable[[Failure], None], cancelled: Callable[[], None]) -> None:
        try:
            await make(running)
        except asyncio.CancelledError:
            cancelled()
        except Exception as error:  # no client waits whom the middleware could tell
            if not isinstance(error, DOMAIN_ERRORS):
                log.exception("a fault in the response %s", running.now["id"])
            failed(failure_of(error))
        finally:
            del self._running[running.now["id"]]
            running.end()


async def send_all(events: Events, frames: list[bytes]) -> None:
    """Send frames as fast as the client reads. Raises ClientGone."""
    for frame in frames:
        if not events.send(frame):
            await events.room()


BACKGROUND = web.AppKey("background", Background)


async def close_background(app: web.Application) -> None:
    """For the end of the application."""
    await app[BACKGROUND].close()
