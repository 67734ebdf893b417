"""Columns in numpy: the arithmetic of one step over the rows, the plain form that says what each function means.

`_columns.c` is the compiled twin; tests hold the two equal on every call of seeded runs. `out` arguments are filled,
everything else is read. Cells are int64[FIELD_COUNT, R] as in rows.py.
"""

from __future__ import annotations

import numpy as np

from vnext.state import rows as columns


def expected(cells: np.ndarray, out_tokens: np.ndarray, budget: int, threshold: int) -> int:
    """New tokens of each row (int64[R]): what it wants, under the threshold (0: none) and the budget; their sum."""
    wants = np.minimum(cells[columns.KNOWN] + cells[columns.PENDING], cells[columns.LIMIT] - 1) - cells[columns.COMPUTED]
    if threshold:
        wants = np.minimum(wants, threshold)
    ends = np.cumsum(wants)
    out_tokens[:] = np.clip(budget - (ends - wants), 0, wants)
    return int(out_tokens.sum())


def needed(cells: np.ndarray, tokens: np.ndarray, out_need: np.ndarray, size: int) -> int:
    """Blocks each row lacks to compute `tokens` more (int64[R]); their sum."""
    lacks = -(-(cells[columns.COMPUTED] + tokens) // size) - cells[columns.BLOCKS]
    np.maximum(lacks, 0, out=out_need)
    return int(out_need.sum())


def advance(cells: np.ndarray, out_cells: np.ndarray, tokens: np.ndarray, need: np.ndarray) -> int:
    """The matrix after a plan: tokens computed, placeholders owed, blocks held; how many rows it schedules."""
    out_cells[:] = cells
    out_cells[columns.COMPUTED] += tokens
    caught_up = out_cells[columns.COMPUTED] == cells[columns.KNOWN] + cells[columns.PENDING]
    out_cells[columns.PENDING] += (tokens > 0) & caught_up
    out_cells[columns.BLOCKS] += need
    return int(np.count_nonzero(tokens))


def write_tables(cells: np.ndarray, need: np.ndarray, blocks: np.ndarray, arena: np.ndarray) -> None:
    """New `blocks`, row by row, behind those each row of the advanced matrix had before."""
    ends = np.cumsum(need)
    firsts = cells[columns.TABLE_AT] + cells[columns.BLOCKS] - need
    places = np.arange(len(blocks)) + np.repeat(firsts - (ends - need), need)
    arena[places] = blocks


def oldest(queue: np.ndarray, places: np.ndarray, head: int, used: int, out_blocks: np.ndarray) -> int:
    """The oldest blocks of the queue [head, used) that really stand where it says; the head behind them."""
    window = queue[head:used]
    valid = (places[window] == np.arange(head, used)).nonzero()[0][: len(out_blocks)]
    if len(valid) < len(out_blocks):
        raise ValueError(f"the queue holds {len(out_blocks) - len(valid)} blocks fewer than counted")
    out_blocks[:] = window[valid]
    return head + int(valid[-1]) + 1


def unsealed(cells: np.ndarray, ended: np.ndarray, size: int, out_rows: np.ndarray) -> int:
    """Rows with a full block that has no name yet; the last token of rows that have `ended` does not count."""
    known = cells[columns.KNOWN].copy()
    known[ended] -= 1
    found = (np.minimum(cells[columns.COMPUTED], known) >= (cells[columns.SEALED] + 1) * size).nonzero()[0]
    out_rows[: len(found)] = found
    return len(found)


def seal_inputs(
    cells: np.ndarray, rows: np.ndarray, tokens: np.ndarray, tables: np.ndarray, size: int
) -> tuple[bytes, bytes, list[int]]:
    """Of each row's next full block: its tokens (4 * size bytes), the key before it (16 bytes), its number."""
    sealed = cells[columns.SEALED, rows]
    places = (cells[columns.TOKENS_AT, rows] + sealed * size)[:, None] + np.arange(size)
    blocks = tables[cells[columns.TABLE_AT, rows] + sealed]
    return tokens[places].tobytes(), cells[columns.CHAIN_0 :, rows].T.tobytes(), blocks.tolist()


def seal_write(cells: np.ndarray, rows: np.ndarray, keys: bytes) -> None:
    """One more block of each row is named: its key is the row's chain now."""
    cells[columns.SEALED, rows] += 1
    cells[columns.CHAIN_0 :, rows] = np.frombuffer(keys, dtype=np.int64).reshape(-1, 2).T


def settle(
    cells: np.ndarray,
    ids: np.ndarray,
    epochs: np.ndarray,
    samples: np.ndarray,
    sampled: np.ndarray,
    eos: np.ndarray,
    out_rows: np.ndarray,
    out_places: np.ndarray,
    out_stopped: np.ndarray,
    out_at_limit: np.ndarray,
) -> tuple[int, bool] | None:
    """A step's samples and its rows, where its requests are still the first rows: how many, and whether one has stop
    tokens of its own (not looked at here). None where requests have gone or the tokens are not what was asked for:
    match them one by one then.
    """
    asked = len(ids)
    if asked > cells.shape[1]:
        return None
    same = np.array_equal(cells[columns.ID, :asked], ids) and np.array_equal(cells[columns.EPOCH, :asked], epochs)
    rows = samples.nonzero()[0]
    if not same or len(sampled) != len(rows) or (sampled < 0).any():
        return None
    count, known, flags = len(rows), cells[columns.KNOWN, rows] + 1, cells[columns.FLAGS, rows]
    out_rows[:count], out_places[:count] = rows, np.arange(count)
    stops = np.isin(sampled[:count], eos) & ((flags & columns.IGNORE_EOS) == 0)
    out_stopped[:count] = stops & (known > cells[columns.MIN_KNOWN, rows])
    out_at_limit[:count] = known >= cells[columns.LIMIT, rows]
    return count, bool((flags & columns.OWN_STOPS).any())


def take_tokens(
    cells: np.ndarray, out_cells: np.ndarray, rows: np.ndarray, tokens: np.ndarray, arena: np.ndarray
) -> bool:
    """The matrix after a commit, the tokens written behind the histories. False, nothing written, if one is full."""
    known = cells[columns.KNOWN, rows]
    if (known >= cells[columns.TOKENS_SIZE, rows]).any():
        return False
    out_cells[:] = cells
    out_cells[columns.KNOWN, rows] += 1
    out_cells[columns.PENDING, rows] -= 1
    arena[cells[columns.TOKENS_AT, rows] + known] = tokens
    return True
