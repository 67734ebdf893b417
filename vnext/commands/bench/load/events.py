"""Server-sent events as their bytes come from a socket, and the tokens that each read of them brings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from vnext.commands.bench.load.answers import Chunk, RequestFailed, chunk_of, decode_chunk, error_of

LAST_DATA = b"[DONE]"
NO_END = "the stream ended without its last event"
LAST_NAMES = (b"message_stop", b"response.completed", b"response.incomplete")
"""Events that end a stream of /v1/messages or /v1/responses."""


class Event(NamedTuple):
    """One event. `name` and `id` are b"" where it has none."""

    data: bytes
    name: bytes = b""
    id: bytes = b""

    @property
    def is_last(self) -> bool:
        """Whether the stream ends in order with this event."""
        return self.data == LAST_DATA or self.name in LAST_NAMES


class EventReader:
    """Splits the bytes of one stream into its events. Mutable."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._fields: dict[bytes, bytes] = {}

    def read(self, data: bytes) -> list[Event]:
        """Take in the bytes of one read; returns the events that are complete with them. Comments are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> Event | None:
        name, colon, value = line.removesuffix(b"\r").partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name:
            self._fields[name] = value.removeprefix(b" ")
        elif not colon and self._data:  # the empty line that ends an event
            event = Event(b"\n".join(self._data), self._fields.get(b"event", b""), self._fields.get(b"id", b""))
            self._data, self._fields = [], {}
            return event
        return None


class ChunkReader:
    """The chunks of one streamed answer from its reads. Mutable."""

    def __init__(self) -> None:
        self._reader, self._has_ended = EventReader(), False

    def read(self, data: bytes) -> Iterator[Chunk]:
        """The chunks that are complete with this read, which came now. Raises RequestFailed for an error in place of one, and
        DecodeError."""
        at_s = time.perf_counter()
        for event in self._reader.read(data):
            self._has_ended = self._has_ended or event.is_last
            if event.data != LAST_DATA:
                yield chunk_of(at_s, event.data)

    def end(self) -> None:
        """The connection is closed. Raises RequestFailed where the last event is missing."""
        if not self._has_ended:
            raise RequestFailed("cut", NO_END)


class Piece(msgspec.Struct, frozen=True):
    """One read of a stream: its time (seconds of one clock) and its tokens, None where the server did not report them."""

    at_s: float
    tokens: int | None


class _Read(NamedTuple):
    at_s: float
    chunks: int
    total: int | None


class Stream:
    """Counts the tokens of each read of one answer: `pieces`, `token_count`, `text` and `error` once it has ended. Mutable.

    One read may contain several chunks and one chunk several tokens, so the count comes from the server: in each chunk
    (`continuous_usage_stats`), or at the end, if that equals one token per chunk. Otherwise the times of tokens are unknown.
    """

    def __init__(self) -> None:
        self._reader = EventReader()
        self._reads: list[_Read] = []
        self._total: int | None = None
        self._texts: list[str] = []
        self.prompt_tokens = 0
        self.error = ""
        self._has_ended = False

    def read(self, data: bytes, at_s: float) -> None:
        """Take in the bytes of one read. Raises msgspec.DecodeError."""
        chunks, total = 0, None
        for event in self._reader.read(data):
            if event.data == LAST_DATA:
                self._has_ended = True
                continue
            chunk = decode_chunk(event.data)
            self.error = self.error or error_of(chunk)
            if usage := chunk.counted:
                total = max(total or 0, usage.written)
                self.prompt_tokens = max(self.prompt_tokens, usage.read)
            if event.name in LAST_NAMES or any(choice.finish_reason for choice in chunk.choices or ()):
                self._has_ended = True
            if chunk.has_tokens:
                chunks += 1
                self._texts.append(chunk.text)
        self._total = self._total if total is None else total
        if chunks:
            self._reads.append(_Read(at_s, chunks, total))

    def read_whole(self, data: bytes, at_s: float) -> None:
        """Take in an answer that is no stream and has no tokens. Raises msgspec.DecodeError."""
        found = decode_chunk(data)
        self.prompt_tokens = found.usage.read if found.usage else 0
        self._reads.append(_Read(at_s, 0, None))
        self._has_ended = True

    def failure(self, content_type: str) -> RequestFailed | None:
        """Why this is no answer, now that it has been read to its end."""
        if self.error:
            return RequestFailed("error event", self.error)
        if not self._reads:
            return RequestFailed("empty", f"the answer has no token (it is {content_type})")
        return None if self._has_ended else RequestFailed("cut", NO_END)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def token_count(self) -> int:
        """Tokens of the answer, or its chunks where the server does not report tokens."""
        return sum(read.chunks for read in self._reads) if self._total is None else self._total

    def pieces(self) -> tuple[Piece, ...]:
        """The reads that brought tokens."""
        counts = self._counts()
        if counts is None:
            return tuple(Piece(read.at_s, None) for read in self._reads)
        return tuple(Piece(read.at_s, count) for read, count in zip(self._reads, counts) if count)

    def _counts(self) -> list[int] | None:
        """Tokens of each read."""
        totals = [read.total for read in self._reads if read.total is not None]
        if len(totals) == len(self._reads):
            return [total - before for total, before in zip(totals, [0, *totals])]
        chunks = [read.chunks for read in self._reads]
        return chunks if sum(chunks) == self._total else None
