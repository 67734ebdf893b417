"""Exchange: one client's request on its way through the router, and its answer on the way back.

Until the client has a byte of an answer, a server that fails is replaced by another. From then on a stream can go on where the
servers compute the same bits: the other one gets the same request with the same seed, and begins the stream of the same ids again;
its events pass as far as the client lacks them, and must be the same as far as it has them (continuing.py). Where that is
impossible the stream ends with its API's error event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import NoReturn

import aiohttp
from aiohttp import web
from yarl import URL

from vnext.gateway.asked import NOTHING, SEED_HEADER, Asked, Pairs, goes_on, to_client, to_server
from vnext.gateway.backends import Backend, Live, NoBackend
from vnext.gateway.context import RouterContext
from vnext.gateway.continuing import SHOWN
from vnext.gateway.health import reason_of
from vnext.gateway.outgoing import EVENTS, PAUSE_S, WHOLE_BYTES_MAX, Failed, Outgoing
from vnext.server.context.errors import ClientGone, ModelUnknown
from vnext.server.context.identity import INPUTS_HEADER, REQUEST_ID, REQUEST_ID_HEADER, TICKET_HEADER
from vnext.server.http.event_ids import HEADER, begin_of, origin_in

TRIES_MAX = 4
"""Servers that get one request, one after the other."""
WAIT_S = 10.0
"""For a server that can go on with a stream."""
BUSY = frozenset({429, 502, 503})
KINDS = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl", "/v1/messages": "msg", "/v1/responses": "resp"}
"""Path -> how an engine's names of its requests begin, before the request's id."""
_UPSTREAM_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)

log = logging.getLogger("vnext.routing")


class Exchange:
    """See the module. Mutable."""

    def __init__(
        self, context: RouterContext, request: web.Request, asked: Asked, begun: web.StreamResponse | None = None
    ) -> None:
        """`begun`: the client's response, where its head is sent already."""
        self._context, self._request, self._asked = context, request, asked
        self._begun_by = origin_in(request.headers)
        self._seed = None if goes_on(request.headers) else asked.draw_seed()
        self._first = b""
        self._tried: set[Backend] = set()
        self._answers: list[web.Response] = []
        self._tries = 0
        self._started_s = time.monotonic()
        self._known, self._tickets = NOTHING, dict[str, str]()
        self._headers: Pairs = []
        self._out: Outgoing | None = None
        self._response = begun or web.StreamResponse()

    async def run(self) -> web.StreamResponse:
        """Pass the request on and its answer back. Raises NoBackend, ModelUnknown, ClientGone."""
        self._headers = self._to_server()
        self._known = await self._context.known(self._asked, self._request.path, self._headers)
        self._tickets[INPUTS_HEADER] = await self._context.inputs_ticket(
            self._asked, self._known, self._request.path, self._headers
        )
        self._headers = self._to_server()  # with that ticket, too
        self._tickets[TICKET_HEADER] = await self._context.ticket(self._asked, self._known, self._request.path, self._headers)
        self._headers = self._to_server()
        name = f"{KINDS.get(self._request.path, '')}-{self._request[REQUEST_ID]}"
        while True:
            backend = self._next() if self._out is None else await self._successor(self._out)
            if backend is None:
                return await self._give_up()
            with backend.serving(self._asked, self._known, name) as live:
                try:
                    return await self._through(backend, live)
                except Failed as failure:
                    await self._failed(backend, failure)

    # ---- which server ------------------------------------------------------------------------------------------------

    def _next(self) -> Backend | None:
        """The server that gets the request next, None if no other can. Raises NoBackend, ModelUnknown."""
        if self._tries >= TRIES_MAX:
            return None
        try:
            return self._context.choose(self._asked, self._known, self._request.path, self._tried, self._begun_by)
        except (NoBackend, ModelUnknown):
            if not self._tried:
                raise
            return None

    async def _successor(self, out: Outgoing) -> Backend | None:
        """A server that can go on with the stream; waits for one."""
        if not out.can_go_on:
            return None
        fleet = self._context.fleet
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    changed = fleet.changed
                    try:
                        return fleet.choose(self._asked, self._known, lambda each: each.identity.fingerprint == out.fingerprint)
                    except (NoBackend, ModelUnknown):
                        await changed.wait()
        except TimeoutError:
            return None

    async def _failed(self, backend: Backend, failure: Failed) -> None:
        """Take in a server's failure. Raises ClientGone where the answer is no stream that could say so."""
        self._context.metrics.failed.add(backend.url, failure.reason)
        if failure.reason in ("connect", "broken"):
            backend.failed(str(failure))
        level = logging.INFO if self._out is None else logging.WARNING
        log.log(level, "%s fails request %s: %s", backend.url, self._request[REQUEST_ID], failure)
        if self._out is None:
            self._tries += failure.reason != "elsewhere"
            self._tried.add(backend)
            self._answers += [] if failure.answer is None else [failure.answer]
            return
        if self._out.shown is None:
            self._abort(failure)
        if failure.reason == "refused":
            await asyncio.sleep(PAUSE_S)
        self._out.move(failure)

    def _abort(self, failure: Failed) -> NoReturn:
        """The client must not take half an answer for a whole one."""
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ClientGone from failure

    async def _give_up(self) -> web.StreamResponse:
        """The answer when no server is left: the busiest one's words, or an error, as an event where a stream has begun."""
        if self._out is not None:
            self._context.metrics.lost.add()
            return await self._end(self._out.lost())
        if self._answers:
            return min(self._answers, key=_retry_after)
        raise NoBackend("No server behind this router has answered: try again later.")

    # ---- there and back ----------------------------------------------------------------------------------------------

    async def _through(self, backend: Backend, live: Live) -> web.StreamResponse:
        """Send the request to a server and pass its answer on. Raises Failed, ClientGone."""
        headers = self._headers + ([(HEADER, begin)] if (begin := self._begin_of_stream()) else [])
        path, body = self._context.homes.renamed(backend, str(self._request.rel_url), self._body(backend), self._asked.previous)
        try:
            upstream = await self._context.session.request(
                self._request.method, URL(backend.url + path, encoded=True), data=body or None, headers=headers,
                allow_redirects=False,
            )  # fmt: skip
        except _UPSTREAM_ERRORS as error:
            reason = "connect" if isinstance(error, aiohttp.ClientConnectorError) else "broken"
            raise Failed(reason, f"it cannot be reached ({reason_of(error)})") from error
        try:
            return await self._answer(backend, upstream, live)
        finally:
            upstream.close()  # ends the server's work where it has not answered to the end

    async def _answer(self, backend: Backend, upstream: aiohttp.ClientResponse, live: Live) -> web.StreamResponse:
        status, is_events = upstream.status, upstream.content_type == EVENTS and upstream.status == 200
        if self._out is not None and not is_events:
            raise Failed("refused", f"it answers with status {status}")
        size = upstream.content_length
        if not is_events and (status in BUSY or (size is not None and size <= WHOLE_BYTES_MAX)):
            return await self._whole(backend, upstream, live)
        parts = _parts(upstream)
        first = await anext(parts, b"")
        self._begun(live)
        if self._out is None:
            self._out = await self._begin(backend, upstream, is_events)
            self._context.homes.learn(backend, first)
            self._first = first
        out = self._out
        await self._pass(out, first)
        async for part in parts:
            await self._pass(out, part)
        if out.continued and out.shown is not None:
            self._context.homes.learn(backend, self._first)  # a server that keeps the stream's ids keeps its response's too
            self._context.homes.rename(backend, out.shown)
        return await self._end(out.end())

    async def _pass(self, out: Outgoing, part: bytes) -> None:
        """Pass on what the client lacks. Raises Failed, ClientGone."""
        for data in out.take(part):
            await self._write(data)

    async def _end(self, data: bytes) -> web.StreamResponse:
        """End the client's response, with these bytes. Raises ClientGone."""
        await self._write(data)
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        try:
            if data:
                await self._response.write(data)
        except (OSError, aiohttp.ClientError) as error:
            raise ClientGone from error

    async def _whole(self, backend: Backend, upstream: aiohttp.ClientResponse, live: Live) -> web.Response:
        """An answer that is not sent before all of it is here. Raises Failed."""
        body = b"".join([part async for part in _parts(upstream)])
        answer = web.Response(status=upstream.status, body=body, headers=to_client(upstream.headers))
        if answer.status in BUSY:
            raise Failed("busy", f"it answers with status {answer.status}", answer)
        if self._context.homes.is_elsewhere(self._request.path, self._asked, answer.status):
            raise Failed("elsewhere", "it has not stored that response", answer)
        self._begun(live)
        self._context.homes.learn(backend, body)
        return answer

    async def _begin(self, backend: Backend, upstream: aiohttp.ClientResponse, is_events: bool) -> Outgoing:
        if not self._response.prepared:
            response = self._response = web.StreamResponse(status=upstream.status, headers=to_client(upstream.headers))
            if upstream.content_length is not None:
                response.content_length = upstream.content_length
            if self._seed is not None and backend.identity.is_vnext:
                response.headers[SEED_HEADER] = str(self._seed)
            await response.prepare(self._request)
        return Outgoing(SHOWN[self._request.path]() if is_events and self._asked.is_stream else None, backend.identity.fingerprint)

    def _begun(self, live: Live) -> None:
        live.begun()
        if self._out is None:
            self._context.metrics.first_byte.observe(time.monotonic() - self._started_s)
        else:
            self._context.metrics.continued.add()

    def _begin_of_stream(self) -> str:
        """The id in front of the first event of the stream that has begun; "" where none has, or the client sends an id itself."""
        return "" if self._out is None or HEADER in self._request.headers else begin_of(self._first)

    def _body(self, backend: Backend) -> bytes:
        return self._asked.with_seed(self._seed if backend.identity.is_vnext else None)

    def _to_server(self) -> Pairs:
        own, settings = {REQUEST_ID_HEADER: self._request[REQUEST_ID]}, self._context.settings
        own |= {name: ticket for name, ticket in self._tickets.items() if ticket}
        client = self._request.remote or ""
        return to_server(self._request.headers, client, own, settings.backend_api_key, settings.http.needs_key)


async def _parts(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """An answer's bytes as they come. Raises Failed."""
    try:
        while part := await upstream.content.readany():
            yield part
    except _UPSTREAM_ERRORS as error:
        raise Failed("broken", f"it broke the connection ({reason_of(error)})") from error


def _retry_after(answer: web.Response) -> tuple[bool, float]:
    """How soon a busy server may be asked again; one that says so comes first."""
    given = answer.headers.get("Retry-After", "")
    return (False, float(given)) if given.isdecimal() else (True, 0.0)
