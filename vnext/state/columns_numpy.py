"""Columns in numpy: the arithmetic of one step over the rows, the plain form that says what each function means.

`_columns.c` is the compiled twin; tests hold the two equal on every call of seeded runs. `out` arguments are filled,
everything else is read. Cells are int64[FIELD_COUNT, R] as in rows.py.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from vnext.state import rows as columns

KEY_SIZE = 16
PLACE, VALUE, START, FIRST, SECOND = np.array(
    (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), dtype=np.uint64
)
RIGHT_30, RIGHT_27, RIGHT_31 = np.array((30, 27, 31), dtype=np.uint64)


def group_key(key: bytes, group: int) -> bytes:
    """The name of a block's page in one group of layers: that of the block itself in the first."""
    return key[:-1] + bytes((key[-1] ^ group,)) if group else key


def expected(cells: np.ndarray, out: np.ndarray, budget: int, threshold: int, size: int) -> tuple[int, int]:
    """`out` int64[2, R]: new tokens of each row, what it wants under the threshold (0: none) and the budget, and the blocks
    it lacks for them. Both sums."""
    wants = np.minimum(cells[columns.KNOWN] + cells[columns.PENDING], cells[columns.LIMIT] - 1) - cells[columns.COMPUTED]
    if threshold:
        wants = np.minimum(wants, threshold)
    ends = np.cumsum(wants)
    out[0] = np.minimum(np.maximum(budget - (ends - wants), 0), wants)
    return int(np.add.reduce(out[0])), needed(cells, out[0], out[1], size)


