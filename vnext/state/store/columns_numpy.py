"""Columns in numpy: the arithmetic of one step over the rows, the plain form that defines each function.

`_columns.c` is the compiled form; tests compare the two on every call of seeded runs. Functions fill their `out`
arguments and only read the others. Cells are int64[FIELD_COUNT, R] as in rows.py.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from vnext.state.store import fields
from vnext.state.store.drafts_numpy import drafts, match_runs, places_in_runs, settle

__all__ = ["drafts", "match_runs", "settle"]  # drafts_numpy.py defines them
BLOCK_HASH_SIZE = 16
TURN_WORK_LINES = 6
NOBODY = np.empty(0, np.int64)
Arrays = tuple[np.ndarray, ...]
Words = tuple[int, ...]
Named = list[tuple[bytes, int]]  # (hash, page) of each block
Moves = list[tuple[bytes, int] | int]  # of the prefix index
Steps = tuple[np.ndarray, np.ndarray, tuple[tuple[np.ndarray, np.ndarray], ...], np.ndarray, np.ndarray]
PLACE, VALUE, START, FIRST, SECOND = np.array(
    (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), dtype=np.uint64
)
RIGHT_30, RIGHT_27, RIGHT_31 = np.array((30, 27, 31), dtype=np.uint64)


def group_hash(key: bytes, group: int) -> bytes:
    """The hash of a block's page in one group of layers. In group 0 it is the block hash itself."""
    return key[:-1] + bytes((key[-1] ^ group,)) if group else key


def expected(
    cells: np.ndarray, out: np.ndarray, budget: int, threshold: int, size: int, microbatches: int, step: int
) -> tuple[int, int]:
    """Fill `out` int64[2, R] with the new tokens of each row and the blocks it lacks for them; returns both sums.

    A row whose turn it is gets what it wants, limited by the threshold (0: none) and by the remaining budget.
    """
    wants = _wants(cells) * in_turn(cells, microbatches, step)
    if threshold:
        wants = np.minimum(wants, threshold)
    ends = np.cumsum(wants)
    out[0] = np.minimum(np.maximum(budget - (ends - wants), 0), wants)
    return int(np.add.reduce(out[0])), needed(cells, out[0], out[1], size)


def _wants(cells: np.ndarray) -> np.ndarray:
    """The tokens that each row could compute (int64[R])."""
    reached = np.minimum(cells[fields.KNOWN] + cells[fields.PLACEHOLDERS], cells[fields.LIMIT] - 1)
    wants: np.ndarray = reached - cells[fields.COMPUTED]
    return wants


def in_turn(cells: np.ndarray, microbatches: int, step: int) -> np.ndarray:
    """Which rows a step takes (bool[R]): every row that is in its prompt, and of those that want a single token a microbatch.

    A microbatch is one of `microbatches` equal parts of these rows, in turn by the step's number. Rows whose token is in flight are
    left out, and the next ones behind the part, from the first on again, take their places. Fewer rows than microbatches are
    all taken, also those in flight.
    """
    taken = np.ones(cells.shape[1], dtype=bool)
    decoding = (_wants(cells) == 1).nonzero()[0]
    count, part = len(decoding), step % microbatches
    if microbatches > 1 and count >= microbatches:
        first, end = part * count // microbatches, (part + 1) * count // microbatches
        decoding = np.roll(decoding, -first)
        taken[decoding] = False
        taken[decoding[cells[fields.PLACEHOLDERS, decoding] == 0][: end - first]] = True
    return taken


