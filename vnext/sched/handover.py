"""Hand-over: which prompt's blocks go to another engine now, and what both engines must agree on. Pure.

A prompt that is computed for another engine is handed over in the step that computes the last of its full blocks: ranks read the
pages behind that step, while its request still holds them. With recurrent layers that is where its last snapshot is.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vnext.state.events import BlocksHandedOver, BlocksReceived, RequestId
from vnext.state.facilities.handover import handed_over, row_of, snapshot_of
from vnext.state.facilities.tier import names_in
from vnext.state.state import Request, State, root_of


def next_hand_over(state: State, wanted: Collection[int]) -> BlocksHandedOver | None:
    """The hand-over that is due, of a request whose blocks are `wanted`; None if there is none."""
    rows, size = state.rows, state.config.block_size
    for id_ in wanted:
        row = row_of(state, RequestId(id_))
        if row is None:
            continue
        count = (int(rows.prompt[row]) - 1) // size
        if 0 < count <= int(rows.hashed_blocks[row]):
            event = BlocksHandedOver(id=RequestId(id_), count=count)
            if state.pool.states is None or snapshot_of(state, handed_over(state, event)[0]) >= 0:
                return event
    return None


class Handed(msgspec.Struct, frozen=True):
    """What an engine knows of a request at its hand-over: its prompt (int32 bytes), the parent hash of its first block, and the
    names of the blocks that leave or come."""

    prompt: bytes
    root: bytes
    names: tuple[bytes, ...]

    @property
    def request(self) -> tuple[bytes, bytes]:
        """What is the same in both engines."""
        return self.prompt, self.root


def leaving(before: State, event: BlocksHandedOver) -> Handed:
    """The request whose blocks leave in this state."""
    return _handed(before, before.requests[event.id], handed_over(before, event)[0])


def coming(before: State, event: BlocksReceived) -> Handed | None:
    """The request whose blocks come in this state, None if it has ended meanwhile."""
    transfers = before.tier.transfers if before.tier else ()
    ids = [each.request for each in transfers if each.number == event.transfer]
    if not ids or ids[0] not in before.requests:
        return None
    return _handed(before, before.requests[ids[0]], names_in(event.names))


def _handed(state: State, request: Request, names: tuple[bytes, ...]) -> Handed:
    return Handed(request.prompt, root_of(state, request), names)
