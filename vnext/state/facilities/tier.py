"""The disk tier: which blocks are also on disk, and the transfers that read some of them back.

A block is written beside the running steps and counts as stored once every rank has it (TierChanged). It comes back by a transfer:
pages are taken from the pool when it begins, and enter the prefix index when it ends. Until then its request waits alone; no step
reads these pages, and a transfer that somebody waits for can be given up at any time, because the pages are still nobody's.
What is on disk is known by name only, so an event of a transfer counts blocks of a request: a redacted log folds as well. A block
that another engine has computed comes back as one from disk does (handover.py).
Snapshots of recurrent layers' states are on disk under the names of their blocks, with bounds of their own. A transfer then ends at
a block that has one: it reads the blocks that memory lacks and, unless memory has it, the snapshot, into a state page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.allocate import prefix_hits
from vnext.state.errors import require
from vnext.state.events import (
    AnyEvent,
    BlocksPromoted,
    PromotionEnded,
    RequestId,
    SnapshotsChanged,
    TierChanged,
    TierOpened,
)
from vnext.state.pool import Pool
from vnext.state.state import State, Tier, Transfer, Waiting
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.store.disk_index import disk_index_of

replace = msgspec.structs.replace
NOBODY = frozenset[int]()


def fold_tier_opened(state: State, event: TierOpened) -> State:
    """The state that knows what is on disk."""
    require(state.config.prefix_caching and not state.config.windows, "a disk tier needs a prefix cache with full attention")
    takes_snapshots = state.config.takes_snapshots
    require(takes_snapshots or not state.config.state_pages, "a disk tier needs snapshots of recurrent layers")
    require(takes_snapshots or not event.snapshots_max, "a disk tier of snapshots needs recurrent layers")
    require(state.tier is None or not state.tier.transfers, "a disk tier is opened while blocks are read from it")
    snapshots = _opened(event.snapshots_max, event.snapshots) if takes_snapshots else None
    begun = 0 if state.tier is None else state.tier.begun
    return replace(state, tier=replace(_opened(event.capacity, event.blocks), begun=begun, snapshots=snapshots))


def _opened(capacity: int, data: bytes) -> Tier:
    names = _names(data)
    require(len(set(names)) == len(names) <= capacity, f"{len(names)} blocks on a disk tier of {capacity}")
    return Tier(capacity=capacity, disk=disk_index_of(names))


def fold_tier_changed(state: State, event: TierChanged) -> State:
    """The state with other blocks on disk."""
    return replace(state, tier=_changed(tier_of(state), event))


def fold_snapshots_changed(state: State, event: SnapshotsChanged) -> State:
    """The state with other snapshots on disk."""
    tier = tier_of(state)
    require(tier.snapshots is not None, "there are no snapshots on a disk without recurrent layers")
    assert tier.snapshots is not None, "required above"
    return replace(state, tier=replace(tier, snapshots=_changed(tier.snapshots, event)))


def _changed(tier: Tier, event: TierChanged) -> Tier:
    """K3: no more than its capacity."""
    gone, kept, stored = _names(event.gone), _names(event.kept), _names(event.stored)
    require(len(set(gone)) == len(gone) and all(name in tier.disk for name in gone), "a block leaves the disk that is not there")
    disk = tier.disk.without(gone)
    require(all(name in disk for name in kept), "a block stays on disk that is not there")
    disk = disk.with_newest((*kept, *stored))
    require(len(disk) <= tier.capacity, f"{len(disk)} blocks on a disk tier of {tier.capacity}")
    return replace(tier, disk=disk, stored=tier.stored + len(stored), gone=tier.gone + len(gone))


def fold_promoted(state: State, event: BlocksPromoted) -> State:
    """The state in which a waiting request's blocks are being read: it holds its hits and the pages for the rest."""
    tier, place = tier_of(state), next((at for at, entry in enumerate(state.waiting) if entry.id == event.id), None)
    require(event.transfer == tier.begun, f"transfer {event.transfer} begins where {tier.begun} is due")
    require(place is not None, f"request {event.id} does not wait")
    entry = state.waiting[place or 0]
    require(entry.transfer < 0, f"request {event.id} has had its transfer")
    require(state.weights is None and not state.paused, "blocks are read in a paused engine, or with other weights")
    hits = held_blocks(state, entry, event.edge)
    count = len(hits) + event.count
    most = entry.hit_blocks_max(state.config.block_size)
    gains = len(prefix_hits(state.config, state.pool, entry)) < count <= most
    require(gains and event.count >= 0, f"{event.count} blocks behind {len(hits)} hits of request {event.id}")
    revived = int((state.pool.status.at(hits) >= 0).sum()) if len(hits) else 0
    require(event.count + revived <= state.pool.free, f"no pages for {event.count} blocks of request {event.id}")
    pool, pages = pools.take(pools.hold(state.pool, hits), event.count)
    pool, page = _state_page(pool, entry.block_hashes[:count], event)
    table = (*hits.tolist(), *pages.tolist())
    transfer = Transfer(event.transfer, event.id, len(hits), entry.block_hashes[:count], table, page)
    waits = replace(entry, transfer=event.transfer)
    tier = replace(tier, begun=tier.begun + 1, transfers=(*tier.transfers, transfer))
    waiting = (*state.waiting[: place or 0], waits, *state.waiting[(place or 0) + 1 :])
    return replace(state, pool=pool, waiting=waiting, tier=tier)


