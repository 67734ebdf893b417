"""Recurrent layers: the state pages of requests, and the snapshots among them that the prefix cache finds again.

A running request writes its states in place, in one live page. A snapshot is a copy of it at a block's edge, in a page of the
same pool, which the index knows by the hash of that block: it stands for exactly the tokens up to there. A request that is
admitted starts behind the longest prefix of which the cache has the blocks *and* a snapshot, which is copied into its live page.
With snapshots a request holds three pages: LIVE, NEWEST (its newest snapshot) and SPARE (for the next one), so that it never
lacks one while it runs. What was NEWEST stays in the cache where `is_kept` says so or a pin does, as long as nobody needs its page;
else it is the next SPARE. A pinned prefix has its last snapshot pinned, while that one's block is and pins of snapshots have room.
Ranks run steps in order: a page is copied before anything that a later plan lets write it.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.config import SchedulerConfig
from vnext.state.pool import Pool
from vnext.state.state import Copies, State, StepInFlight, Waiting
from vnext.state.store.columns_numpy import group_hash
from vnext.state.store.fields import DUE, LIVE, NEWEST, NEWEST_EDGE, RECURRENT_FIELD_COUNT, SPARE
from vnext.state.store.pins import Ending
from vnext.state.store.rows import Rows

replace = msgspec.structs.replace
NOWHERE = np.iinfo(np.int64).max
NO_COPIES = np.empty((0, 2), dtype=np.int64)
NO_PAGES = np.empty(0, dtype=np.int32)


# ---- policy ------------------------------------------------------------------------------------------------------


def pages_held(config: SchedulerConfig) -> int:
    """State pages that a running request holds."""
    return 0 if not config.state_pages else 3 if config.takes_snapshots else 1


def is_kept(config: SchedulerConfig, edge: int, prompt: int) -> bool:
    """Whether the snapshot of `edge` tokens outlives the next one of its request, whose prompt has `prompt` tokens: each
    `snapshot_interval`, and at the last edge that a request with the same prompt may start behind."""
    return edge % config.snapshot_interval == 0 or edge == (prompt - 1) // config.block_size * config.block_size


def up_to_edge(config: SchedulerConfig, progress: tuple[np.ndarray, np.ndarray, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """`tokens` (int64[n]), cut at the next edge at which a snapshot is taken. `progress` are the computed, known and
    prompt tokens (int64[n] each)."""
    if not config.takes_snapshots:
        return tokens
    computed, known, prompt = progress
    size, interval = config.block_size, config.snapshot_interval
    edge = (computed // interval + 1) * interval
    for last in ((prompt - 1) // size * size, known // size * size):
        edge = np.minimum(edge, np.where(last > computed, last, NOWHERE))
    cut: np.ndarray = np.minimum(tokens, edge - computed)
    return cut


def first_tokens(state: State, waiting: Waiting, hit_tokens: int, tokens: int) -> int:
    """`tokens` of a waiting request behind its hit, cut as those of a row, where snapshots are taken."""
    prompt = state.requests[waiting.id].prompt_length
    progress = np.array([hit_tokens]), np.array([waiting.known]), np.array([prompt])
    return int(up_to_edge(state.config, progress, np.array([tokens]))[0])


def cut(config: SchedulerConfig, rows: Rows, tokens: np.ndarray) -> np.ndarray:
    """The tokens of the rows (int64[R]), cut at their next edges."""
    if not config.takes_snapshots:
        return tokens
    return up_to_edge(config, (rows.computed, rows.known, rows.prompt), tokens)


def _is_edge(config: SchedulerConfig, rows: Rows) -> np.ndarray:
    """Whether a snapshot is taken where the rows stand now (bool[R]): what follows the known tokens' last edge is an answer, all of
    whose edges count until the next one."""
    size, computed = config.block_size, rows.computed
    last = (computed % config.snapshot_interval == 0) | (computed == (rows.prompt - 1) // size * size)
    found: np.ndarray = (computed % size == 0) & (last | (computed >= rows.known // size * size))
    return found


# ---- admission ---------------------------------------------------------------------------------------------------


def snapshot_blocks(pool: Pool, keys: tuple[bytes, ...]) -> np.ndarray:
    """Which of these blocks' edges have a snapshot (bool[n]); all without recurrent layers."""
    if pool.states is None:
        return np.ones(len(keys), dtype=bool)
    return np.array([page is not None for page in pool.states.prefix_index.blocks_of(keys)], dtype=bool)


def with_snapshot(pool: Pool, keys: tuple[bytes, ...], hits: np.ndarray) -> np.ndarray:
    """The leading pages of `hits` (one group) behind whose last block a request can go on."""
    there = np.flatnonzero(snapshot_blocks(pool, keys[: len(hits)]))
    return hits[: there[-1] + 1] if len(there) else hits[:0]


def source_of(states: Pool, waiting: Waiting, hit_blocks: int) -> int:
    """The snapshot of a hit of so many blocks, -1 without one."""
    if hit_blocks == 0:
        return -1
    page = states.prefix_index.block_of(waiting.block_hashes[hit_blocks - 1])
    assert page is not None, "a hit ends at a snapshot"
    return page


def lacking(config: SchedulerConfig, states: Pool, source: int) -> int:
    """The state pages that are missing for a request that starts from this snapshot."""
    revived = source >= 0 and int(states.status.at(np.array([source]))[0]) >= 0
    return max(pages_held(config) + revived - states.free, 0)


