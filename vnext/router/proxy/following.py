"""Following: the exact view of a vnext server that shows its events (`--show-events`), kept as long as it can be reached.

A view that is lost, or whose stream breaks, is asked for again; until it has a state again the server is known by what it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from vnext.router.proxy.backend import Backend
from vnext.router.proxy.fleet import Fleet
from vnext.router.view import View
from vnext.server.console import write_line

AGAIN_S = 0.25
"""Before a stream that has ended is asked for again."""


class Follower:
    """Follows one server. `follow` never ends."""

    def __init__(self, backend: Backend, fleet: Fleet, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._backend, self._fleet, self._session, self._headers = backend, fleet, session, headers
        self._view = View()
        self._has_reported = False

    async def follow(self) -> None:
        """Follow the server's events whenever it shows them."""
        while True:
            while self._backend.trouble or not self._backend.identity.is_vnext:
                await self._fleet.changed.wait()
            is_shown, out = asyncio.create_task(self._stream()), asyncio.create_task(self._until_out())
            try:
                await asyncio.wait((is_shown, out), return_when=asyncio.FIRST_COMPLETED)
                if is_shown.done() and not is_shown.result():
                    await out  # it does not show them, and another start of it may
            finally:
                is_shown.cancel()
                out.cancel()
                self._view.begin_again()
            await asyncio.sleep(AGAIN_S)

    async def _until_out(self) -> None:
        while not self._backend.trouble:
            await self._fleet.changed.wait()

    async def _stream(self) -> bool:
        """Take in the events until they end or the view is lost; returns whether it makes sense to ask again."""
        try:
            async with self._session.get(f"{self._backend.url}/events", headers=self._headers) as response:
                if response.status != 200:
                    return False
                self._view.begin_again()
                self._backend.exact = self._view
                async for data in response.content.iter_any():
                    if self._view.feed(data):
                        return True
                    if self._view.is_hopeless:
                        write_line(f"vnext: {self._backend.url} cannot be followed: {self._view.failure}")
                        return False
                    self._report()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        return True

    def _report(self) -> None:
        if self._view.is_exact and not self._has_reported:
            self._has_reported = True
            write_line(f"vnext: {self._backend.url} is followed: its cache and its queue are known exactly, by its events")
