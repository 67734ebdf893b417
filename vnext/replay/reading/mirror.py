"""The mirror: copies the newest part of a running server's log over HTTP into a folder, so that it can be followed
there.

Owns the requests to the server and the bounds of the copy: one part of a segment per answer, and the newest
SEGMENTS_KEPT segments. It only reads from the server. It copies the segments' bytes, so every log tool works on the
copy.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from vnext.base.spelling import reason
from vnext.log.codec import segment_name
from vnext.replay.reading.source import UnusableLog

TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 1 << 22
PARTS_MAX = 16
"""Answers taken in one `pull`, so that the page shows new data before all of it has arrived."""
SEGMENTS_KEPT = 4


class Silent(Exception):
    """The server did not answer this time; the message is one sentence."""


class Lost(Exception):
    """The log cannot be followed any further; the message is one sentence."""


class Listing(msgspec.Struct, frozen=True):
    """A server's description of its log: the name, the segments as (number, bytes), and the most bytes of one answer."""

    log: str
    segments: list[tuple[int, int]]
    part: int


class Mirror:
    """A server's log from its newest segment on, as files in `folder`. Mutable: `pull` copies new data."""

    def __init__(self, url: str, key: str, folder: Path) -> None:
        """Raises UnusableLog if there is no vnext server at the URL, or it shows no log."""
        self.url = url.rstrip("/")
        self._key, self._folder = key, folder
        self._connect = _connector(url)
        try:
            self._listing = self._list()
            if not self._listing.segments:
                raise UnusableLog(f"the log of {self.url} has no segment yet: try again")
            self.name = self._listing.log
            self._segment, self._size = self._listing.segments[-1][0], 0
            self._file = (folder / segment_name(self._segment)).open("wb")
            self.pull()
        except (Silent, Lost) as error:
            raise UnusableLog(str(error)) from error

    def pull(self) -> bool:
        """Copy new data, at most a few parts; returns whether there is more. Raises Silent or Lost."""
        self._listing = self._list()
        if self._listing.log != self.name:
            raise Lost(f"another engine runs at {self.url} now: open its page anew")
        sizes = dict(self._listing.segments)
        for _ in range(PARTS_MAX):
            if self._segment not in sizes:
                raise Lost(
                    f"{self.url} writes its log faster than it was read here, and has deleted what comes next: begin anew"
                )
            if self._size < sizes[self._segment]:
                self._take()
            elif self._segment + 1 in sizes:
                self._next()
            else:
                return False
        return True

    def close(self) -> None:
        self._file.close()

    # ---- one answer ----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        status, data = self._ask(f"/log/{self._segment}?offset={self._size}")
        if status == http.HTTPStatus.GONE:
            self._listing = msgspec.structs.replace(self._listing, segments=[])
            raise Lost(f"{self.url} has deleted segment {self._segment} before it was read here: begin anew")
        if status != http.HTTPStatus.OK:
            raise Silent(f"{self.url} answers {_words(status, data)}")
        if not data:
            raise Lost(f"{self.url} has taken back what it had written: its disk fails")
        self._file.write(data)
        self._file.flush()
        self._size += len(data)

    def _next(self) -> None:
        self._file.close()
        self._segment, self._size = self._segment + 1, 0
        self._file = (self._folder / segment_name(self._segment)).open("wb")
        for path in self._folder.glob(f"{Path(segment_name(self._segment - SEGMENTS_KEPT)).stem}.*"):
            path.unlink(missing_ok=True)  # delete the segment and everything derived from it

    def _list(self) -> Listing:
        status, data = self._ask("/log")
        if status == http.HTTPStatus.OK:
            try:
                return _listing_decoder.decode(data)
            except (ValueError, RecursionError) as error:
                raise Lost(f"{self.url} is no vnext server: it answers /log with something else ({error})") from error
        if status in (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE):
            raise Silent(f"{self.url} answers {_words(status, data)}")
        raise Lost(self._refusal(status, data))

    def _refusal(self, status: int, data: bytes) -> str:
        if status == http.HTTPStatus.NOT_FOUND:
            return f"{self.url} is no vnext server that can show its log: there is nothing at {self.url}/log"
        if status == http.HTTPStatus.UNAUTHORIZED:
            return f"{self.url} asks for its API key: give it as VNEXT_API_KEY or with --api-key"
        return f"{self.url} answers {_words(status, data)}"

    def _ask(self, path: str) -> tuple[int, bytes]:
        """Status and body. Follows no redirect: the key is for this server alone."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connection = self._connect()
        try:
            connection.request("GET", urlsplit(self.url).path + path, headers=headers)
            answer = connection.getresponse()
            data = answer.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise Silent(f"nobody answers at {self.url} ({reason(error)})") from error
        finally:
            connection.close()
        return answer.status, data


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _Failed(msgspec.Struct):
    error: _ErrorBody


_listing_decoder, _failed_decoder = msgspec.json.Decoder(Listing), msgspec.json.Decoder(_Failed)


def _words(status: int, data: bytes) -> str:
    """The server's own error message, if the answer has our error format."""
    try:
        return f"{status}: {_failed_decoder.decode(data).error.message}"
    except (ValueError, RecursionError):
        return f"{status}, which is no answer of a vnext server"


def _connector(url: str) -> Callable[[], http.client.HTTPConnection]:
    """The function that opens a connection to a URL. Raises UnusableLog if the URL is not supported."""
    parts = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in kinds or not parts.hostname or port == -1 or parts.query or parts.fragment:
        raise UnusableLog(f"{url} is no address of a server: write it as http://127.0.0.1:8000")
    kind, host = kinds[parts.scheme], parts.hostname
    return lambda: kind(host, port, timeout=TIMEOUT_S)
