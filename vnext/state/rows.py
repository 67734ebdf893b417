"""Rows: the running requests in running order, as the columns of one int64 matrix.

Owns the fields and their layout. One matrix means that a step copies one array, a finish compresses one array and a
digest reads one array. A matrix that a state holds is never written again.

Token positions of a request are half-open ranges, all counted from its first prompt token:
    [0, computed)                in the cache, or planned to be before the next step runs
    [computed, known)            token ids on hand, not yet computed
    [known, known + pending)     sampled by steps in flight; only the ranks know these yet
"""

from __future__ import annotations

import msgspec
import numpy as np

# Fields that decisions depend on; the digest reads these. TABLE_SUM stands for the block table (columns_numpy.mixed).
ID, KNOWN, COMPUTED, PENDING, LIMIT, BLOCKS, SEALED, PROMPT, EPOCH, PRIORITY, FLAGS, MIN_KNOWN, CACHED, TABLE_SUM = range(14)
STRUCTURE_FIELD_COUNT = 14
# Where things are stored, and names of contents: not the same in a log whose texts were replaced.
TOKENS_AT, TOKENS_SIZE, TABLE_AT, TABLE_SIZE, CHAIN_0, CHAIN_1 = range(14, 20)
FIELD_COUNT = 20

IGNORE_EOS = 1
OWN_STOPS = 2

FIELD_NAMES = (
    "id known computed pending limit blocks sealed prompt epoch priority flags min_known cached table_sum "
    "tokens_at tokens_size table_at table_size chain_0 chain_1"
).split()


class Rows(msgspec.Struct, frozen=True):
    """`cells` is int64[FIELD_COUNT, R]; a property is one field over all rows (a view, not to be written)."""

    cells: np.ndarray

    def __len__(self) -> int:
        return self.cells.shape[1]

    @property
    def id(self) -> np.ndarray:
        return self.cells[ID]

    @property
    def known(self) -> np.ndarray:
        """Tokens whose ids are part of the state."""
        return self.cells[KNOWN]

    @property
    def computed(self) -> np.ndarray:
        """Tokens that are in the cache once all planned steps have run."""
        return self.cells[COMPUTED]

    @property
    def pending(self) -> np.ndarray:
        """Tokens that steps in flight will have sampled."""
        return self.cells[PENDING]

    @property
    def limit(self) -> np.ndarray:
        """Known tokens at which the request has reached its length."""
        return self.cells[LIMIT]

    @property
    def blocks(self) -> np.ndarray:
        return self.cells[BLOCKS]

    @property
    def sealed(self) -> np.ndarray:
        """Leading blocks whose content is complete and named."""
        return self.cells[SEALED]

    @property
    def prompt(self) -> np.ndarray:
        return self.cells[PROMPT]

    @property
    def epoch(self) -> np.ndarray:
        """Times this request was preempted: the results of an earlier epoch's steps are dropped."""
        return self.cells[EPOCH]

    @property
    def table_sum(self) -> np.ndarray:
        """What stands for the block table in digests: the bits of a 64-bit sum."""
        return self.cells[TABLE_SUM]

    @property
    def tokens_at(self) -> np.ndarray:
        return self.cells[TOKENS_AT]

    @property
    def table_at(self) -> np.ndarray:
        return self.cells[TABLE_AT]

    def chain(self, row: int) -> bytes:
        """Key of the last sealed block of one row (16 bytes)."""
        return self.cells[CHAIN_0:, row].tobytes()


def no_rows() -> Rows:
    return Rows(np.empty((FIELD_COUNT, 0), dtype=np.int64))


def kept_rows(rows: Rows, keep: np.ndarray) -> Rows:
    """The rows where `keep` (bool[R]) says so. The matrix stays contiguous: the kernels of columns.py need that."""
    return Rows(np.compress(keep, rows.cells, axis=1))


def more_rows(rows: Rows, added: list[np.ndarray]) -> Rows:
    """The rows and these columns (int64[FIELD_COUNT] each) behind them; contiguous too."""
    cells = np.empty((FIELD_COUNT, len(rows) + len(added)), dtype=np.int64)
    cells[:, : len(rows)] = rows.cells
    cells[:, len(rows) :] = np.array(added).T
    return Rows(cells)


def find_rows(rows: Rows, ids: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """Row of each request of that epoch, -1 where it has gone (int64[n])."""
    count = len(ids)
    if count <= len(rows) and np.array_equal(rows.id[:count], ids) and np.array_equal(rows.epoch[:count], epochs):
        return np.arange(count)
    places = {(id_, epoch): row for row, (id_, epoch) in enumerate(zip(rows.id.tolist(), rows.epoch.tolist()))}
    return np.array([places.get(pair, -1) for pair in zip(ids.tolist(), epochs.tolist())], dtype=np.int64)


def wants(rows: Rows) -> np.ndarray:
    """Tokens each row could compute now. The token at its limit is never computed: nothing is sampled after it."""
    return np.minimum(rows.known + rows.pending, rows.limit - 1) - rows.computed
