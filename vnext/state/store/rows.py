"""Rows: the running requests in running order, as the columns of one int64 matrix.

Owns the operations on the matrix (fields.py lists its lines). With one matrix, a step copies one array, a finish
compresses one array and a digest reads one array. The matrix of a state is never written again.

Token positions of a request are half-open ranges, counted from its first prompt token:
    [0, computed)                   in the cache, or planned to be before the next step runs
    [computed, known)               token ids are known, but not yet computed
    [known, known + placeholders)   sampled by steps in flight; only the ranks know these yet
With speculation, `computed` and `placeholders` count every draft in flight as kept; a commit takes back the drafts that
were not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from vnext.state.store.fields import (
    BLOCK_HASH_0,
    BLOCKS,
    CACHED,
    COMPUTED,
    DRAFTING_FIELD_COUNT,
    FIELD_COUNT,
    HASHED_BLOCKS,
    ID,
    KNOWN,
    LIMIT,
    NEW_ROW,
    PLACEHOLDERS,
    PREEMPTION_COUNT,
    PROMPT,
    RECURRENT_FIELD_COUNT,
    TABLE_AT,
    TABLE_HASH,
    TENTATIVE,
    TOKENS_AT,
)


class Line:
    """One line of a matrix of the struct that has it, as an attribute: a view over all columns, not to be written."""

    def __init__(self, matrix: str, place: int) -> None:
        self._matrix, self._place = matrix, place

    def __get__(self, owner: object, kind: type) -> np.ndarray:
        line: np.ndarray = getattr(owner, self._matrix)[self._place]
        return line


class Rows(msgspec.Struct, frozen=True):
    """`cells` is int64[FIELD_COUNT, R], of which each Line is one field.

    `drafting` int64[2, R] has the fields of vnext/state/drafting.py; None without speculation.
    `recurrent` int64[5, R] has those of vnext/state/recurrent.py; None without recurrent layers.
    """

    cells: np.ndarray
    drafting: np.ndarray | None = None
    recurrent: np.ndarray | None = None

    def __len__(self) -> int:
        return self.cells.shape[1]

    id = Line("cells", ID)
    known = Line("cells", KNOWN)
    """Tokens whose ids are part of the state."""
    computed = Line("cells", COMPUTED)
    """Tokens that are in the cache once all planned steps have run."""
    placeholders = Line("cells", PLACEHOLDERS)
    """Tokens that steps in flight will have sampled."""
    limit = Line("cells", LIMIT)
    """The number of known tokens at which the request ends."""
    blocks = Line("cells", BLOCKS)
    hashed_blocks = Line("cells", HASHED_BLOCKS)
    """The number of leading blocks that are full and hashed."""
    prompt = Line("cells", PROMPT)
    cached = Line("cells", CACHED)
    """Prompt tokens that the prefix cache had when the request was first admitted."""
    preemption_count = Line("cells", PREEMPTION_COUNT)
    """The number of times this request was preempted. Results of steps planned before its last preemption are dropped."""
    table_hash = Line("cells", TABLE_HASH)
    """The hash of the block table that digests read: the bits of a 64-bit sum."""
    tokens_at = Line("cells", TOKENS_AT)
    table_at = Line("cells", TABLE_AT)

    @property
    def computed_at_least(self) -> np.ndarray:
        """Tokens that are in the cache once all planned steps have run, even if no draft in flight is kept."""
        return self.computed if self.drafting is None else self.computed - self.drafting[TENTATIVE]

    def block_hash(self, row: int) -> bytes:
        """The hash of the last hashed block of one row (16 bytes)."""
        return self.cells[BLOCK_HASH_0:, row].tobytes()


def no_rows(speculates: bool = False, recurs: bool = False) -> Rows:
    drafting = np.empty((DRAFTING_FIELD_COUNT, 0), dtype=np.int64) if speculates else None
    recurrent = np.empty((RECURRENT_FIELD_COUNT, 0), dtype=np.int64) if recurs else None
    return Rows(np.empty((FIELD_COUNT, 0), dtype=np.int64), drafting, recurrent)


def without_rows(rows: Rows, gone: Sequence[int]) -> Rows:
    """The other rows. The matrix stays contiguous, as the kernels of columns.py require."""
    keep = np.ones(len(rows), dtype=bool)
    keep[list(gone)] = False
    drafting = None if rows.drafting is None else np.compress(keep, rows.drafting, axis=1)
    recurrent = None if rows.recurrent is None else np.compress(keep, rows.recurrent, axis=1)
    return Rows(np.compress(keep, rows.cells, axis=1), drafting, recurrent)


def more_rows(rows: Rows, added: list[np.ndarray], recurrent: list[np.ndarray]) -> Rows:
    """The rows followed by these columns (int64[FIELD_COUNT] each), and those of their second matrix where rows have one. The
    matrix stays contiguous."""
    cells = np.empty((FIELD_COUNT, len(rows) + len(added)), dtype=np.int64)
    cells[:, : len(rows)] = rows.cells
    cells[:, len(rows) :] = np.array(added).T
    states = None if rows.recurrent is None else np.concatenate((rows.recurrent, np.array(recurrent).T), axis=1)
    if rows.drafting is None:
        return Rows(cells, None, states)
    new = np.tile(np.array(NEW_ROW, dtype=np.int64)[:, None], len(added))
    return Rows(cells, np.concatenate((rows.drafting, new), axis=1), states)


def find_rows(rows: Rows, ids: np.ndarray, preemptions: np.ndarray) -> np.ndarray:
    """The row of each request with this preemption count, -1 if it has left (int64[n])."""
    count = len(ids)
    if (
        count <= len(rows)
        and np.array_equal(rows.id[:count], ids)
        and np.array_equal(rows.preemption_count[:count], preemptions)
    ):
        return np.arange(count)
    places = {
        (id_, preemptions): row
        for row, (id_, preemptions) in enumerate(zip(rows.id.tolist(), rows.preemption_count.tolist()))
    }
    return np.array([places.get(pair, -1) for pair in zip(ids.tolist(), preemptions.tolist())], dtype=np.int64)


def wants(rows: Rows) -> np.ndarray:
    """The number of tokens that each row could compute now. The token at its limit is never computed, because nothing is
    sampled after it.
    """
    return np.minimum(rows.known + rows.placeholders, rows.limit - 1) - rows.computed