def held_blocks(state: State, entry: Waiting, edge: int = 0) -> np.ndarray:
    """The pages of a request's leading blocks that memory has, behind which a transfer reads: up to block `edge` if it is not 0. A
    hit of recurrent layers may end before them."""
    most = entry.hit_blocks_max(state.config.block_size)
    return pools.longest_prefix(state.pool, entry.block_hashes, min(edge or most, most))


def _state_page(pool: Pool, keys: tuple[bytes, ...], event: BlocksPromoted) -> tuple[Pool, int]:
    """The pool without the state page into which a transfer of these blocks reads a snapshot, and that page, -1 for none."""
    if pool.states is None:
        require(event.edge == 0, f"transfer {event.transfer} reads a snapshot without recurrent layers")
        return pool, -1
    if event.edge == 0:
        is_there = pool.states.prefix_index.block_of(keys[-1]) is not None
        require(is_there, f"transfer {event.transfer} ends at no snapshot")
        return pool, -1
    require(event.edge == len(keys), f"transfer {event.transfer} reads {len(keys)} blocks and a snapshot behind {event.edge}")
    require(pool.states.free > 0, f"no state page for transfer {event.transfer}")
    states, (page,) = pools.take(pool.states, 1)
    return replace(pool, states=states), int(page)


def ending(state: State, event: PromotionEnded) -> Transfer:
    """The transfer that this event ends."""
    transfer = next((each for each in tier_of(state).transfers if each.number == event.transfer), None)
    require(transfer is not None, f"transfer {event.transfer} is not in flight")
    assert transfer is not None, "required above"
    require(0 <= event.count <= transfer.count, f"transfer {event.transfer} ends with {event.count} blocks")
    return transfer


def fold_promotion_ended(state: State, event: PromotionEnded) -> State:
    """The state in which the first `count` blocks of a transfer are in the prefix index, its snapshot if that was read too, and
    nobody holds its pages for it."""
    tier, transfer = tier_of(state), ending(state, event)
    hits, pages = transfer.hits, transfer.pages
    end = min(hits + event.count, len(pages))
    pool = pools.insert_hashes(state.pool, list(zip(transfer.keys[hits:end], pages[hits:end])))
    pool = pools.release(pool, np.array(pages[::-1], dtype=np.int32))
    rest = tuple(each for each in tier.transfers if each.number != event.transfer)
    tier = replace(tier, transfers=rest, promoted=tier.promoted + end - hits)
    if transfer.state >= 0 and pool.states is not None and tier.snapshots is not None:
        came = hits + event.count > end
        pool = replace(pool, states=_with_snapshot(pool.states, transfer, came))
        tier = replace(tier, snapshots=replace(tier.snapshots, promoted=tier.snapshots.promoted + came))
    return replace(state, pool=pool, tier=tier)


