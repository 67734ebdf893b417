"""Outgoing: a client's answer that has begun, in pieces as they come or as the complete events of a stream.

Follows what the client has been sent of a stream with which another server may go on. The events of the first server pass as they
are, and are looked at only when that becomes necessary, or when they are many.
"""

from __future__ import annotations

import aiohttp
import msgspec
from aiohttp import web

from vnext.router.proxy.continuing import Diverged, Shown, split
from vnext.router.proxy.events import WholeEvents, each_of
from vnext.server.context.errors import ClientGone

UNFOLDED_BYTES_MAX = 2**16
ENDING = frozenset({"engine_dead", "engine_stalled", "aborted", "shutting_down"})
"""Codes of the errors by which a vnext server ends a stream that another could finish."""


class Failed(Exception):
    """A server has not answered, or not to the end. `answer`: what it said instead, to be passed on if no other says more."""

    def __init__(self, reason: str, sentence: str, answer: web.Response | None = None) -> None:
        super().__init__(sentence)
        self.reason, self.answer = reason, answer


class Outgoing:
    """See the module. `shown` is None for what is no stream of an API that this router knows. `fingerprint`: that of the servers
    which can go on with it, "" if none can. `continued`: how often one has. Mutable."""

    def __init__(self, response: web.StreamResponse, shown: Shown | None, fingerprint: str) -> None:
        self.response, self.shown = response, shown
        self.fingerprint = "" if shown is None else fingerprint
        self.continued = 0
        self._whole = WholeEvents()
        self._unfolded: list[bytes] = []
        self._unfolded_bytes = 0

    async def take(self, data: bytes) -> None:
        """Pass on what has come. Raises Failed, ClientGone."""
        if self.shown is None:
            return await self._write(data)
        events = self._whole.push(data)
        if not self.fingerprint:
            return await self._write(events)
        if message := _ending(events):
            raise Failed("error", f"it ends its stream: {message}")
        if self.continued:
            return await self._take_lacking(events, self.shown)
        await self._write(events)
        self._unfolded.append(events)
        self._unfolded_bytes += len(events)
        if self._unfolded_bytes > UNFOLDED_BYTES_MAX:
            self._fold(self.shown)

    async def end(self) -> web.StreamResponse:
        """The server has answered to the end. Raises ClientGone."""
        await self._write(self._whole.end())
        await self.response.write_eof()
        return self.response

    def move(self) -> None:
        """Another server begins the stream again."""
        assert self.shown is not None
        self.continued += 1
        self._whole = WholeEvents()
        self._fold(self.shown)
        self.shown.begin_again()

    async def fail(self, message: str, code: str) -> web.StreamResponse:
        """End the stream with an error. Raises ClientGone."""
        assert self.shown is not None
        await self._write(self.shown.error(message, code))
        await self.response.write_eof()
        return self.response

    def _fold(self, shown: Shown) -> None:
        """Take in what the client has been sent."""
        events, self._unfolded, self._unfolded_bytes = b"".join(self._unfolded), [], 0
        for event in each_of(events) if self.fingerprint else ():
            shown.take(event)

    async def _take_lacking(self, events: bytes, shown: Shown) -> None:
        """Pass on what the client lacks of the events of a server that goes on. Raises Failed, ClientGone."""
        lacking: list[bytes] = []
        try:
            lacking.extend(map(shown.take, each_of(events)))
        except (Diverged, msgspec.DecodeError, LookupError, TypeError) as error:
            raise Failed("diverged", f"it does not repeat the stream: {error}") from error
        finally:
            await self._write(b"".join(lacking))

    async def _write(self, data: bytes) -> None:
        try:
            if data:
                await self.response.write(data)
        except (OSError, aiohttp.ClientError) as error:
            raise ClientGone from error


def _ending(events: bytes) -> str:
    """The message of the event by which a vnext server ends a stream that it cannot finish, "" where there is none. No text of an
    answer contains the bytes that are looked for: its quotation marks are escaped."""
    for event in each_of(events) if b'"error":{' in events else ():
        try:
            found = msgspec.json.decode(split(event)[1])
        except msgspec.DecodeError:
            continue
        error = (found.get("response") or found).get("error") if isinstance(found, dict) else None
        if isinstance(error, dict) and error.get("code") in ENDING:
            return str(error.get("message", ""))
    return ""
