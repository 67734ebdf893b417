"""Following: the exact views of a vnext server that shows its events (`--show-events`), kept as long as it can be reached.

When one is lost, or its stream breaks, all are asked for again; until they have states the server is known by what it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import aiohttp

from vnext.gateway.backend import Backend
from vnext.gateway.engines import EngineViews
from vnext.gateway.fleet import Fleet
from vnext.routing.view import View
from vnext.server.console import write_line
from vnext.server.context.identity import ENGINES_HEADER

AGAIN_S = 0.25
"""Before a stream that has ended is asked for again."""
_UPSTREAM_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class Follower:
    """Follows one server. `follow` never ends."""

    def __init__(self, backend: Backend, fleet: Fleet, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._backend, self._fleet, self._session, self._headers = backend, fleet, session, headers
        self._engines = EngineViews()
        self._has_reported = False

    async def follow(self) -> None:
        """Follow the server's events whenever it shows them."""
        while True:
            while self._backend.trouble or not self._backend.identity.is_vnext:
                await self._fleet.changed.wait()
            is_shown, out = asyncio.create_task(self._streams()), asyncio.create_task(self._until_out())
            try:
                await asyncio.wait((is_shown, out), return_when=asyncio.FIRST_COMPLETED)
                if is_shown.done() and not is_shown.result():
                    await out  # it does not show them, and another start of it may
            finally:
                is_shown.cancel()
                out.cancel()
                self._engines.begin_again()
            await asyncio.sleep(AGAIN_S)

    async def _until_out(self) -> None:
        while not self._backend.trouble:
            await self._fleet.changed.wait()

    async def _streams(self) -> bool:
        """Take in the events of all the server's engines until one's end or its view is lost; returns whether it makes sense to ask
        again."""
        try:
            async with self._ask(0) as response:
                if response.status != 200:
                    return False
                count = _number(response.headers.get(ENGINES_HEADER, ""))
                if count != len(self._engines.views):
                    self._engines = EngineViews(count)
                self._engines.begin_again()
                self._backend.exact = self._engines
                first, *others = self._engines.views
                return await _first_of(self._take(response, first), *map(self._follow, range(1, count), others))
        except _UPSTREAM_ERRORS:
            return True

    async def _follow(self, number: int, view: View) -> bool:
        async with self._ask(number) as response:
            return response.status != 200 or await self._take(response, view)

    def _ask(self, number: int) -> Any:
        return self._session.get(f"{self._backend.url}/events?engine={number}", headers=self._headers)

    async def _take(self, response: aiohttp.ClientResponse, view: View) -> bool:
        async for data in response.content.iter_any():
            if view.feed(data):
                return True
            if view.is_hopeless:
                write_line(f"vnext: {self._backend.url} cannot be followed: {view.failure}")
                return False
            self._report()
        return True

    def _report(self) -> None:
        if self._engines.is_exact and not self._has_reported:
            self._has_reported = True
            write_line(f"vnext: {self._backend.url} is followed: its cache and its queue are known exactly, by its events")


async def _first_of(*work: Coroutine[Any, Any, bool]) -> bool:
    """The result of what ends first; the rest is cancelled. Raises what it raises."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return all([each.result() for each in done])
    finally:
        for each in tasks:
            each.cancel()


def _number(text: str) -> int:
    """Of a server's engines: one where it does not say."""
    return max(int(text), 1) if text.isdecimal() and len(text) < 5 else 1