def _with_snapshot(states: Pool, transfer: Transfer, came: bool) -> Pool:
    """The state pages without the hold of a transfer, whose snapshot `came`."""
    if came:
        states = pools.insert_hashes(states, [(key, transfer.state) for key in transfer.keys[-1:]])
    return pools.release(states, np.array([transfer.state], dtype=np.int32))


def emptied(tier: Tier | None) -> Tier | None:
    """The tier without any block. Transfers go on, and what they read enters no index."""
    if tier is None:
        return None
    transfers = tuple(replace(each, keys=()) for each in tier.transfers)
    return replace(tier, disk=disk_index_of(()), transfers=transfers, snapshots=emptied(tier.snapshots))


def without_transfers(state: State) -> State:
    """The state behind the loss of all pages: what is on disk stays, and each waiting request may have a transfer again."""
    if state.tier is None:
        return state
    waiting = tuple(replace(entry, transfer=-1) if entry.transfer >= 0 else entry for entry in state.waiting)
    return replace(state, waiting=waiting, tier=replace(state.tier, transfers=()))


def transferring(state: State) -> frozenset[int]:
    """The requests whose blocks are being read, or vectors of their inputs: they wait alone."""
    transfers = () if state.tier is None else state.tier.transfers
    searches = () if state.sought is None else state.sought.searches
    return frozenset((*(each.request for each in transfers), *searches)) if transfers or searches else NOBODY


def tier_of(state: State) -> Tier:
    """What is known of the disk. IllegalEvent without a tier."""
    require(state.tier is not None, "there is no disk tier")
    assert state.tier is not None, "required above"
    return state.tier


def names_in(data: bytes) -> tuple[bytes, ...]:
    """The names (16 bytes each) that follow one another."""
    return tuple(data[at : at + BLOCK_HASH_SIZE] for at in range(0, len(data), BLOCK_HASH_SIZE))


def _names(data: bytes) -> tuple[bytes, ...]:
    require(len(data) % BLOCK_HASH_SIZE == 0, f"{len(data)} bytes are no names of blocks")
    return names_in(data)


def illegal(state: State) -> Iterator[AnyEvent]:
    """No transfer begins out of turn, for a stranger or twice, none ends that is not in flight, and no block leaves a disk that is
    not there."""
    begun = 0 if state.tier is None else state.tier.begun
    yield BlocksPromoted(transfer=begun, id=RequestId(state.next_id), count=1)
    yield PromotionEnded(transfer=begun)
    yield TierChanged(gone=bytes(BLOCK_HASH_SIZE))
    yield TierChanged(stored=b"short")
    yield SnapshotsChanged(gone=bytes(BLOCK_HASH_SIZE))
    for entry in state.waiting[:1]:
        yield BlocksPromoted(transfer=begun + 1, id=entry.id, count=1)
        yield BlocksPromoted(transfer=begun, id=entry.id, count=0 if entry.transfer < 0 else 1)
        beyond = (entry.known - 1) // state.config.block_size + 1
        yield BlocksPromoted(transfer=begun, id=entry.id, count=beyond)
        yield BlocksPromoted(transfer=begun, id=entry.id, count=beyond, edge=beyond)


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {
    TierOpened: fold_tier_opened,
    TierChanged: fold_tier_changed,
    SnapshotsChanged: fold_snapshots_changed,
    BlocksPromoted: fold_promoted,
    PromotionEnded: fold_promotion_ended,
}
