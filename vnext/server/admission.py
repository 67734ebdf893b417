"""Admission at the edge: how many answers may wait or run in this process at once, and whether it still takes new ones.

Owns the count and the closing. A broken bound is the client's to retry; nothing queues here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from vnext.sampling_params import InvalidRequest
from vnext.server.errors import Draining, Overloaded


class Gate:
    """Counts live answers up to `count_max`."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Hold places for `count` answers. Raises Draining, Overloaded, InvalidRequest (more than could ever fit)."""
        self.check_open()
        if count > self._count_max:
            raise InvalidRequest(f"The request asks for {count} answers: at most {self._count_max} are allowed.", "n")
        if self._count + count > self._count_max:
            raise Overloaded(
                f"{self._count} answers are in progress and {count} more would pass the bound of {self._count_max}: "
                "try again later."
            )
        self._count += count
        self._empty.clear()
        try:
            yield
        finally:
            self._count -= count
            if self._count == 0:
                self._empty.set()

    def check_open(self) -> None:
        """Raise Draining once the gate is closed."""
        if self._closed:
            raise Draining("The server is shutting down: send the request to another one.")

    def close(self) -> None:
        self._closed = True

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether every answer has ended within `timeout_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
