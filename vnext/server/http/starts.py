"""Starts: how many requests begin in one turn of the event loop, and how much of a long piece of work is done in one.

A thousand requests that arrive together would otherwise begin in one turn, and no stream would get a token meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

Entry = TypeVar("Entry")
STARTS_A_TURN = 8  # a third of a millisecond each


class Starts:
    """Lets STARTS_A_TURN requests begin in a turn; the others wait in line, and clients take turns. Mutable."""

    def __init__(self) -> None:
        self._left = STARTS_A_TURN
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def turn(self, client: str) -> None:
        """Wait until a client's request may begin; at once where few do."""
        if self._left == STARTS_A_TURN:
            asyncio.get_running_loop().call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        begun = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(begun)
        await begun

    def _next(self) -> None:
        """The next turn has come: those in line go first."""
        self._left = STARTS_A_TURN
        while self._left and self._lines:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            begun = line.popleft()
            if line:
                self._lines[client] = line
            if not begun.done():  # its client is still there
                begun.set_result(None)
                self._left -= 1
        if self._left < STARTS_A_TURN:
            asyncio.get_running_loop().call_soon(self._next)


async def unhurried(entries: Iterable[Entry], count: int) -> AsyncIterator[Entry]:
    """The entries, with a turn for others after each `count` of them: for work of which one takes microseconds."""
    for place, entry in enumerate(entries, 1):
        yield entry
        if not place % count:
            await asyncio.sleep(0)