def needed(cells: np.ndarray, tokens: np.ndarray, out_need: np.ndarray, size: int) -> int:
    """Fill `out_need` (int64[R]) with the blocks that each row lacks to compute `tokens` more; returns their sum."""
    lacks = -(-(cells[fields.COMPUTED] + tokens) // size) - cells[fields.BLOCKS]
    np.maximum(lacks, 0, out=out_need)
    return int(np.add.reduce(out_need))


def advance(cells: np.ndarray, out_cells: np.ndarray, tokens: np.ndarray, need: np.ndarray) -> int:
    """Fill `out_cells` with the matrix after a plan: tokens computed, placeholders owed, blocks held. Returns the
    number of rows scheduled.
    """
    out_cells[:] = cells
    out_cells[fields.COMPUTED] += tokens
    caught_up = out_cells[fields.COMPUTED] == cells[fields.KNOWN] + cells[fields.PLACEHOLDERS]
    out_cells[fields.PLACEHOLDERS] += (tokens > 0) & caught_up
    out_cells[fields.BLOCKS] += need
    return int(np.count_nonzero(tokens))


def write_tables(cells: np.ndarray, need: np.ndarray, blocks: np.ndarray, arena: np.ndarray, groups: int) -> None:
    """Append the new pages `blocks` to the tables, row by row, `groups` pages for each block, and update TABLE_HASH.

    `cells` is the advanced matrix; `need` is the number of new blocks of each row.
    """
    need = need * groups
    ends = np.cumsum(need)
    firsts = cells[fields.BLOCKS] * groups - need
    at = np.arange(len(blocks)) + np.repeat(firsts - (ends - need), need)
    rows = np.repeat(np.arange(len(need)), need)
    arena[cells[fields.TABLE_AT, rows] + at] = blocks
    np.add.at(cells[fields.TABLE_HASH].view(np.uint64), rows, place_hash(at, blocks))


def place_hash(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A hash of each pair of place and value (uint64[...]): the finaliser of SplitMix64 over both."""
    x: np.ndarray = values.astype(np.uint64) * VALUE
    x += places.astype(np.uint64) * PLACE + START
    x ^= x >> RIGHT_30
    x *= FIRST
    x ^= x >> RIGHT_27
    x *= SECOND
    x ^= x >> RIGHT_31
    return x


def array_hash(values: np.ndarray) -> int:
    """The sum of the place hashes of a whole array (int64[n]), modulo 2**64. It depends on the contents only, not on
    the order of changes.
    """
    return int(np.add.reduce(place_hash(np.arange(len(values)), values)))


def exchange(store: np.ndarray, places: np.ndarray, values: np.ndarray) -> int:
    """Swap `values` with the contents of int64 `store` at int32 `places`. Returns the change of the store's hash."""
    before = store[places]
    new, old = place_hash(places, np.array((values, before)))
    change = np.add.reduce(new - old)
    store[places] = values
    values[:] = before
    return int(change)


def oldest(queue: np.ndarray, status: np.ndarray, head: int, used: int, out_blocks: np.ndarray) -> int:
    """Fill `out_blocks` with the oldest valid pages of the queue [head, used); returns the head behind them.

    An entry is valid if the page's status is its place in the queue. Raises ValueError if there are too few.
    """
    window = queue[head:used]
    valid = (status[window] == np.arange(head, used)).nonzero()[0][: len(out_blocks)]
    if len(valid) < len(out_blocks):
        raise ValueError(f"the queue holds {len(out_blocks) - len(valid)} blocks fewer than counted")
    out_blocks[:] = window[valid]
    return head + int(valid[-1]) + 1


def released(status: np.ndarray, blocks: np.ndarray, at: int, out_status: np.ndarray, out_freed: np.ndarray) -> int:
    """Remove one holder from each page: fill `out_status` (int64[n]) with the new status of `blocks`.

    Freed pages take the places of the queue from `at` on, in order. Returns the number of freed pages, which are the
    first entries of `out_freed` (int32[n]).
    """
    left = status[blocks] + 1
    freed = (left == 0).nonzero()[0]
    left[freed] = np.arange(at, at + len(freed))
    out_status[:] = left
    out_freed[: len(freed)] = blocks[freed]
    return len(freed)


def block_hashes(parent: bytes, tokens: bytes, size: int) -> tuple[bytes, ...]:
    """The hashes of all full blocks of a history (int32 bytes), first to last."""
    keys = []
    for end in range(4 * size, len(tokens) + 1, 4 * size):
        more = 4 * _rest_of_digest(np.frombuffer(tokens[end - 4 * size : end], dtype=np.int32))
        parent = blake2b(parent + tokens[end - 4 * size : end + more], digest_size=BLOCK_HASH_SIZE).digest()
        keys.append(parent)
    return tuple(keys)


def most_alike(one: bytes, others: list[bytes]) -> list[tuple[int, int]]:
    """How many leading tokens of a history (int32 bytes) each of the others has too, and its place among them; most first, of the
    same number in their order."""
    found = []
    for place, other in enumerate(others):
        size = min(len(one), len(other)) // 4
        differ = (np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)).nonzero()[0]
        found.append((int(differ[0]) if len(differ) else size, place))
    return sorted(found, key=lambda each: -each[0])


def goes_on_alike(one: bytes, other: bytes, at: int) -> bool:
    """Whether two histories (int32 bytes) have half of their tokens from `at` on in common, at the same places."""
    rest = min(len(one), len(other)) // 4 - at
    same = np.frombuffer(one, np.int32, at + rest)[at:] == np.frombuffer(other, np.int32, at + rest)[at:]
    return 2 * int(np.count_nonzero(same)) >= rest


def _rest_of_digest(block: np.ndarray) -> int:
    """How many tokens behind a block (int32[size]) belong to its name: where an input begins within its last ones, those that spell
    the rest of its digest."""
    begins = (block[::-1][: fields.DIGEST_WORDS - 1] < fields.INPUT_BEGINS).nonzero()[0]
    return fields.DIGEST_WORDS - 1 - int(begins[0]) if len(begins) else 0


def hash_full_blocks(
    cells: np.ndarray, ended: np.ndarray, tokens: np.ndarray, tables: np.ndarray, size: int, windows: bytes
) -> Named:
    """Hash full blocks and return (hash, page) for each group, in rounds: the next block of every row first.

    Writes HASHED_BLOCKS and BLOCK_HASH. The last token of rows in `ended` does not count. Pages that a group with a
    window has given back get no hash. `windows`: int64 bytes, one window for each group, 0: none.
    """
    groups = len(windows) // 8
    ready = cells[fields.KNOWN].copy()
    ready[ended] -= 1
    np.minimum(ready, cells[fields.COMPUTED], out=ready)
    pairs: Named = []
    while len(rows := (ready >= (cells[fields.HASHED_BLOCKS] + 1) * size).nonzero()[0]):
        for row in rows.tolist():
            hashed_blocks, at, table = cells[[fields.HASHED_BLOCKS, fields.TOKENS_AT, fields.TABLE_AT], row].tolist()
            words = tokens[at + hashed_blocks * size :][: size + fields.DIGEST_WORDS - 1].tobytes()
            key = block_hashes(cells[fields.BLOCK_HASH_0 :, row].tobytes(), words, size)[0]
            for group, window in enumerate(np.frombuffer(windows, dtype=np.int64).tolist()):
                if window == 0 or hashed_blocks >= (int(cells[fields.COMPUTED, row]) - window + 1) // size:
                    pairs.append((group_hash(key, group), int(tables[table + hashed_blocks * groups + group])))
            cells[fields.HASHED_BLOCKS, row] += 1
            cells[fields.BLOCK_HASH_0 :, row] = np.frombuffer(key, dtype=np.int64)
    return pairs


def step_entries(
    cells: np.ndarray, starts: np.ndarray, tokens: np.ndarray, out: np.ndarray, out_samples: np.ndarray
) -> int:
    """Fill a step's entries, `out` int64[4, R] (ids, preemption counts, starts, counts) and `out_samples` bool[R];
    returns the number of rows that have tokens.

    A scheduled row with a placeholder samples in this step, because it has caught up with its known tokens.
    """
    scheduled = tokens.nonzero()[0]
    count = len(scheduled)
    lines = (cells[fields.ID], cells[fields.PREEMPTION_COUNT], starts, tokens)
    for entries, line in zip(out, lines):
        entries[:count] = line[scheduled]
    out_samples[:count] = cells[fields.PLACEHOLDERS, scheduled] > 0
    return count


def lawful(cells: np.ndarray, size: int, spare_tokens: int) -> bool:
    """Whether all rows satisfy S2 and M4 of laws.py, which checks each part separately and has the messages.

    `spare_tokens`: the drafts for which a row may hold blocks.
    """
    known, computed, blocks = cells[fields.KNOWN], cells[fields.COMPUTED], cells[fields.BLOCKS]
    wrong = computed > known + cells[fields.PLACEHOLDERS]
    wrong |= cells[fields.HASHED_BLOCKS] * size > np.minimum(computed, known)
    wrong |= known >= cells[fields.LIMIT]
    wrong |= (blocks < -(-computed // size)) | (blocks > -(-(computed + spare_tokens) // size))
    return not wrong.any()


def bounds(entries: np.ndarray, samples: np.ndarray) -> tuple[int, int, int, int]:
    """Of a step's entries (int64[4, n]): sum, minimum (0 if empty) and maximum of the token counts; number of rows that sample."""
    counts = entries[3]
    smallest = int(counts.min()) if len(counts) else 0
    return int(counts.sum()), smallest, int(counts.max(initial=0)), int(np.count_nonzero(samples))


def match_samples(
    cells: np.ndarray,
    entries: np.ndarray,
    samples: np.ndarray,
    sampled: np.ndarray,
    eos: np.ndarray,
    out_places: np.ndarray,
    out_ends: np.ndarray,
) -> tuple[bool, int] | None:
    """Match a step's samples with its rows, if its requests are all still there, in order.

    Fills `out_places` int64[2, n] with rows and places, and `out_ends` bool[2, n] with whether a row stopped or is at
    its limit. Returns whether a row has stop tokens of its own (not checked here) and the number of rows that end.
    Returns None if requests have left or the tokens do not fit the step; the caller then matches them one by one.
    """
    rows = np.isin(cells[fields.ID], entries[0]).nonzero()[0]
    same = np.array_equal(cells[[fields.ID, fields.PREEMPTION_COUNT]][:, rows], entries[:2])
    rows = rows[samples] if same else rows
    if not same or len(sampled) != len(rows) or (sampled < 0).any():
        return None
    known, flags = cells[fields.KNOWN, rows] + 1, cells[fields.FLAGS, rows]
    out_places[:] = rows, np.arange(len(rows))
    stops = (sampled[:, None] == eos).any(axis=1) & ((flags & fields.IGNORE_EOS) == 0)
    out_ends[:] = stops & (known > cells[fields.MIN_KNOWN, rows]), known >= cells[fields.LIMIT, rows]
    return bool((flags & fields.OWN_STOPS).any()), int(np.count_nonzero(out_ends[0] | out_ends[1]))


def take_tokens(
    cells: np.ndarray, out_cells: np.ndarray, rows: np.ndarray, tokens: np.ndarray, arena: np.ndarray
) -> bool:
    """Fill `out_cells` with the matrix after a commit and write the tokens behind the histories. Returns False and
    writes nothing if a history is full. A row that takes several tokens has its places in `rows` side by side.
    """
    firsts = np.flatnonzero(np.diff(rows, prepend=-1))
    known = cells[fields.KNOWN, rows] + places_in_runs(np.diff(firsts, append=len(rows)))
    if (known >= cells[fields.TOKENS_SIZE, rows]).any():
        return False
    out_cells[:] = cells
    np.add.at(out_cells[fields.KNOWN], rows, 1)
    np.subtract.at(out_cells[fields.PLACEHOLDERS], rows, 1)
    arena[cells[fields.TOKENS_AT, rows] + known] = tokens
    return True


def turn(step: Arrays, stores: Arrays, out: Arrays, numbers: Words, by: Words) -> tuple[int, int, int, int, Named, Named] | None:
    """A steady turn: a commit without drafts after which all rows of the step continue, then an expected plan without drafts.

    Runs the functions above in order, hashes the full blocks of both events and checks laws S1, S2 and M4. `step`: cells,
    drafting (empty in an engine without speculation), entries, samples, the tokens sampled, the model's end tokens.
    `stores`: histories, tables, the pool's queue and status. `out`: cells, entries (int64[4, R]) and samples (bool[R]) of
    the plan, rows that take a token (the first of TURN_WORK_LINES lines of int64[R]), pages taken (int32[R]). `numbers`:
    budget, threshold, size, free pages, the queue's head and places used, whether blocks are hashed, whether prompts are
    computed whole, microbatches, the plan's step, tokens of the first request that waits (0: nobody can join), and how many blocks
    may get names before it might join. `by`: what `drafts` decides by and a row's spare tokens; empty without drafts.
    Returns the plan's entries, tokens and pages, the queue's head, and the (hash, page) pairs of both events. Returns None if the
    turn is not steady; anything written by then is at places that no state may read.
    """
    middle = np.empty_like(step[0])
    if (half := _committed(step, stores[:2], middle, out[3], numbers)) is None:
        return None
    committed, _ = half
    found = _planned((middle, step[1]), stores, out, numbers, by, len(committed))
    return (*found[:4], committed, found[4]) if found is not None and lawful(middle, numbers[2], by[4] if by else 0) else None


def _committed(
    step: Arrays, stores: Arrays, out_cells: np.ndarray, out_work: np.ndarray, numbers: Words, ending: bool = False
) -> tuple[Named, int] | None:
    """The first half of a turn: the names that it brings, and how many rows end, if they may. None where it is not steady."""
    (cells, _, entries, samples, sampled, eos), (histories, tables), given = step, stores, len(step[4])
    places, ends = np.empty((2, given), np.int64), np.empty((2, given), bool)
    matched = match_samples(cells, entries, samples, sampled, eos, places, ends)
    if matched is None or matched[0] or (matched[1] and not ending):
        return None
    if not take_tokens(cells, out_cells, places[0], sampled, histories):
        return None
    gone, out_work[0, :given] = places[0][ends.any(axis=0)], places[0]
    out_work[1, : len(gone)] = gone
    return _names(out_cells, histories, tables, numbers[2], numbers[6], gone), len(gone)


def _planned(
    rows: Arrays, stores: Arrays, out: Arrays, numbers: Words, by: Words, named: int
) -> tuple[int, int, int, int, Named] | None:
    """The second half of a turn, or a plan alone, where `named` blocks have got names. None where it is not steady."""
    (middle, drafting), (histories, tables, queue, status) = rows, stores
    out_cells, out_entries, out_asks, out_work, out_blocks = out
    budget, threshold, size, free, head, used, caches, whole_prompts, *turn, waits, slack = numbers
    most, row_cost, step_cost, many_cost, spare = by or (0, 0, 0, 0, 0)
    total, lacks = expected(middle, out_work[1:3], budget, threshold, size, *turn)
    tokens, need = out_work[1:3]
    may_join = waits and (total + waits > budget or named >= slack)
    if not total or lacks > min(free, middle.shape[1]) or may_join:
        return None
    if len(drafting) and drafts(middle, drafting, tokens, out_work[3], (most, row_cost, step_cost, many_cost), budget):
        return None
    head = oldest(queue, status, head, used, out_blocks[:lacks]) if lacks else head
    advance(middle, out_cells, tokens, need)
    write_tables(out_cells, need, out_blocks[:lacks], tables, 1)
    made = step_entries(out_cells, middle[fields.COMPUTED], tokens, out_entries, out_asks)
    planned = _names(out_cells, histories, tables, size, caches)
    computed, smallest, largest, asking = bounds(out_entries[:, :made], out_asks[:made])
    holds = computed == total <= budget and smallest >= 1 and (not threshold or largest <= threshold)
    holds = holds and (not whole_prompts or asking == made) and lawful(out_cells, size, spare)
    return (made, total, lacks, head, planned) if holds else None


def turns(
    step: Steps, stores: Arrays, out: Arrays, numbers: Words, by: Words, run: tuple[int, int, bool, bool]
) -> tuple[int, bool, int, int, int, Moves] | None:
    """Steady turns, one behind the other, as many as there are tokens and steady ones. `run`: the steps in flight, the most
    turns, if a plan leads, and if a commit ends them where they are so many; one does if the next is not steady; it may end rows.

    As `turn`, but `step` has all steps in flight, as (entries, samples) each, and the tokens of all commits; samples of requests
    that have left are dropped. `out` has cells int64[2, FIELDS, R], filled in turn, entries int64[depth + 1, 4, W] and samples
    bool[depth + 1, W], of which turn k fills those at (k + depth) % (depth + 1) and a plan that leads those at depth - 1, all pages
    taken, and `made` int64[n, 4]: of each, the plan's entries and tokens, the commit's tokens, and those that were taken. Returns
    the number of turns, whether a commit ended them, pages taken, the queue's head, how many rows end (second line of work), and
    what the prefix index goes through: pairs that come, pages that go. None if nothing is steady.
    """
    (cells, drafting, in_flight, sampled, eos), (out_cells, out_entries, out_asks, out_work, out_blocks, made) = step, out
    fixed, (free, head), used, (planned_step, waits, slack) = numbers[:3], numbers[3:5], numbers[5:9], numbers[9:]
    (depth, most, leads, ends), steps, moves = run, list(in_flight), Moves()
    taken = drawn = named = turns = calls = gone = ended = 0
    for has_commit, has_plan in [(False, True)] * leads + [(True, True)] * most + [(True, False)] * ends:
        given, slot = int(np.count_nonzero(steps[turns][1])) if has_commit else 0, (turns + depth - (not has_commit)) % (depth + 1)
        commit = (cells, drafting, *steps[turns], sampled[drawn : drawn + given], eos) if has_commit else ()
        half = _commit_alone(commit, stores, out_work, numbers, by) if commit else (cells, Named(), 0, 0)
        if half is None:
            break
        (middle, committed, alive, gone), found = half, None
        out_cells[calls % 2] = middle
        if has_plan and not gone:
            words = (*fixed, free, head, *used, planned_step + len(steps) - len(in_flight), waits, slack)
            arrays = (out_cells[calls % 2], out_entries[slot], out_asks[slot], out_work, out_blocks[taken:])
            found = _planned((middle, drafting), stores, arrays, words, by, named + len(committed))
        if (ended := found is None) and not has_commit:
            break
        count, total, lacks, head, planned = found or (0, 0, 0, head, [])
        steps.append((out_entries[slot][:, :count].copy(), out_asks[slot][:count].copy()))
        moves += [*committed, *out_blocks[taken : taken + lacks].tolist(), *planned]
        made[calls] = count, total, given, alive
        cells, free, taken, drawn = out_cells[calls % 2], free - lacks, taken + lacks, drawn + given
        named, calls, turns = named + len(committed) + len(planned), calls + 1, turns + has_commit
        if ended:
            break
    return (turns - ended, bool(ended), taken, head, gone, moves) if calls else None


def _commit_alone(
    step: Arrays, stores: Arrays, out_work: np.ndarray, numbers: Words, by: Words
) -> tuple[np.ndarray, Named, int, int] | None:
    """The cells behind a commit, the names that it brings, how many tokens were taken and rows end; None where it is not steady."""
    (cells, drafting, *given, eos), middle = step, np.empty_like(step[0])
    if (kept := _still_there(cells, (given[0], given[1]), given[2])) is None:
        return None
    if (half := _committed((cells, drafting, *kept, eos), stores[:2], middle, out_work, numbers, ending=True)) is None:
        return None
    return (middle, half[0], len(kept[2]), half[1]) if half[1] or lawful(middle, numbers[2], by[4] if by else 0) else None


def _still_there(cells: np.ndarray, step: Arrays, sampled: np.ndarray) -> Arrays | None:
    """Entries, samples and tokens of a step without the requests that have left; None where tokens are missing, or are none."""
    (entries, samples), asked = step, step[1].nonzero()[0]
    if len(sampled) != len(asked) or (sampled < 0).any():
        return None
    live = {*zip(cells[fields.ID].tolist(), cells[fields.PREEMPTION_COUNT].tolist())}
    stays = np.array([each in live for each in zip(*entries[:2].tolist())], bool)
    return entries[:, stays], samples[stays], sampled[stays[asked]]


def _names(
    cells: np.ndarray, histories: np.ndarray, tables: np.ndarray, size: int, caches: int, gone: np.ndarray = NOBODY
) -> Named:
    """`hash_full_blocks` for one group without a window, where these rows end; an empty list if blocks are not hashed."""
    return hash_full_blocks(cells, gone, histories, tables, size, bytes(8)) if caches else []
