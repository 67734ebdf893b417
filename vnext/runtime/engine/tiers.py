"""The disk tier, as the engine core runs it: asks the ranks to write blocks, and makes events of what they have done.

Decisions are those of vnext/sched/tiering.py. A block is written soon after it is complete, so that a process which is killed loses
few; memory is its buffer: one that leaves memory before its turn is not written. Ranks write WINDOW blocks at a time. Blocks that
another engine has handed over come by a transfer too, which only differs in where ranks read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from vnext.runtime.engine.facility import NO_ERRORS, Facility, Send
from vnext.runtime.protocol.messages import BlocksRead, BlocksWritten, RankReady
from vnext.runtime.protocol.stats import TierStats
from vnext.runtime.transport.ring.broadcast import FetchBlocks, StoreBlocks, encode_fetch, encode_store
from vnext.sched.tiering import evictions, next_cancellation, next_promotion
from vnext.state.events import BlocksPromoted, BlocksReceived, PromotionEnded, TierChanged, TierOpened
from vnext.state.facilities.tier import names_in
from vnext.state.pool import Pool, indexed_since
from vnext.state.state import State, Tier, Transfer

WINDOW = 8
LOOK_MS, PATIENCE_S = 1000, 10.0
"""A transfer that takes longer is given up: its request computes the blocks."""
TierEvent = TierOpened | TierChanged | BlocksPromoted | PromotionEnded


def opening(ranks: Sequence[RankReady], disk_bytes: int) -> TierOpened | None:
    """What all ranks have on disk, as far as it fits; None without a disk tier, or where a rank has none. An engine that only has
    blocks of others has one without room."""
    found = [ready.disk for ready in ranks if ready.disk is not None]
    if not found or len(found) < len(ranks):
        return None
    bytes_each = sum(each.file_bytes for each in found)
    capacity = disk_bytes // bytes_each if bytes_each else 0
    shared = set.intersection(*(set(names_in(each.blocks)) for each in found))
    names = [name for name in names_in(found[0].blocks) if name in shared]
    return TierOpened(capacity=capacity, blocks=b"".join(names[max(0, len(names) - capacity) :]))


class TierTransfers(Facility):
    """What is being written and read."""

    answers = BlocksRead, BlocksWritten
    asks_behind = True

    def __init__(self, world_size: int, send: Send, opened: TierOpened, tickets: dict[int, str] | None = None) -> None:
        """`opened`: what the ranks have on disk. `tickets`: those of requests whose prompts another
        engine has computed; each is taken from it once."""
        self._tickets = {} if tickets is None else tickets
        self._fetched: set[int] = set()
        self._received = self._absent = 0
        self._opened: TierOpened | None = opened
        self._world_size = world_size
        self._seen: Pool | None = None
        self._pending: dict[bytes, None] = {}
        self._bad: list[bytes] = []
        self._errors = self._given_up = self._missed = self._damaged = 0
        self.begin_again(send, ())

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """Their pages are empty, and nobody answers what was asked. Where one of them has no disk, the tier has room for no block
        from now on."""
        if any(ready.disk is None for ready in ranks):
            self._opened = TierOpened(capacity=0)
        self._send, self._asked = send, b""
        self._written: dict[int, BlocksWritten] = {}
        self._read: dict[int, dict[int, BlocksRead]] = {}
        self._began_s: dict[int, float] = {}
        self._pending.clear()
        self._fetched.clear()
        self._seen = None

    def lose_steps(self) -> None:
        """Ranks have written none of what they were asked for: it is asked again, as far as it is complete."""
        self._asked, self._seen = b"", None
        self._written.clear()
        self._pending.clear()

    def wait_ms(self, state: State) -> int | None:
        """A transfer in flight may take too long."""
        return LOOK_MS if self._began_s else None

    def answered(self, message: BlocksRead | BlocksWritten, state: State) -> Mapping[int, str]:
        if isinstance(message, BlocksRead):
            if message.transfer in self._began_s:
                self._read.setdefault(message.transfer, {})[message.rank] = message
        elif message.blocks == self._asked:
            self._written[message.rank] = message
        return NO_ERRORS

    def next_event(self, state: State) -> TierEvent | None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            return opened
        tier = state.tier
        assert tier is not None, "asked of an engine with a disk tier"
        if self._bad and (gone := [name for name in self._take_bad() if name in tier.disk]):
            return TierChanged(gone=b"".join(gone))
        if len(self._written) == self._world_size and (changed := self._stored(state, tier)) is not None:
            return changed
        return self._ended(tier) or self._cancelled(state) or self._promoted(state)

    def ask(self, state: State) -> None:
        """Have blocks written that have become complete, unless the ranks are at it."""
        assert state.tier is not None, "asked of an engine with a disk tier"
        pool, index = state.pool, state.pool.prefix_index
        if state.weights is not None or self._errors or not state.tier.capacity:
            self._pending.clear()
            return
        if pool is not self._seen:
            came = index.blocks() if self._seen is None else dict(indexed_since(pool, self._seen))
            self._pending.update((key, None) for key in came if key not in state.tier.disk)
            self._seen = pool
        if self._asked or not self._pending:
            return
        names, pages = list[bytes](), list[int]()
        while self._pending and len(names) < WINDOW:
            name = next(iter(self._pending))
            del self._pending[name]
            page = index.block_of(name)
            if page is not None and name not in state.tier.disk:
                names.append(name)
                pages.append(page)
            self._missed += page is None
        if names:
            self._asked = b"".join(names)
            self._send(encode_store(StoreBlocks(blocks=self._asked, pages=tuple(pages))))

    def stats(self, state: State) -> dict[str, object]:
        if (tier := state.tier) is None:
            return {}
        stats = TierStats(
            blocks=len(tier.disk), capacity=tier.capacity, stored=tier.stored, promoted=tier.promoted, gone=tier.gone,
            damaged=self._damaged, missed=self._missed, errors=self._errors, given_up=self._given_up,
            received=self._received, absent=self._absent,
        )  # fmt: skip
        return {"tier": stats}

    def _take_bad(self) -> list[bytes]:
        bad, self._bad = list(dict.fromkeys(self._bad)), []
        self._damaged += len(bad)
        return bad

    def _stored(self, state: State, tier: Tier) -> TierChanged | None:
        """What all ranks have written, and what leaves for it."""
        answers, self._written, self._asked = self._written, {}, b""
        sets = [set(names_in(answer.stored)) for answer in answers.values()]
        asked = names_in(answers[0].blocks)
        stored = [name for name in asked if all(name in each for each in sets)][: tier.capacity]
        self._errors += len(asked) - len(stored)
        if state.weights is not None or not (stored := [name for name in stored if name not in tier.disk]):
            return None
        gone, kept = evictions(state, len(stored))
        return TierChanged(stored=b"".join(stored), gone=b"".join(gone), kept=b"".join(kept))

    def _ended(self, tier: Tier) -> PromotionEnded | None:
        """The end of a transfer that all ranks have made, or that takes too long."""
        for transfer in tier.transfers:
            answers = self._read.get(transfer.number, {})
            if len(answers) == self._world_size:
                self._bad += [answer.bad for answer in answers.values() if answer.bad]
                count = min(answer.count for answer in answers.values())
                if transfer.number in self._fetched:
                    return self._received_from_peer(transfer, count, [answers[rank] for rank in range(self._world_size)])
                return self._over(transfer.number, count)
            if time.monotonic() - self._began_s[transfer.number] > PATIENCE_S:
                self._given_up += 1
                return self._over(transfer.number, 0)
        return None

    def _received_from_peer(self, transfer: Transfer, count: int, answers: Sequence[BlocksRead]) -> PromotionEnded:
        """The end of a transfer from another engine: what all ranks have, by name and checksum."""
        self._absent += len(transfer.pages) - transfer.hits - count
        ended = self._over(transfer.number, count if transfer.keys else 0)
        if not ended.count:
            return ended
        self._received += count
        by_block = list(zip(*(names_in(answer.checksums) for answer in answers)))[:count]
        checksums = b"".join(checksum for block in by_block for checksum in block)
        names = b"".join(transfer.keys[transfer.hits : transfer.hits + count])
        return BlocksReceived(transfer=transfer.number, count=count, names=names, checksums=checksums)

    def _cancelled(self, state: State) -> PromotionEnded | None:
        event = next_cancellation(state)
        if event is not None:
            self._given_up += 1
            self._over(event.transfer, 0)
        return event

    def _over(self, number: int, count: int) -> PromotionEnded:
        self._began_s.pop(number, None)
        self._read.pop(number, None)
        self._fetched.discard(number)
        return PromotionEnded(transfer=number, count=count)

    def _promoted(self, state: State) -> BlocksPromoted | None:
        for id_ in [id_ for id_ in self._tickets if id_ not in state.requests]:
            del self._tickets[id_]
        event = next_promotion(state, self._tickets)
        if event is not None:
            self._began_s[event.transfer] = time.monotonic()
            if ticket := self._tickets.pop(event.id, ""):
                self._fetched.add(event.transfer)
                self._send(encode_fetch(FetchBlocks(transfer=event.transfer, ticket=ticket)))
        return event
