"""Client: an HTTP client of one server, on asyncio."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import aiohttp
import msgspec

from vnext.commands.bench.load.answers import Chunk, RequestFailed, refused
from vnext.commands.bench.load.events import ChunkReader

JSON = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"
Body = Mapping[str, object] | bytes | None
T = TypeVar("T")


class Client:
    """As many connections to one server as there are requests. A context manager. Its calls raise RequestFailed.

    A body is an object, which is sent as JSON, or bytes that are JSON already. `timeout_s` is of a whole request, 0 for no limit.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 0.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        timeout, connector = aiohttp.ClientTimeout(total=self._timeout_s or None), aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    @asynccontextmanager
    async def asking(
        self, path: str, body: Body = None, headers: Mapping[str, str] | None = None, timeout_s: float = 0.0
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The beginning of an answer of any status: of a POST where there is a body."""
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s or None)
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        own = {} if data is None else JSON
        asked = self.session.request(
            "GET" if data is None else "POST", self.url + path, data=data, headers=own | dict(headers or {}), timeout=timeout
        )
        with failures():
            async with asked as response:
                yield response

    async def answer(self, path: str, body: Body = None, timeout_s: float = 0.0) -> tuple[int, bytes]:
        """Status and body of an answer of any status."""
        async with self.asking(path, body, timeout_s=timeout_s) as response:
            return response.status, await response.read()

    async def ask(self, path: str, body: Body, of: type[T]) -> T:
        """The object of an answer whose status is 200."""
        status, data = await self.answer(path, body)
        if status != 200:
            raise refused(status, data)
        if data.lstrip().startswith(b"<"):
            raise RequestFailed("broken", "its answer is a page of HTML")
        with failures():
            return msgspec.json.decode(data, type=of)

    async def stream(self, path: str, body: Body) -> AsyncIterator[Chunk]:
        """The chunks of a streamed answer, as they come; it raises where the stream does not end in order."""
        reader = ChunkReader()
        async with self.asking(path, body) as response:
            if response.status != 200:
                raise refused(response.status, await response.read())
            async for data in response.content.iter_any():
                for chunk in reader.read(data):
                    yield chunk
        reader.end()

    async def token_ids(self, body: Mapping[str, object]) -> list[int]:
        """The ids of all tokens of a streamed completion."""
        asked = {**body, "stream": True, "return_token_ids": True}
        return [token async for chunk in self.stream(COMPLETIONS, asked) for token in chunk.token_ids]


@contextmanager
def failures() -> Iterator[None]:
    """What goes wrong on the way as RequestFailed."""
    try:
        yield
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestFailed(kind_of(error), words_of(error)) from error


def words_of(error: Exception) -> str:
    """What went wrong on the way, as the system says it where no connection was made."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if isinstance(cause, ssl.SSLError):  # its number is not the system's
        return f"TLS: {cause.reason.replace('_', ' ').lower()}"
    if cause is not None and cause.errno and cause.strerror:
        return os.strerror(cause.errno) if cause.errno > 0 else cause.strerror  # a name that is not found has a number below 0
    return str(error) or type(error).__name__


def kind_of(error: Exception) -> str:
    """The kind of a failure on the way."""
    if isinstance(error, TimeoutError):
        return "timeout"
    is_unmade = isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError)
    return "connect" if is_unmade else "broken"