def held_for(config: SchedulerConfig, states: Pool, source: int) -> tuple[Pool, np.ndarray]:
    """The state pages with those of one more request (int32[pages_held]). Its snapshot is not among them, and is as good as new."""
    used = np.array([source] if source >= 0 else [], dtype=np.int32)
    states, pages = pools.take(pools.hold(states, used), pages_held(config))
    return pools.release(states, used), pages


def new_column(pages: np.ndarray) -> np.ndarray:
    """The second column of a row that holds these pages (int64[RECURRENT_FIELD_COUNT])."""
    column = np.full(RECURRENT_FIELD_COUNT, -1, dtype=np.int64)
    column[NEWEST_EDGE] = column[DUE] = 0
    column[[LIVE, NEWEST, SPARE][: len(pages)]] = pages
    return column


# ---- pins --------------------------------------------------------------------------------------------------------


def pinned_max(config: SchedulerConfig) -> int:
    """State pages that pins may hold: their share, and none that one request alone needs."""
    if not config.takes_snapshots:
        return 0
    return min(int(config.state_pages * config.pinned_kv_fraction), config.state_pages - pages_held(config) - 1)


def with_pin(config: SchedulerConfig, pool: Pool, key: bytes, end: int) -> Pool:
    """The pool in which the snapshot behind the block of this name is pinned until `end`, as that block is, if there is room."""
    if pool.states is None:
        return pool
    page = np.array([pool.states.prefix_index.block_of(key)], dtype=np.int32)
    return replace(pool, states=pools.pin(pool.states, page, np.array([end]), pinned_max(config)))


def with_pins_of_blocks(config: SchedulerConfig, pool: Pool, ending: Ending) -> Pool:
    """The pool in which no snapshot is pinned whose block is not."""
    states = pool.states
    if states is None or not pools.pinned_count(states):
        return pool
    loose = [page for page in pools.pinned_pages(states).tolist() if not has_pinned_block(config, pool, page)]
    return replace(pool, states=pools.unpin(states, np.array(loose, dtype=np.int32), ending))


def has_pinned_block(config: SchedulerConfig, pool: Pool, page: int) -> bool:
    """Whether the block behind which this snapshot stands is pinned, in one group of layers at least."""
    name = None if pool.states is None else pool.states.prefix_index.hash_of(page)
    names = () if name is None else (group_hash(name, group) for group in range(config.group_count))
    return any(block is not None and pools.is_pinned(pool, block) for block in pool.prefix_index.blocks_of(names))


# ---- steps -------------------------------------------------------------------------------------------------------


def with_copies(state: State, scheduled: StepInFlight, before: list[tuple[int, int]]) -> tuple[State, StepInFlight]:
    """The state and the step with its copies of state pages; `before` are those of admitted requests. Before it names anything."""
    rows, after = state.rows, NO_COPIES
    assert rows.recurrent is not None, "the model has recurrent layers"
    if state.config.takes_snapshots:
        ran = np.isin(rows.id, scheduled.ids)
        due = np.flatnonzero(ran & _is_edge(state.config, rows) & (rows.recurrent[DUE] == 0))
        if len(due):
            recurrent = rows.recurrent.copy()
            recurrent[DUE, due] = rows.computed[due]
            after = recurrent[[LIVE, SPARE]][:, due].T
            state = replace(state, rows=replace(rows, recurrent=recurrent))
    copies = Copies(np.array(before, dtype=np.int64).reshape(-1, 2), after)
    return state, replace(scheduled, copies=copies)


def without_untrue(recurrent: np.ndarray | None, known: np.ndarray, back: np.ndarray) -> np.ndarray | None:
    """The rows' matrix once `back` tokens (int64[R]) are taken back of rows with so many `known` ones: a snapshot beyond those is
    of drafts that were not kept, and gets no name."""
    if recurrent is None or not (untrue := (back > 0) & (recurrent[DUE] >= known)).any():
        return recurrent
    recurrent = recurrent.copy()
    recurrent[DUE, untrue] = 0
    return recurrent


def name_snapshots(state: State) -> State:
    """The state in which each snapshot has a name whose tokens are all known now: the row has hashed the blocks up to there."""
    rows, states = state.rows, state.pool.states
    if states is None or rows.recurrent is None or not rows.recurrent[DUE].any():
        return state
    recurrent, at = rows.recurrent.copy(), rows.hashed_blocks * state.config.block_size
    for row in np.flatnonzero((rows.recurrent[DUE] > 0) & (rows.recurrent[DUE] == at)).tolist():
        _, newest, edge, spare, due = recurrent[:, row].tolist()
        states = pools.insert_hashes(states, [(rows.block_hash(row), spare)])
        if pools.is_pinned(states, newest) and not states.free:  # nothing else is left to write the next one to
            states = pools.unpin(states, np.array([newest], dtype=np.int32), "displaced")
        if edge and (pools.is_pinned(states, newest) or is_kept(state.config, edge, int(rows.prompt[row]))):
            states, pages = pools.take(pools.release(states, np.array([newest], dtype=np.int32)), 1)
            newest = int(pages[0])
        else:
            states = pools.without_name(states, newest)
        recurrent[[NEWEST, NEWEST_EDGE, SPARE, DUE], row] = spare, due, newest, 0
    return replace(state, rows=replace(rows, recurrent=recurrent), pool=replace(state.pool, states=states))
