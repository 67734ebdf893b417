"""BlockingClient: the same client for a program that does one thing at a time, without asyncio and aiohttp."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from vnext.commands.bench.load.answers import Chunk, RequestFailed, refused
from vnext.commands.bench.load.events import ChunkReader

READ_BYTES = 1 << 16
T = TypeVar("T")
HERE = ("127.0.0.1", "localhost", "::1")


class BlockingClient:
    """A connection for each request. Its calls raise RequestFailed. `url` may lack its http://.

    Proxies are those of the environment, and none for this machine. `timeout_s` is of each wait for the server.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * is_here(self.url))

    def ask(self, path: str, body: Mapping[str, object] | None, of: type[T]) -> T:
        """The object of an answer: of a POST where there is a body."""
        with failures():
            return msgspec.json.decode(self.read(path, body), type=of)

    def read(self, path: str, body: Mapping[str, object] | None = None) -> bytes:
        with failures(), self._open(path, body) as response:
            return response.read()

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[Chunk]:
        """The chunks of a streamed answer, as they come; it raises where the stream does not end in order."""
        reader = ChunkReader()
        with failures(), self._open(path, body) as response:
            while data := response.read1(READ_BYTES):
                yield from reader.read(data)
        reader.end()

    def _open(self, path: str, body: Mapping[str, object] | None) -> http.client.HTTPResponse:
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        data = msgspec.json.encode(body) if body is not None else None
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
            return response
        except urllib.error.HTTPError as error:
            raise refused(error.code, error.read()) from error


def is_here(url: str) -> bool:
    return urlsplit(url).hostname in HERE


@contextmanager
def failures() -> Iterator[None]:
    """What goes wrong on the way as RequestFailed."""
    try:
        yield
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        kind = "timeout" if isinstance(error, TimeoutError) else "connect" if isinstance(error, urllib.error.URLError) else "broken"
        inner = getattr(error, "reason", error)  # of a URLError, which would say <urlopen error ...>
        raise RequestFailed(kind, getattr(inner, "strerror", None) or str(inner) or type(error).__name__) from error
