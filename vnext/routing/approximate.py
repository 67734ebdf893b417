"""Approximate prefix tree: what a server whose prefix cache cannot be seen has probably cached, from the texts sent to it.

A text is cut into pieces of PIECE_BYTES, and a piece is known by the hash of the text up to its end. A server's table of these
hashes is thus a tree whose edges are pieces, and what a text shares with any earlier one is a search in it. What was used
least recently is dropped, the end of a text before its beginning, so that each piece in the table follows another that is there.
Pure but for the table itself, which is mutable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

PIECE_BYTES = 64
"""About the text of a cache block of 16 tokens."""
BYTES_PER_TOKEN = 4
"""What a token of English text has, about; it scales all servers' figures alike."""
PIECES_MAX = 2**15
"""Of one server: 2 MiB of text, in about 6 MB of memory."""


def piece_hashes(text: bytes, root: bytes) -> list[int]:
    """The hashes of a text's whole pieces, each 64 bits. `root`: what keeps texts apart that share no cache block: the model and
    the cache salt."""
    last, found = xxh3_64_intdigest(root), []
    for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        last = xxh3_64_intdigest(text[start : start + PIECE_BYTES], seed=last)
        found.append(last)
    return found


class PrefixTree:
    """The pieces that one server has probably cached, `pieces_max` at most. Mutable."""

    def __init__(self, pieces_max: int = PIECES_MAX) -> None:
        self._pieces_max = pieces_max
        self._pieces: OrderedDict[int, None] = OrderedDict()  # what was used last stands last

    def __len__(self) -> int:
        return len(self._pieces)

    def matched(self, hashes: Sequence[int]) -> int:
        """How many leading pieces of a text are there."""
        low, high = 0, len(hashes)
        while low < high:  # a piece is there only if those before it are
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in self._pieces else (low, middle - 1)
        return low

    def insert(self, hashes: Sequence[int]) -> None:
        """A text was sent to the server."""
        for each in reversed(hashes[: self._pieces_max]):
            self._pieces[each] = None
            self._pieces.move_to_end(each)
        while len(self._pieces) > self._pieces_max:
            self._pieces.popitem(last=False)

    def clear(self) -> None:
        """The server has begun again, with an empty cache."""
        self._pieces.clear()
