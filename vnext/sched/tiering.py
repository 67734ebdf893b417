"""Tiering: which blocks are read from disk, which transfers are given up, and which blocks leave the disk. Pure.

A waiting request whose next blocks are on disk has them read before it joins the batch, if memory has room for it and for all
better ones. One whose prompt another engine has computed has its blocks read from there. Nobody else waits for a disk: while a
transfer holds pages that a running request or the best waiting one needs, the newest transfer is given up, and its request computes
what it would have read.
With recurrent layers a transfer ends at the last block whose snapshot can be had, and reads that too if memory lacks it.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from vnext.sched.admission import admitted_max, chunk
from vnext.sched.ranking import places_best_first
from vnext.state.allocate import fits, hit_tokens_of, prefix_hits
from vnext.state.events import BlocksPromoted, PromotionEnded, RequestId
from vnext.state.expected import expected_work
from vnext.state.facilities.tier import held_blocks, transferring
from vnext.state.pool import Pool
from vnext.state.recurrent import lacking, pages_held, source_of
from vnext.state.state import State, Tier, Waiting, blocks_for

LOOKAHEAD = 16
"""The number of waiting requests, best first, for which blocks may be read."""
SPARED_MAX = 256
"""The number of old blocks that an eviction passes over because memory has them too."""


def next_promotion(state: State, of_peers: Collection[int] = ()) -> BlocksPromoted | None:
    """The transfer that begins now; None if there is none to begin. `of_peers`: those requests
    of which another engine has all blocks."""
    tier = state.tier
    if tier is None or not state.waiting or state.paused or state.weights or state.cautious:
        return None
    if not (len(tier.disk) or (tier.snapshots and len(tier.snapshots.disk)) or of_peers):
        return None
    size, moving, states = state.config.block_size, transferring(state), state.pool.states
    free, free_states = state.pool.free - expected_work(state).pages_sum, 0 if states is None else states.free
    for place in places_best_first(state, min(admitted_max(state), LOOKAHEAD)):
        entry = state.waiting[place]
        if entry.id in moving:
            continue
        hits = prefix_hits(state.config, state.pool, entry)
        held = int((state.pool.status.at(hits) < 0).sum()) if len(hits) else 0
        free, free_states = free - blocks_for(entry.known, size) + held, free_states - pages_held(state.config)
        if min(free, free_states) < 0:
            return None
        count, edge = _elsewhere(state, tier, entry, len(hits), entry.id in of_peers)
        if edge and not free_states:
            return None
        if count or edge:
            return BlocksPromoted(transfer=tier.begun, id=RequestId(entry.id), count=count, edge=edge)
    return None


def _elsewhere(state: State, tier: Tier, entry: Waiting, hits: int, is_peers: bool) -> tuple[int, int]:
    """How many blocks behind those in memory a request can have from disk, or from another engine, and behind how many a snapshot.
    None if it has had a transfer in this wait."""
    if entry.transfer >= 0:
        return 0, 0
    keys, states = entry.block_hashes[: entry.hit_blocks_max(state.config.block_size)], state.pool.states
    first = end = hits if states is None else len(held_blocks(state, entry))
    for key in keys[first:]:
        if not is_peers and key not in tier.disk:
            break
        end += 1
    if states is None or tier.snapshots is None:
        return end - first, 0
    for edge in range(end, hits, -1):
        if edge > first and states.prefix_index.block_of(keys[edge - 1]) is not None:
            return edge - first, 0
        if is_peers or keys[edge - 1] in tier.snapshots.disk:
            return max(edge - first, 0), edge
    return 0, 0


def next_cancellation(state: State) -> PromotionEnded | None:
    """The end of the newest transfer if somebody else needs its pages; None if nobody does."""
    if state.tier is None or not state.tier.transfers:
        return None
    work = expected_work(state)
    if work.pages_sum > state.pool.free or _is_in_the_way(state, work.tokens_sum, work.pages_sum):
        return PromotionEnded(transfer=state.tier.transfers[-1].number)
    return None


def _is_in_the_way(state: State, running_tokens: int, running_pages: int) -> bool:
    """Whether the best waiting request that has no transfer finds too few pages."""
    config, moving = state.config, transferring(state)
    budget = config.max_num_batched_tokens - running_tokens
    places = places_best_first(state, len(moving) + 1) if budget > 0 and admitted_max(state) > 0 else ()
    entry = next((state.waiting[place] for place in places if state.waiting[place].id not in moving), None)
    if entry is None:
        return False
    hits = prefix_hits(config, state.pool, entry)
    tokens = chunk(config, entry.known - hit_tokens_of(config, hits), budget)
    behind_rows = replace(state.pool, free=state.pool.free - running_pages)
    return tokens > 0 and (not fits(config, behind_rows, hits, tokens) or _takes_state_page(state, entry, len(hits)))


def _takes_state_page(state: State, entry: Waiting, hits: int) -> bool:
    """Whether the request finds too few state pages, while a transfer holds one."""
    states, is_held = state.pool.states, any(each.state >= 0 for each in (state.tier.transfers if state.tier else ()))
    return is_held and states is not None and lacking(state.config, states, source_of(states, entry, hits)) > 0


def evictions(tier: Tier, pool: Pool, coming: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The blocks that leave the disk so that `coming` more fit, and those that count as new again: blocks that memory, `pool`, has
    too leave last, because a beginning that many requests share is old on disk and read from memory. Snapshots likewise."""
    excess = len(tier.disk) + coming - tier.capacity
    if excess <= 0:
        return (), ()
    gone, spared = list[bytes](), list[bytes]()
    for name in tier.disk.oldest_first():
        if len(spared) < SPARED_MAX and pool.prefix_index.block_of(name) is not None:
            spared.append(name)
            continue
        gone.append(name)
        if len(gone) == excess:
            return tuple(gone), tuple(spared)
    missing = excess - len(gone)
    return (*gone, *spared[:missing]), tuple(spared[missing:])
