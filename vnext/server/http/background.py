"""Background: responses that are made without their clients, and streams that a client picks up again where it left.

Owns the responses in progress of one API process and the events of those that stream, which go to the store with the response.
Bounds what these events take together: the response that has most of them then forgets them. It goes on, and so do those who follow
it, but it cannot be picked up at an event that is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.api_keys import Tenant
from vnext.server.context.errors import DOMAIN_ERRORS, Failure, failure_of
from vnext.server.http.streaming import Events

FRAME_BYTES = 64
"""Of an event, beside its own: the object and its place in a list."""
Make = Callable[["Running"], Awaitable[None]]
log = logging.getLogger("vnext.server")


def _size_bytes(frame: bytes) -> int:
    return len(frame) + FRAME_BYTES


class Running:
    """One response in progress, and what takes its events in the place of `Events`. `now`: the response as it stands. `frames`:
    its events from number `forgotten` on. Mutable."""

    def __init__(self, owner: str, now: dict[str, Any]) -> None:
        self.owner, self.now = owner, now
        self.frames: list[bytes] = []
        self.forgotten = self.size_bytes = 0
        self.grown: Callable[[int], None] = lambda size_bytes: None
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def send(self, *frames: bytes) -> bool:
        """Keep frames for those who follow."""
        self.frames += frames
        self.size_bytes += (more := sum(map(_size_bytes, frames)))
        self._tell()
        self.grown(more)
        return True

    send_with_end = send

    async def room(self) -> None:
        """There always is: an answer has a bounded length."""

    @property
    def whole(self) -> list[bytes]:
        """All events, for the store; none where some are forgotten."""
        return [] if self.forgotten else self.frames

    def forget(self) -> int:
        """Forget the older half of the events, which those who follow have, mostly; returns their bytes."""
        count = (len(self.frames) + 1) // 2
        size_bytes = sum(map(_size_bytes, self.frames[:count]))
        self.frames = self.frames[count:]
        self.forgotten += count
        self.size_bytes -= size_bytes
        return size_bytes

    async def follow(self, events: Events, place: int) -> None:
        """Send the frames from `place` on, also those to come. Raises ClientGone, InvalidRequest where they are forgotten."""
        while True:
            if place < self.forgotten:
                gone = f"The events up to number {self.forgotten - 1} of this response are not kept any more"
                raise InvalidRequest(f"{gone}: read it without stream once it has ended.", "starting_after")
            news = self._news
            frames = self.frames[place - self.forgotten :]
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

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of the events of all."""
        self._bytes_max, self.size_bytes = bytes_max, 0
        self._running: dict[str, Running] = {}

    def get(self, id_: str, tenant: Tenant) -> Running | None:
        """The response, if it is in progress and the tenant sees it."""
        found = self._running.get(id_)
        return found if found is not None and tenant.sees(found.owner) else None

    def begin(self, running: Running, make: Make, failed: Callable[[Failure], None], cancelled: Callable[[], None]) -> None:
        """Make a response in a task of its own. One of the last two is called where it does not come to its end."""
        running.grown = self._grown
        running.task = asyncio.create_task(self._run(running, make, failed, cancelled))
        self._running[running.now["id"]] = running

    async def end(self, running: Running) -> None:
        """Cancel a response, and wait until it has ended."""
        assert running.task is not None
        await asyncio.sleep(0)  # a task that has not begun would end without giving back what it holds
        running.task.cancel()
        await asyncio.wait({running.task})

    async def close(self) -> None:
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
            running.grown = lambda size_bytes: None
            self.size_bytes -= running.size_bytes
            running.end()

    def _grown(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            largest = max(self._running.values(), key=lambda each: each.size_bytes)
            if not largest.forgotten:
                why = "those of all that are in progress took more than %d bytes"
                log.warning(f"The events of the response %s are forgotten as they come: {why}.", largest.now["id"], self._bytes_max)
            self.size_bytes -= largest.forget()


async def send_all(events: Events, frames: list[bytes]) -> None:
    """Send frames as fast as the client reads. Raises ClientGone."""
    for frame in frames:
        if not events.send(frame):
            await events.room()


BACKGROUND = web.AppKey("background", Background)


async def close_background(app: web.Application) -> None:
    """For the end of the application."""
    await app[BACKGROUND].close()
