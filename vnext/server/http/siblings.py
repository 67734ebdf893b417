"""Siblings: the API servers that accept from one port, which ask each other for responses that one of them has.

Each also serves its application at a Unix socket in the folder that they share, which only their user can open, and passes on what
a client asks of a response that it lacks itself, with the client's key. What a sibling asks is not passed on once more. The one at
place 0 keeps the files and batches of all.
"""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, UnixConnector, web

from vnext.server.context.errors import ClientGone, Draining
from vnext.server.settings import ServerSettings

HEADER = "X-Vnext-Sibling"
"""Of what a sibling asks: `answer`, as a client would get it, or `stored`, all that is kept of it."""
OK, ABSENT = 200, 404
_TO = ("Authorization", "X-Api-Key", "Last-Event-ID", "Accept")
_OF_BODY = ("Content-Type", "Content-Encoding")
_ID = re.compile(r"[\w-]{1,160}", re.ASCII)
_BACK = ("Content-Type", "Cache-Control", "X-Accel-Buffering")


class Siblings:
    """Those of one API server; none where it has no folder to share. `start` in the event loop, `close` there."""

    def __init__(self, settings: ServerSettings) -> None:
        count = settings.api_server_count if settings.shared_dir and settings.api_server_count > 1 else 0
        paths = [Path(settings.shared_dir) / f"api-{place}.socket" for place in range(count)]
        self._is_first = not count or settings.number % count == 0
        self._path = paths.pop(settings.number % count) if count else None
        self._others, self._sessions = paths, list[ClientSession]()

    async def start(self, runner: web.AppRunner) -> None:
        """Listen to siblings, in the place of an earlier process."""
        if self._path is None:
            return
        self._path.unlink(missing_ok=True)
        await web.UnixSite(runner, str(self._path)).start()
        connectors = [UnixConnector(str(path), force_close=True) for path in self._others]
        self._sessions = [ClientSession(connector=each, timeout=ClientTimeout(total=None)) for each in connectors]

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse | None:
        """A sibling's answer to a request without a body, None where all lack what it is about. Raises ClientGone for one that ends
        within its answer."""
        async with self._first(request, request.method, request.raw_path, "answer") as found:
            return None if found is None else await _passed(request, found)

    @property
    def is_first(self) -> bool:
        """Whether this one keeps the files and batches, in place of which the others have `first`."""
        return self._is_first

    async def first(self, request: web.Request) -> web.StreamResponse:
        """What the one at place 0 answers to a request, which may have a body. Raises Draining where it is not there."""
        headers = {name: request.headers[name] for name in (*_TO, *_OF_BODY) if name in request.headers}
        body = request.content if request.can_read_body else None
        try:
            async with self._sessions[0].request(
                request.method, f"http://sibling{request.raw_path}", headers=headers, data=body, allow_redirects=False
            ) as found:
                return await _passed(request, found)
        except (ClientError, OSError) as error:
            raise Draining("The API server that keeps files and batches is beginning or ending: ask again.") from error

    async def stream(self, request: web.Request, id_: str) -> web.StreamResponse | None:
        """The same of the stream of a response, behind the event that the client has."""
        async with self._first(request, "GET", f"/v1/responses/{id_}?stream=true", "answer") as found:
            return None if found is None or found.status != OK else await _passed(request, found)

    async def stored(self, request: web.Request, id_: str) -> bytes:
        """All that a sibling keeps of the response which has this id, or an item of this id; b"" for nothing."""
        async with self._first(request, "GET", f"/v1/responses/{id_}" if _ID.fullmatch(id_) else "", "stored") as found:
            return b"" if found is None or found.status != OK else await found.read()

    async def deleted(self, request: web.Request) -> bool:
        """Have all siblings delete what a request is about; returns whether one had it."""
        async with aclosing(self._answers(request, "DELETE", request.raw_path, "answer")) as answers:
            return OK in [answer.status async for answer in answers]

    @asynccontextmanager
    async def _first(self, request: web.Request, method: str, path: str, kind: str) -> AsyncIterator[ClientResponse | None]:
        async with aclosing(self._answers(request, method, path, kind)) as answers:
            yield await anext(answers, None)

    async def _answers(self, request: web.Request, method: str, path: str, kind: str) -> AsyncGenerator[ClientResponse]:
        """Those of siblings that have what a request is about."""
        headers = {name: request.headers[name] for name in _TO if name in request.headers} | {HEADER: kind}
        for session in self._sessions if path and not asked_by_sibling(request) else ():
            try:
                found = await session.request(method, f"http://sibling{path}", headers=headers, allow_redirects=False)
            except (ClientError, OSError):  # one that ends, or begins
                continue
            async with found:
                if found.status != ABSENT:
                    yield found


async def _passed(request: web.Request, found: ClientResponse) -> web.StreamResponse:
    headers = {name: found.headers[name] for name in _BACK if name in found.headers}
    response = web.StreamResponse(status=found.status, headers=headers)
    await response.prepare(request)
    try:
        async for data in found.content.iter_any():
            await response.write(data)
        await response.write_eof()
    except (ClientError, OSError) as error:
        if request.transport is not None:  # the client must not take half an answer for a whole one
            request.transport.abort()
        raise ClientGone from error
    return response


def asked_by_sibling(request: web.Request) -> str:
    """What a sibling asks for, "" where a client asks, whatever it says."""
    asking = request.transport.get_extra_info("socket") if request.transport else None
    return request.headers.get(HEADER, "") if asking is not None and asking.family == socket.AF_UNIX else ""


SIBLINGS = web.AppKey("siblings", Siblings)


async def close_siblings(app: web.Application) -> None:
    """For the end of the application."""
    await app[SIBLINGS].close()