def needed(cells: np.ndarray, tokens: np.ndarray, out_need: np.ndarray, size: int) -> int:
    """Blocks each row lacks to compute `tokens` more (int64[R]); their sum."""
    lacks = -(-(cells[columns.COMPUTED] + tokens) // size) - cells[columns.BLOCKS]
    np.maximum(lacks, 0, out=out_need)
    return int(np.add.reduce(out_need))


def advance(cells: np.ndarray, out_cells: np.ndarray, tokens: np.ndarray, need: np.ndarray) -> int:
    """The matrix after a plan: tokens computed, placeholders owed, blocks held; how many rows it schedules."""
    out_cells[:] = cells
    out_cells[columns.COMPUTED] += tokens
    caught_up = out_cells[columns.COMPUTED] == cells[columns.KNOWN] + cells[columns.PENDING]
    out_cells[columns.PENDING] += (tokens > 0) & caught_up
    out_cells[columns.BLOCKS] += need
    return int(np.count_nonzero(tokens))


def write_tables(cells: np.ndarray, need: np.ndarray, blocks: np.ndarray, arena: np.ndarray, groups: int) -> None:
    """New pages `blocks`, row by row, `groups` a block, behind those each row of the advanced matrix had before; the
    tables' sums follow."""
    need = need * groups
    ends = np.cumsum(need)
    firsts = cells[columns.BLOCKS] * groups - need
    at = np.arange(len(blocks)) + np.repeat(firsts - (ends - need), need)
    rows = np.repeat(np.arange(len(need)), need)
    arena[cells[columns.TABLE_AT, rows] + at] = blocks
    np.add.at(cells[columns.TABLE_SUM].view(np.uint64), rows, mixed_one(at, blocks))


def mixed_one(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each "this value at this place" a number (uint64[...]) that differs from others': SplitMix64's finish over both."""
    x = values.astype(np.uint64) * VALUE
    x += places.astype(np.uint64) * PLACE + START
    x ^= x >> RIGHT_30
    x *= FIRST
    x ^= x >> RIGHT_27
    x *= SECOND
    x ^= x >> RIGHT_31
    return x


def mixed(values: np.ndarray) -> int:
    """The sum over a whole array (int64[n]), modulo 2**64: equal arrays have equal sums, however they came about."""
    return int(np.add.reduce(mixed_one(np.arange(len(values)), values)))


def put(store: np.ndarray, places: np.ndarray, values: np.ndarray) -> int:
    """`values` into int64 `store` at int32 `places`; they become what stood there. The change of the store's sum."""
    before = store[places]
    new, old = mixed_one(places, np.array((values, before)))
    change = np.add.reduce(new - old)
    store[places] = values
    values[:] = before
    return int(change)


def oldest(queue: np.ndarray, status: np.ndarray, head: int, used: int, out_blocks: np.ndarray) -> int:
    """The oldest blocks of the queue [head, used) that really stand where it says; the head behind them."""
    window = queue[head:used]
    valid = (status[window] == np.arange(head, used)).nonzero()[0][: len(out_blocks)]
    if len(valid) < len(out_blocks):
        raise ValueError(f"the queue holds {len(out_blocks) - len(valid)} blocks fewer than counted")
    out_blocks[:] = window[valid]
    return head + int(valid[-1]) + 1


def released(status: np.ndarray, blocks: np.ndarray, at: int, out_status: np.ndarray, out_freed: np.ndarray) -> int:
    """With one holder less each, the blocks' status (int64[n]): freed ones stand in the queue from place `at` on, in order.
    How many are freed, and which (int32[n], the first ones filled)."""
    left = status[blocks] + 1
    freed = (left == 0).nonzero()[0]
    left[freed] = np.arange(at, at + len(freed))
    out_status[:] = left
    out_freed[: len(freed)] = blocks[freed]
    return len(freed)


def chain(parent: bytes, tokens: bytes, size: int) -> tuple[bytes, ...]:
    """Keys of all full blocks of a history (int32 bytes), first to last."""
    keys = []
    for end in range(4 * size, len(tokens) + 1, 4 * size):
        parent = blake2b(parent + tokens[end - 4 * size : end], digest_size=KEY_SIZE).digest()
        keys.append(parent)
    return tuple(keys)


def seal(
    cells: np.ndarray, ended: np.ndarray, tokens: np.ndarray, tables: np.ndarray, size: int, windows: bytes
) -> list[tuple[bytes, int]]:
    """Name full blocks: (key, page) of each group, round by round, every row's next one first; writes SEALED and CHAIN.

    The last token of rows that have `ended` does not count. What a group with a window (int64 bytes, one of
    each group, 0: none) has given back gets no name.
    """
    groups = len(windows) // 8
    ready = cells[columns.KNOWN].copy()
    ready[ended] -= 1
    np.minimum(ready, cells[columns.COMPUTED], out=ready)
    pairs: list[tuple[bytes, int]] = []
    while len(rows := (ready >= (cells[columns.SEALED] + 1) * size).nonzero()[0]):
        for row in rows.tolist():
            sealed, at, table = cells[[columns.SEALED, columns.TOKENS_AT, columns.TABLE_AT], row].tolist()
            words = tokens[at + sealed * size : at + (sealed + 1) * size].tobytes()
            (key,) = chain(cells[columns.CHAIN_0 :, row].tobytes(), words, size)
            for group, window in enumerate(np.frombuffer(windows, dtype=np.int64).tolist()):
                if window == 0 or sealed >= (int(cells[columns.COMPUTED, row]) - window + 1) // size:
                    pairs.append((group_key(key, group), int(tables[table + sealed * groups + group])))
            cells[columns.SEALED, row] += 1
            cells[columns.CHAIN_0 :, row] = np.frombuffer(key, dtype=np.int64)
    return pairs


def flight(
    cells: np.ndarray, starts: np.ndarray, tokens: np.ndarray, out: np.ndarray, out_samples: np.ndarray
) -> int:
    """Entries of a step, `out` int64[4, R] (ids, epochs, starts, counts) and bool[R]: how many rows have tokens.

    A scheduled row with a pending token samples in this step: it has caught up with all it knows.
    """
    scheduled = tokens.nonzero()[0]
    count = len(scheduled)
    fields = (cells[columns.ID], cells[columns.EPOCH], starts, tokens)
    for entries, field in zip(out, fields):
        entries[:count] = field[scheduled]
    out_samples[:count] = cells[columns.PENDING, scheduled] > 0
    return count


def lawful(cells: np.ndarray, size: int) -> bool:
    """Whether all rows keep S2 and M4 of laws.py, where each part stands alone with its message."""
    known, computed, blocks = cells[columns.KNOWN], cells[columns.COMPUTED], cells[columns.BLOCKS]
    wrong = computed > known + cells[columns.PENDING]
    wrong |= cells[columns.SEALED] * size > np.minimum(computed, known)
    wrong |= known >= cells[columns.LIMIT]
    wrong |= blocks != -(-computed // size)
    return not wrong.any()


def bounds(entries: np.ndarray, samples: np.ndarray) -> tuple[int, int, int, int]:
    """Of a step's entries (int64[4, n]): sum, least (0 of none) and greatest of its token counts; how many rows sample."""
    counts = entries[3]
    smallest = int(counts.min()) if len(counts) else 0
    return int(counts.sum()), smallest, int(counts.max(initial=0)), int(np.count_nonzero(samples))


def settle(
    cells: np.ndarray,
    entries: np.ndarray,
    samples: np.ndarray,
    sampled: np.ndarray,
    eos: np.ndarray,
    out_places: np.ndarray,
    out_ends: np.ndarray,
) -> tuple[bool, int] | None:
    """A step's samples and its rows, where its requests are still the first rows: rows and places in `out_places`
    int64[2, n], stopped and at their limit in `out_ends` bool[2, n]. Whether one has stop tokens of its own (not looked at
    here), and how many end. None where requests have gone or the tokens are not what was asked for: match them one by one.
    """
    asked = len(samples)
    if asked > cells.shape[1]:
        return None
    same = (cells[columns.ID, :asked] == entries[0]).all() and (cells[columns.EPOCH, :asked] == entries[1]).all()
    rows = samples.nonzero()[0]
    if not same or len(sampled) != len(rows) or (sampled < 0).any():
        return None
    known, flags = cells[columns.KNOWN, rows] + 1, cells[columns.FLAGS, rows]
    out_places[:] = rows, np.arange(len(rows))
    stops = (sampled[:, None] == eos).any(axis=1) & ((flags & columns.IGNORE_EOS) == 0)
    out_ends[:] = stops & (known > cells[columns.MIN_KNOWN, rows]), known >= cells[columns.LIMIT, rows]
    return bool((flags & columns.OWN_STOPS).any()), int(np.count_nonzero(out_ends[0] | out_ends[1]))


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
