"""The disk tier: which blocks are also on disk, and the transfers that read some of them back.

A block is written beside the running steps and counts as stored once every rank has it (TierChanged). It comes back by a transfer:
pages are taken from the pool when it begins, and enter the prefix index when it ends. Until then its request waits alone; no step
reads these pages, and a transfer that somebody waits for can be given up at any time, because the pages are still nobody's.
What is on disk is known by name only, so an event of a transfer counts blocks of a request: a redacted log folds as well. A block
that another engine has computed comes back as one from disk does (handover.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.allocate import prefix_hits
from vnext.state.errors import require
from vnext.state.events import AnyEvent, BlocksPromoted, PromotionEnded, RequestId, TierChanged, TierOpened
from vnext.state.state import State, Tier, Transfer, Waiting
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.store.disk_index import disk_index_of

replace = msgspec.structs.replace


def fold_tier_opened(state: State, event: TierOpened) -> State:
    """The state that knows what is on disk."""
    require(state.config.prefix_caching and not state.config.windows, "a disk tier needs a prefix cache with full attention")
    require(not state.config.state_pages, "a disk tier has no states of recurrent layers")
    require(state.tier is None or not state.tier.transfers, "a disk tier is opened while blocks are read from it")
    names = _names(event.blocks)
    require(len(set(names)) == len(names) <= event.capacity, f"{len(names)} blocks on a disk tier of {event.capacity}")
    begun = 0 if state.tier is None else state.tier.begun
    return replace(state, tier=Tier(capacity=event.capacity, disk=disk_index_of(names), begun=begun))


def fold_tier_changed(state: State, event: TierChanged) -> State:
    """The state with other blocks on disk: K3, no more than its capacity."""
    tier, gone, kept, stored = tier_of(state), _names(event.gone), _names(event.kept), _names(event.stored)
    require(len(set(gone)) == len(gone) and all(name in tier.disk for name in gone), "a block leaves the disk that is not there")
    disk = tier.disk.without(gone)
    require(all(name in disk for name in kept), "a block stays on disk that is not there")
    disk = disk.with_newest((*kept, *stored))
    require(len(disk) <= tier.capacity, f"{len(disk)} blocks on a disk tier of {tier.capacity}")
    return replace(state, tier=replace(tier, disk=disk, stored=tier.stored + len(stored), gone=tier.gone + len(gone)))


def fold_promoted(state: State, event: BlocksPromoted) -> State:
    """The state in which a waiting request's blocks are being read: it holds its hits and the pages for the rest."""
    tier, place = tier_of(state), next((at for at, entry in enumerate(state.waiting) if entry.id == event.id), None)
    require(event.transfer == tier.begun, f"transfer {event.transfer} begins where {tier.begun} is due")
    require(place is not None, f"request {event.id} does not wait")
    entry = state.waiting[place or 0]
    require(entry.transfer < 0, f"request {event.id} has had its transfer")
    require(state.weights is None and not state.paused, "blocks are read in a paused engine, or with other weights")
    hits = prefix_hits(state.config, state.pool, entry)
    count = len(hits) + event.count
    most = (entry.known - 1) // state.config.block_size if entry.reads_cache else 0
    require(len(hits) < count <= most, f"{event.count} blocks behind {len(hits)} hits of request {event.id}")
    revived = int((state.pool.status.at(hits) >= 0).sum()) if len(hits) else 0
    require(event.count + revived <= state.pool.free, f"no pages for {event.count} blocks of request {event.id}")
    pool, pages = pools.take(pools.hold(state.pool, hits), event.count)
    transfer = Transfer(event.transfer, event.id, len(hits), entry.block_hashes[:count], (*hits.tolist(), *pages.tolist()))
    waits = replace(entry, transfer=event.transfer)
    tier = replace(tier, begun=tier.begun + 1, transfers=(*tier.transfers, transfer))
    waiting = (*state.waiting[: place or 0], waits, *state.waiting[(place or 0) + 1 :])
    return replace(state, pool=pool, waiting=waiting, tier=tier)


def ending(state: State, event: PromotionEnded) -> Transfer:
    """The transfer that this event ends."""
    transfer = next((each for each in tier_of(state).transfers if each.number == event.transfer), None)
    require(transfer is not None, f"transfer {event.transfer} is not in flight")
    assert transfer is not None, "required above"
    fitting = 0 <= event.count <= len(transfer.pages) - transfer.hits
    require(fitting, f"transfer {event.transfer} ends with {event.count} blocks")
    return transfer


def fold_promotion_ended(state: State, event: PromotionEnded) -> State:
    """The state in which the first `count` blocks of a transfer are in the prefix index, and nobody holds its pages for it."""
    tier, transfer = tier_of(state), ending(state, event)
    hits, pages = transfer.hits, transfer.pages
    end = hits + event.count
    pool = pools.insert_hashes(state.pool, list(zip(transfer.keys[hits:end], pages[hits:end])))
    pool = pools.release(pool, np.array(pages[::-1], dtype=np.int32))
    rest = tuple(each for each in tier.transfers if each.number != event.transfer)
    tier = replace(tier, transfers=rest, promoted=tier.promoted + event.count)
    return replace(state, pool=pool, tier=tier)


def emptied(tier: Tier | None) -> Tier | None:
    """The tier without any block. Transfers go on, and what they read enters no index."""
    if tier is None:
        return None
    transfers = tuple(replace(each, keys=()) for each in tier.transfers)
    return replace(tier, disk=disk_index_of(()), transfers=transfers)


def without_transfers(state: State) -> State:
    """The state behind the loss of all pages: what is on disk stays, and each waiting request may have a transfer again."""
    if state.tier is None:
        return state
    waiting = tuple(replace(entry, transfer=-1) if entry.transfer >= 0 else entry for entry in state.waiting)
    return replace(state, waiting=waiting, tier=replace(state.tier, transfers=()))


def transferring(state: State) -> frozenset[int]:
    """The requests whose blocks are being read."""
    if state.tier is None or not state.tier.transfers:
        return frozenset()
    return frozenset(each.request for each in state.tier.transfers)


def is_transferring(state: State, entry: Waiting) -> bool:
    """Whether this waiting request's blocks are being read."""
    return entry.transfer >= 0 and entry.id in transferring(state)


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
    for entry in state.waiting[:1]:
        yield BlocksPromoted(transfer=begun + 1, id=entry.id, count=1)
        yield BlocksPromoted(transfer=begun, id=entry.id, count=0 if entry.transfer < 0 else 1)
        yield BlocksPromoted(transfer=begun, id=entry.id, count=(entry.known - 1) // state.config.block_size + 1)


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {
    TierOpened: fold_tier_opened,
    TierChanged: fold_tier_changed,
    BlocksPromoted: fold_promoted,
    PromotionEnded: fold_promotion_ended,
}
