"""Admission: bounds the answers that wait or run in this process, in all and per client, and closes it to new requests.

Owns the counts and the closing. A request over a bound is refused, and its client may retry; nothing queues here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from vnext.sampling_params import InvalidRequest
from vnext.server.context.errors import Draining, Overloaded

CLIENT_SHARE = 3 / 4
REQUEST_SHARE = 1 / 16  # beginning 256 answers takes 20 ms of the event loop
SHARE_MIN = 128  # a smaller share would refuse reasonable single requests


def share_of(count_max: int, part: float) -> int:
    """A part of a bound, or all of it where the bound is too small to be shared."""
    return min(count_max, max(SHARE_MIN, int(count_max * part)))


class Quota:
    """A bounded amount, of which one client may hold `share_max`. `words` begin the refusal: "{} bytes are being read".
    Mutable."""

    def __init__(self, amount_max: int, share_max: int, words: str) -> None:
        self.amount_max = amount_max
        self.amount = 0
        self._share_max = share_max
        self._words = words
        self._held: dict[str, int] = {}

    def take(self, amount: int, client: str) -> None:
        """Take an amount. On Overloaded, nothing is taken."""
        mine = self._held.get(client, 0)
        for held, bound, whose in ((mine, self._share_max, "your "), (self.amount, self.amount_max, "the ")):
            if held + amount > bound:
                words = self._words.format(held)
                raise Overloaded(f"{words} and {amount} more would pass {whose}bound of {bound}: try again later.")
        self._held[client] = mine + amount
        self.amount += amount

    def give(self, amount: int, client: str) -> None:
        """Return an amount that was taken."""
        self.amount -= amount
        self._held[client] = self._held.get(client, 0) - amount
        if not self._held[client]:
            del self._held[client]


class RequestLimiter:
    """Counts live answers, up to `count_max` in all and up to a share of it for one request or one client."""

    def __init__(self, count_max: int, request_max: int = 0, client_max: int = 0) -> None:
        """Shares of 0 follow `count_max`: a sixteenth for a request, three quarters for a client."""
        self.request_max = min(count_max, request_max or share_of(count_max, REQUEST_SHARE))
        client_max = min(count_max, client_max or share_of(count_max, CLIENT_SHARE))
        self._quota = Quota(count_max, client_max, "{} answers are in progress")
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def live_count(self) -> int:
        """Answers that wait or run."""
        return self._quota.amount

    @contextmanager
    def enter(self, count: int, client: str = "") -> Iterator[None]:
        """Reserve `count` answers. Raises Draining, Overloaded, InvalidRequest (over the bound of one request)."""
        self.check_open()
        if count > self.request_max:
            raise InvalidRequest(
                f"The request asks for {count} answers: at most {self.request_max} are allowed, send several requests.", "n"
            )
        self._quota.take(count, client)
        self._empty.clear()
        try:
            yield
        finally:
            self._quota.give(count, client)
            if self._quota.amount == 0:
                self._empty.set()

    def check_open(self) -> None:
        """Raise Draining once the limiter is closed."""
        if self._closed:
            raise Draining("The server is shutting down: send the request to another one.")

    def close(self) -> None:
        self._closed = True

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait for all answers to end; returns whether they did within `timeout_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
