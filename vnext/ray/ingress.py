"""The deployment in front of vnext's replicas in Ray Serve: it speaks HTTP, and an answer outlives the replica that gives it.

Owns each request until its end. One whose replica ends before the client has a byte is asked again, through the handle, by which
Serve's router chooses another replica, or waits for the one that Serve starts in place of the lost one. A stream goes on as behind
`vnext router` (gateway/outgoing.py): at a replica with the same fingerprint, from where the client is.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import NamedTuple, cast

import aiohttp
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import StreamingResponse

from vnext.gateway.asked import SEED_HEADER, Pairs, goes_on, read_asked
from vnext.gateway.continuing import SHOWN
from vnext.gateway.outgoing import CONTINUED_MAX, EVENTS, PAUSE_S, WHOLE_BYTES_MAX, Failed, Outgoing
from vnext.ray.routing import REQUEST_ID

WAIT_S = 120.0
"""For a replica that can go on with a stream: Serve may have to start one, and that one loads its model."""
_REPLICA_ERRORS = (RayActorError, aiohttp.ClientError, OSError)

log = logging.getLogger("ray.serve")


class Head(NamedTuple):
    """The beginning of a replica's answer. `size`: of the body in bytes, None where it is not known before its end. `fingerprint`:
    equal for replicas that compute the same tokens, "" where tokens depend on the batch."""

    status: int
    headers: Pairs
    size: int | None
    fingerprint: str


class Answer:
    """An answer in its two stages: `head` once, and then `body`. To be closed, also before its end."""

    def __init__(self, parts: AsyncGenerator[Head | bytes, None]) -> None:
        self._parts = parts

    async def head(self) -> Head:
        head = await anext(self._parts)
        assert isinstance(head, Head)
        return head

    async def body(self) -> AsyncGenerator[bytes, None]:
        """In pieces as they come."""
        async for part in self._parts:
            assert isinstance(part, bytes)
            yield part

    async def aclose(self) -> None:
        await self._parts.aclose()


class Ingress:
    """The deployment that HTTP requests reach. It reads a request's body, which the router needs."""

    def __init__(self, servers: DeploymentHandle[object]) -> None:
        self._servers = servers.options(stream=True, method_name="ask")

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = {REQUEST_ID: uuid.uuid4().hex, **request.headers}
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        answer = Passing(self._servers, request.method, path, request.url.query, headers, await request.body()).answer()
        head = await answer.head()
        response = StreamingResponse(answer.body(), head.status)
        response.raw_headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in head.headers]
        return response


class Passing:
    """One request and its answer, from one replica after the other. Mutable."""

    def __init__(
        self, servers: DeploymentHandle[object], method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        self._asked = read_asked(path, body, headers.get("content-type", "").partition(";")[0].strip().endswith("json"))
        self._seed = None if goes_on(headers) else self._asked.draw_seed()
        self._servers, self._path = servers, path
        self._call = method, f"{path}?{query}" if query else path, dict(headers), self._asked.with_seed(self._seed)
        self._out: Outgoing | None = None
        self._failures = 0
        self._until_s: float | None = None  # when a stream is given up, in the loop's time; None while a replica has it

    def answer(self) -> Answer:
        """Raises Failed where no replica has answered, or not to the end of what is no stream."""
        return Answer(self._answer())

    async def _answer(self) -> AsyncGenerator[Head | bytes, None]:
        while True:
            try:
                async with aclosing(self._through()) as parts:
                    async for part in parts:
                        yield part
                return
            except Failed as failure:
                await self._failed(failure)
            if self._out is not None and not self._may_go_on(self._out):
                yield self._out.lost()
                return

    async def _through(self) -> AsyncGenerator[Head | bytes, None]:
        """What the client lacks of one replica's answer. Raises Failed."""
        async with aclosing(Answer(self._ask())) as answer:
            head = await self._head(answer)
            if self._out is None and head.size is not None and head.size <= WHOLE_BYTES_MAX:
                body = b"".join([part async for part in answer.body()])
                yield head
                yield body
                return
            if self._out is None:
                self._out = self._begin(head)
                yield head
            self._until_s = None
            async for part in answer.body():
                for data in filter(None, self._out.take(part)):
                    yield data
            yield self._out.end()

    async def _ask(self) -> AsyncGenerator[Head | bytes, None]:
        """The whole answer of the replica that Serve's router chooses. Raises Failed."""
        called = self._servers.remote(*self._call, self._out.fingerprint if self._out else "")
        answer = cast("DeploymentResponseGenerator[Head | bytes]", called)
        try:
            async for part in answer:
                yield part
        except _REPLICA_ERRORS as error:
            raise Failed("broken", f"it has ended, or its API server has: {type(error).__name__}") from error
        except RayServeException as error:
            if self._out is None:
                raise
            raise Failed("refused", f"Serve has none: {error}") from error
        finally:
            answer.cancel()  # ends the replica's work where it has not answered to the end

    async def _head(self, answer: Answer) -> Head:
        """The beginning of an answer, which can go on with the stream if there is one. Raises Failed."""
        try:
            async with asyncio.timeout_at(self._until_s):
                head = await answer.head()
        except TimeoutError:
            raise Failed("refused", "no replica answers") from None
        if self._out is not None and (head.status != 200 or head.fingerprint != self._out.fingerprint):
            raise Failed("refused", f"it answers with status {head.status} and computes as {head.fingerprint}")
        return head

    def _begin(self, head: Head) -> Outgoing:
        if self._seed is not None:
            head.headers.append((SEED_HEADER, str(self._seed)))
        is_followed = self._asked.is_stream and head.status == 200 and ("content-type", EVENTS) in map(_plain, head.headers)
        return Outgoing(SHOWN[self._path]() if is_followed else None, head.fingerprint)

    async def _failed(self, failure: Failed) -> None:
        """Take in a replica's failure. Raises it where nothing can follow."""
        log.warning("A replica fails request %s: %s", self._call[2][REQUEST_ID], failure)
        if self._out is None:
            self._failures += 1
        elif self._out.shown is None:
            raise failure
        elif failure.reason != "refused":
            self._out.move(failure)
            self._until_s = asyncio.get_running_loop().time() + WAIT_S
        if self._failures > CONTINUED_MAX:
            raise failure
        await asyncio.sleep(PAUSE_S)

    def _may_go_on(self, out: Outgoing) -> bool:
        return out.can_go_on and (self._until_s is None or asyncio.get_running_loop().time() < self._until_s)


def _plain(header: tuple[str, str]) -> tuple[str, str]:
    """A header without its parameters."""
    return header[0].lower(), header[1].partition(";")[0]
