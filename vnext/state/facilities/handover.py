"""Hand-over: blocks of a prompt that go to another engine, and those that come from one.

A block that another engine has computed comes by a transfer, as one from disk does (tier.py), and the event that ends the
transfer names it. Pages that leave are read between two steps, and nobody waits for them. With recurrent layers the snapshot behind
the last block leaves with it, and comes as the last of a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vnext.state.block_hash import block_hashes
from vnext.state.errors import require
from vnext.state.events import AnyEvent, BlocksHandedOver, BlocksReceived, RequestId
from vnext.state.facilities.tier import ending, fold_promotion_ended
from vnext.state.state import State, root_of
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.windows import row_blocks


def fold_received(state: State, event: BlocksReceived) -> State:
    """As a transfer from disk ends, with the names that the request's blocks have."""
    transfer = ending(state, event)
    _require_names(event, b"".join(transfer.keys[transfer.hits : transfer.hits + event.count]))
    return fold_promotion_ended(state, event)


def _require_names(event: BlocksReceived, names: bytes) -> None:
    """A block that another engine has computed of other tokens, with another salt, adapter or weights, has another name."""
    require(event.count > 0 and event.names == names, f"transfer {event.transfer} brings blocks that its request does not have")
    fitting = len(event.checksums) > 0 and len(event.checksums) % (BLOCK_HASH_SIZE * event.count) == 0
    require(fitting, f"transfer {event.transfer} has {len(event.checksums)} bytes of checksums for {event.count} blocks")


def fold_handed_over(state: State, event: BlocksHandedOver) -> State:
    """The same state: pages are read between two steps, and nobody waits for them. H1: they are complete and of the prompt."""
    require(state.config.prefix_caching and not state.config.windows, "a hand-over needs a prefix cache with full attention")
    row = row_of(state, event.id)
    require(row is not None, f"request {event.id} does not run, and blocks of it are handed over")
    rows, size = state.rows, state.config.block_size
    most = (int(rows.prompt[row or 0]) - 1) // size
    require(0 < event.count <= most, f"{event.count} blocks of request {event.id}, whose prompt has {most} to hand over")
    require(event.count <= int(rows.hashed_blocks[row or 0]), f"request {event.id} hands over blocks that are not complete")
    there = state.pool.states is None or snapshot_of(state, handed_over(state, event)[0]) >= 0
    require(there, f"request {event.id} hands over {event.count} blocks behind which no snapshot is")
    return state


def row_of(state: State, id_: RequestId) -> int | None:
    """The row of a running request, None for one that does not run."""
    found = np.flatnonzero(state.rows.id == id_)
    return int(found[0]) if len(found) else None


def handed_over(state: State, event: BlocksHandedOver) -> tuple[tuple[bytes, ...], np.ndarray]:
    """The names of the blocks that are handed over in this state, and their pages (int32[count])."""
    request = state.requests[event.id]
    row = row_of(state, event.id)
    assert row is not None, "the fold requires it"
    names = block_hashes(root_of(state, request), request.prompt, state.config.block_size)
    return names[: event.count], row_blocks(state, row)[: event.count]


def snapshot_of(state: State, names: tuple[bytes, ...]) -> int:
    """The state page of the snapshot behind the last of these blocks, -1 if there is none."""
    page = None if state.pool.states is None else state.pool.states.prefix_index.block_of(names[-1])
    return -1 if page is None else page


def illegal(state: State) -> Iterator[AnyEvent]:
    """No blocks leave of a request that waits, none at all, and none that are not complete."""
    rows = state.rows
    for entry in state.waiting[:1]:
        yield BlocksHandedOver(id=entry.id, count=1)
    for id_, hashed, prompt in zip(*(column[-1:].tolist() for column in (rows.id, rows.hashed_blocks, rows.prompt))):
        yield BlocksHandedOver(id=id_, count=0)
        yield BlocksHandedOver(id=id_, count=1 + min(hashed, (prompt - 1) // state.config.block_size))


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {BlocksHandedOver: fold_handed_over, BlocksReceived: fold_received}
