"""Open blocks in numpy: the plain form, which defines each method. Tests compare `_open_blocks.c` with it.

Owns the unfinished block of each live request: its secret, the running sum over it, its tokens. Mutable: a commit's
tokens are appended in order. pseudonyms.py has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vnext.log import log_plain, pseudonyms
from vnext.state.events import pack_tokens, unpack_tokens

OPEN_BLOCKS_MIN = 64
Samples = tuple[np.ndarray, np.ndarray, bytes, np.ndarray]
"""Those of a step, as `OpenBlocks.commit` takes them: the ids of all rows, the row of each, its tokens, and whether it ends."""


class OpenBlocks:
    """The open blocks of one engine's requests. `key` has 16 bytes; pseudonyms are in [base, 2 base)."""

    def __init__(self, key: bytes, block_size: int, base: int) -> None:
        is_power = base > 3 and base.bit_count() == 1 and base.bit_length() % 2 == 1
        if len(key) != pseudonyms.KEY_SIZE_BYTES or block_size < 1 or not is_power:
            raise ValueError("a key has 16 bytes, a block at least one token; the base is a power of four")
        self._key = key
        self._block_size = block_size
        self._base = base
        self._places: dict[int, int] = {}
        self._free = list(range(OPEN_BLOCKS_MIN))
        self._secrets = np.zeros((OPEN_BLOCKS_MIN, 2), dtype=np.uint64)
        self._sums = np.zeros(OPEN_BLOCKS_MIN, dtype=np.uint64)
        self._counts = np.zeros(OPEN_BLOCKS_MIN, dtype=np.int64)
        self._tokens = np.zeros((OPEN_BLOCKS_MIN, block_size), dtype="<i4")

    def __len__(self) -> int:
        return len(self._places)

    def ids(self) -> list[int]:
        """Requests that have an open block, in no order."""
        return list(self._places)

    def arrive(self, request_id: int, secret: bytes, tokens: bytes) -> bytes:
        """Add a request with its root secret and its prompt (int32 bytes). Returns the prompt's pseudonyms."""
        if request_id < 0 or request_id in self._places:
            raise ValueError(f"request {request_id} has a tail already")
        shaped, last, running_sum = self._walk(secret, tokens)
        if not self._free:
            self._grow()
        rest = unpack_tokens(tokens)[len(tokens) // 4 // self._block_size * self._block_size :]
        place = self._places[request_id] = self._free.pop()
        self._secrets[place], self._sums[place], self._counts[place] = last, running_sum, len(rest)
        self._tokens[place, : len(rest)] = rest
        return shaped

    def history(self, secret: bytes, tokens: bytes) -> bytes:
        """The pseudonyms of a whole history (int32 bytes) with this root secret. Adds no open block."""
        return self._walk(secret, tokens)[0]

    def commit(
        self, ids: np.ndarray, rows: np.ndarray, tokens: bytes, samples: np.ndarray | None, stopped: np.ndarray
    ) -> bytes:
        """A step's samples as int32 bytes: each of `rows` takes the token at its index in `samples` (None: in order).

        `ids` int64[R] are the requests of all rows. A token that `stopped` (bool[n]) its request is unchanged, every
        other becomes its pseudonym, and one that no row takes becomes `base`. KeyError for a request without an open
        block.
        """
        sampled = unpack_tokens(tokens)
        samples = np.arange(len(sampled)) if samples is None else samples
        if not len(rows) == len(samples) <= len(stopped):
            raise ValueError("a commit's columns do not fit each other")
        places = np.array([self._places[id_] for id_ in ids[rows].tolist()], dtype=np.int64)
        shaped = np.full(len(sampled), self._base, dtype=np.int32)
        taken = sampled[samples]
        shaped[samples] = np.where(stopped[: len(rows)], taken, self._take(places, taken))
        return pack_tokens(shaped)

    def put_steady(
        self, frame: bytearray, first_event: int, committed: int, planned: int, width: int, samples: Samples
    ) -> bool:
        """`commit`, and its frame as log_plain.put_steady makes it.

        False, with nothing done, unless each of the step's tokens has its row, none ends its request and all pseudonyms fit.
        """
        ids, rows, tokens, stopped = samples
        count = len(tokens) // 4
        if 8 * width < self._base.bit_length() or not len(rows) == len(stopped) == count or stopped.any():
            return False
        shaped = self.commit(ids, rows, tokens, None, stopped)
        return log_plain.put_steady(frame, first_event, committed, shaped, planned, width)

    def forget(self, ids: Sequence[int]) -> None:
        """Remove requests that have ended. KeyError for one without an open block; those before it are removed."""
        for request_id in ids:
            self._free.append(self._places.pop(request_id))

    def _walk(self, secret: bytes, tokens: bytes) -> tuple[bytes, np.ndarray, np.uint64]:
        """A history's pseudonyms, the secret of its last, unfinished block, and the running sum over that block."""
        if len(secret) != pseudonyms.SECRET_SIZE_BYTES or len(tokens) % 4:
            raise ValueError("a secret has 16 bytes and a token has 4")
        secrets = pseudonyms.words(pseudonyms.block_secrets(self._key, secret, tokens, self._block_size))
        shaped, running_sum = pseudonyms.pseudonyms(secrets, unpack_tokens(tokens), self._block_size, self._base)
        return pack_tokens(shaped), secrets[-1], running_sum

    def _grow(self) -> None:
        size = len(self._sums)
        for name in ("_secrets", "_sums", "_counts", "_tokens"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self._free.extend(range(size, 2 * size))

    def _take(self, places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append one token to each of these open blocks (int64[n], int32[n]); returns the tokens' pseudonyms (int32[n])."""
        secrets, sums, counts = self._secrets[places], self._sums[places], self._counts[places]
        within = counts.astype(np.uint64)
        replaced = pseudonyms.permuted(secrets, within, sums, tokens, self._base)
        self._sums[places] = sums + pseudonyms.absorbed(secrets, within, tokens)
        self._tokens[places, counts] = tokens
        self._counts[places] = counts + 1
        full = places[counts + 1 == self._block_size]
        if len(full):
            self._next_blocks(full)
        return replaced

    def _next_blocks(self, places: np.ndarray) -> None:
        """Start the next blocks of those at `places`, which are full."""
        parents, blocks = self._secrets[places].tobytes(), self._tokens[places].tobytes()
        size, width = pseudonyms.SECRET_SIZE_BYTES, 4 * self._block_size
        self._secrets[places] = pseudonyms.words([
            pseudonyms.child_secret(self._key, parents[size * n : size * (n + 1)], blocks[width * n : width * (n + 1)])
            for n in range(len(places))
        ])  # fmt: skip
        self._sums[places], self._counts[places] = 0, 0
