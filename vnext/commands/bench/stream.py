"""Stream: parses server-sent events as they come from a socket, and counts the tokens of each read.

One read may contain several chunks and one chunk several tokens, so the count comes from the server: in each chunk
(`continuous_usage_stats`), or at the end, if that equals one token per chunk. Otherwise the times of tokens are unknown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from vnext.commands.bench.figures import Piece

DATA_PREFIX = b"data:"
LAST_DATA = b"[DONE]"


class _Read(NamedTuple):
    at_s: float
    chunks: int
    total: int | None


class Stream:
    """Takes the bytes of one answer; `pieces`, `token_count` and `error` once it has ended."""

    def __init__(self) -> None:
        self._rest = b""
        self._reads: list[_Read] = []
        self._total: int | None = None
        self.error = ""

    def read(self, data: bytes, at_s: float) -> None:
        """Take in the bytes of one read. Raises msgspec.DecodeError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [chunk for line in lines if (chunk := chunk_of(line)) is not None]
        totals = [usage["completion_tokens"] for chunk in found if (usage := chunk.get("usage"))]
        self._total = max(totals, default=self._total)
        self.error = self.error or next((str(chunk["error"]) for chunk in found if chunk.get("error")), "")
        if chunks := sum(bool(chunk.get("choices")) for chunk in found):
            self._reads.append(_Read(at_s, chunks, max(totals, default=None)))

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
        totals = [read.total for read in self._reads]
        if None not in totals:
            return [total - before for total, before in zip(totals, [0, *totals])]
        chunks = [read.chunks for read in self._reads]
        return chunks if sum(chunks) == self._total else None


def chunk_of(line: bytes) -> dict[str, Any] | None:
    """The object in one line of a stream, None in lines without one."""
    data = line[len(DATA_PREFIX) :].strip() if line.startswith(DATA_PREFIX) else b""
    return msgspec.json.decode(data) if data and data != LAST_DATA else None
