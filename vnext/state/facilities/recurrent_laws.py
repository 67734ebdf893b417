"""Laws of the states of recurrent layers: what each state page is, and what is copied where (recurrent.py)."""

from __future__ import annotations

import numpy as np

from vnext.state.block_hash import leading_hashes
from vnext.state.errors import LawBroken
from vnext.state.pool import free_blocks, pinned_pages
from vnext.state.preempt import row_tokens
from vnext.state.recurrent import has_pinned_block, pages_held, pinned_max
from vnext.state.state import State, root_of
from vnext.state.store import columns
from vnext.state.store.fields import LIVE, NEWEST, SPARE


def _hold(condition: bool, law: str, message: str) -> None:
    if not condition:
        raise LawBroken(law, message)


def snapshots_are_of_their_tokens(state: State) -> None:
    """N1: the name of a row's newest snapshot, if it has one, is that of the row's tokens up to it."""
    rows, recurrent, size = state.rows, state.rows.recurrent, state.config.block_size
    if (states := state.pool.states) is None or recurrent is None or not state.config.takes_snapshots:
        return
    for row, (_, newest, edge, spare, due) in enumerate(recurrent.T.tolist()):
        name = states.prefix_index.hash_of(newest)
        root = root_of(state, state.requests[int(rows.id[row])])
        right = leading_hashes(root, row_tokens(state, row).tobytes(), size, edge // size)[-1:]
        _hold(name is None or right == (name,), "N1", f"the snapshot of row {row} has another name than its {edge} tokens")
        known = int(rows.hashed_blocks[row]) * size
        _hold(not due or known < due <= rows.computed[row], "N1", f"row {row} has hashed {known} tokens and waits to name {due}")
        _hold(states.prefix_index.hash_of(spare) is None, "N1", f"the spare page {spare} of row {row} has a name")


def state_pages_are_of_one_row(state: State) -> None:
    """N2: a state page belongs to one row at most, and the one that its steps write has no name."""
    states, recurrent = state.pool.states, state.rows.recurrent
    there = (states is not None, recurrent is not None)
    _hold(there == (state.config.state_pages > 0,) * 2, "N2", "the state pages do not go with the configuration")
    if states is None or recurrent is None:
        return
    held, count = _held(recurrent), pages_held(state.config)
    _hold(len(held) == count * len(state.rows), "N2", f"{len(state.rows)} rows hold {len(held)} state pages, not {count} each")
    _hold(len(np.unique(held)) == len(held), "N2", "two rows hold one state page")
    named = states.prefix_index.count(recurrent[LIVE].tolist())
    _hold(named == 0, "N2", f"{named} rows write pages that have names")


def copies_do_not_alias(state: State) -> None:
    """N3: the copies on one side of a step write each page once, and none reads a page that it or an earlier one has written."""
    for step in state.in_flight:
        for side in () if step.copies is None else (step.copies.before.tolist(), step.copies.after.tolist()):
            written = set[int]()
            for source, target in side:
                _hold(target not in written, "N3", f"step {step.step} copies twice into page {target}")
                written.add(target)
                _hold(source not in written, "N3", f"step {step.step} copies page {source} behind what it copies into it")


def state_pages_are_conserved(state: State) -> None:
    """N4: a state page is held by its row, by a transfer alone, or it is queued once."""
    if (pool := state.pool.states) is None or state.rows.recurrent is None:
        return
    held, queued = _held(state.rows.recurrent), len(free_blocks(pool))
    read = [each.state for each in (state.tier.transfers if state.tier else ()) if each.state >= 0]
    right = np.bincount(np.concatenate((held, pinned_pages(pool), read)).astype(np.int64), minlength=pool.page_count)
    is_right = len(right) == pool.page_count and bool((right == pool.ref).all())
    _hold(is_right, "N4", "holders of state pages are not rows, transfers and pins")
    alone = all(right[page] == 1 and pool.prefix_index.hash_of(page) is None for page in read)
    _hold(alone, "N4", f"the state pages {read} are being read, and have a name or another owner")
    _hold(queued == pool.free, "N4", f"{queued} state pages are queued, {pool.free} are counted as free")
    count = int(np.count_nonzero(right))
    _hold(queued + count == pool.page_count, "N4", f"{queued} free and {count} held of {pool.page_count}")
    kept = pool.prefix_index.named() - pool.prefix_index.count(right.nonzero()[0].tolist())
    _hold(kept == pool.kept, "N4", f"{kept} snapshots are kept, {pool.kept} are counted")
    _hold(pool.status.hash == columns.impl.array_hash(pool.status.values()), "N4", "the sum of the pages' status is another")
    _hold(pool.prefix_index.is_mutual(), "N4", "a snapshot is known by another name")


def pinned_snapshots_are_of_pinned_blocks(state: State) -> None:
    """N5: pins hold their share of state pages at most, snapshots of pinned blocks."""
    if (states := state.pool.states) is None or states.pins is None:
        return
    pages = pinned_pages(states)
    _hold(len(pages) == states.pins.count <= pinned_max(state.config), "N5", f"{len(pages)} state pages are pinned")
    loose = [page for page in pages.tolist() if not has_pinned_block(state.config, state.pool, page)]
    _hold(not loose, "N5", f"the state pages {loose} are pinned, and the blocks before them are not")


def _held(recurrent: np.ndarray) -> np.ndarray:
    pages = recurrent[[LIVE, NEWEST, SPARE]].reshape(-1)
    return pages[pages >= 0]


ALL = (
    snapshots_are_of_their_tokens, state_pages_are_of_one_row, copies_do_not_alias, state_pages_are_conserved,
    pinned_snapshots_are_of_pinned_blocks,
)  # fmt: skip
