"""Loading: what a streaming client is sent while its model loads: the stream's head and comments, so that it does not time out.

From then on the status is 200: what goes wrong is the stream's last event, in the form of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from aiohttp import web

from vnext.gateway.continuing import SHOWN
from vnext.gateway.outgoing import EVENTS

COMMENT = b": loading\n\n"


class _Error(msgspec.Struct):
    message: str
    type: str = "server_error"
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class Head:
    """The beginning of a client's stream. `response` is None while it has not begun. Mutable."""

    def __init__(self, request: web.Request) -> None:
        self.response: web.StreamResponse | None = None
        self._request, self._is_over = request, asyncio.Event()

    @asynccontextmanager
    async def commenting(self, interval_s: float) -> AsyncIterator[None]:
        """Send a comment every `interval_s` seconds (0: never) until `stop` or the end of the block. Raises ConnectionError."""
        self._commenting = asyncio.create_task(self._comment(interval_s))
        try:
            yield
        except asyncio.CancelledError:  # the client has gone
            self._commenting.cancel()
            raise
        finally:
            self._is_over.set()
            await asyncio.gather(self._commenting, return_exceptions=True)

    async def stop(self) -> web.StreamResponse | None:
        """No more comments; returns the response if it has begun. Raises ConnectionError where the client has gone."""
        self._is_over.set()
        await self._commenting
        return self.response

    async def ended(self, answer: web.StreamResponse) -> web.StreamResponse:
        """The client's response after an exchange: a server's refusal, which is no stream, ends the one that has begun."""
        if self.response is None or not isinstance(answer, web.Response):
            return answer
        try:
            error = msgspec.json.decode(answer.text or "", type=_Refusal).error
        except (ValueError, RecursionError):
            error = _Error(f"The server answers with status {answer.status}.")
        return await self.fail(error.message, error.code or error.type)

    async def fail(self, message: str, code: str) -> web.StreamResponse:
        """End the stream that has begun with its API's error event. Raises ConnectionError."""
        assert self.response is not None, "it has begun"
        await self.response.write(SHOWN[self._request.path]().error(message, code))
        await self.response.write_eof()
        return self.response

    async def _comment(self, interval_s: float) -> None:
        while interval_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), interval_s)
                return
            if self.response is None:
                response = web.StreamResponse(headers={"Content-Type": f"{EVENTS}; charset=utf-8", "Cache-Control": "no-cache"})
                await response.prepare(self._request)
                self.response = response
            await self.response.write(COMMENT)
