"""The disk tier, as the engine core runs it: asks the ranks to write blocks, and makes events of what they have done.

Decisions are those of vnext/sched/tiering.py. A block is written soon after it is complete, so that a process which is killed loses
few; memory is its buffer: one that leaves memory before its turn is not written. Ranks write WINDOW blocks at a time. Blocks that
another engine has handed over come by a transfer too, which only differs in where ranks read. Of snapshots of recurrent layers one
is written at a time, and none while a running request may go on to a newer one that takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from vnext.media.vectors import DISK_SHARE
from vnext.runtime.engine.facility import NO_ERRORS, Facility, Send
from vnext.runtime.protocol.messages import BlocksRead, BlocksWritten, RankReady
from vnext.runtime.protocol.stats import TierStats
from vnext.runtime.transport.ring.broadcast import FetchBlocks, StoreBlocks, encode_fetch, encode_store
from vnext.sched.tiering import evictions, next_cancellation, next_promotion
from vnext.state.events import BlocksPromoted, BlocksReceived, PromotionEnded, SnapshotsChanged, TierChanged, TierOpened
from vnext.state.facilities.tier import names_in
from vnext.state.pool import Pool, indexed_since, is_pinned
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
    bytes_each, snapshot_bytes = (sum(each) for each in zip(*((rank.file_bytes, rank.snapshot_bytes) for rank in found)))
    if ranks[0].model.reads_inputs:
        disk_bytes -= disk_bytes // DISK_SHARE
    most = disk_bytes // 2 if snapshot_bytes else disk_bytes
    capacity, snapshots_max = (most // each if each else 0 for each in (bytes_each, snapshot_bytes))
    blocks = _shared([each.blocks for each in found], capacity)
    snapshots = _shared([each.snapshots for each in found], snapshots_max)
    return TierOpened(capacity=capacity, blocks=blocks, snapshots_max=snapshots_max, snapshots=snapshots)


def _shared(found: Sequence[bytes], most: int) -> bytes:
    """The newest of the names that all ranks have, oldest first."""
    shared = set.intersection(*(set(names_in(each)) for each in found))
    names = [name for name in names_in(found[0]) if name in shared]
    return b"".join(names[max(0, len(names) - most) :])


class Backlog:
    """What of one pool is to be written: names in the order in which they came. Mutable."""

    def __init__(self) -> None:
        self._seen: Pool | None = None
        self.names: dict[bytes, None] = {}
        self.missed = 0

    def clear(self) -> None:
        self._seen = None
        self.names.clear()

    def look(self, pool: Pool, tier: Tier) -> None:
        """Find what has come since the last look, or anew."""
        if pool is not self._seen:
            came = pool.prefix_index.blocks() if self._seen is None else dict(indexed_since(pool, self._seen))
            self.names.update((name, None) for name in came if name not in tier.disk)
            self._seen = pool

    def take(self, pool: Pool, tier: Tier) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """The next few, with their pages."""
        found = list[tuple[bytes, int]]()
        while self.names and len(found) < WINDOW:
            name = next(iter(self.names))
            del self.names[name]
            page = pool.prefix_index.block_of(name)
            if page is not None and name not in tier.disk:
                found.append((name, page))
            self.missed += page is None
        return tuple(name for name, _ in found), tuple(page for _, page in found)

    def take_settled(self, states: Pool, tier: Tier) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """The next snapshot that no row holds as its newest, with its page; those that gave way to newer ones are forgotten."""
        for name, page in zip(list(self.names), states.prefix_index.blocks_of(list(self.names))):
            if page is not None and name not in tier.disk and (states.ref[page] == 0 or is_pinned(states, page)):
                del self.names[name]
                return (name,), (page,)
            if page is None or name in tier.disk:
                del self.names[name]
        return (), ()


class Reads:
    """The transfers that ranks are at: what each of them has read, from disk or of another engine. Mutable. `tickets`: those of
    requests whose prompts another engine has computed; each is taken from it once. `bad`: what was not on disk as it was written.
    """

    def __init__(self, world_size: int, tickets: dict[int, str]) -> None:
        self._world_size, self.tickets = world_size, tickets
        self.began_s: dict[int, float] = {}
        self._answers: dict[int, dict[int, BlocksRead]] = {}
        self._fetched: set[int] = set()
        self.bad: list[tuple[type[TierChanged], bytes]] = []
        self.received = self.absent = self.given_up = 0

    def clear(self) -> None:
        """Nobody answers what was asked."""
        for each in (self.began_s, self._answers, self._fetched):
            each.clear()

    def answered(self, message: BlocksRead) -> None:
        if message.transfer in self.began_s:
            self._answers.setdefault(message.transfer, {})[message.rank] = message

    def ended(self, tier: Tier) -> PromotionEnded | None:
        """The end of a transfer that all ranks have made, or that takes too long."""
        for transfer in tier.transfers:
            answers = self._answers.get(transfer.number, {})
            if len(answers) == self._world_size:
                blocks = len(transfer.pages) - transfer.hits
                kinds = ((SnapshotsChanged if answer.count == blocks else TierChanged, answer.bad) for answer in answers.values())
                self.bad += [each for each in kinds if each[1]]
                count = min(answer.count for answer in answers.values())
                if transfer.number in self._fetched:
                    return self._received_from_peer(transfer, count, [answers[rank] for rank in range(self._world_size)])
                return self._over(transfer.number, count)
            if time.monotonic() - self.began_s[transfer.number] > PATIENCE_S:
                self.given_up += 1
                return self._over(transfer.number, 0)
        return None

    def _received_from_peer(self, transfer: Transfer, count: int, answers: Sequence[BlocksRead]) -> PromotionEnded:
        """The end of a transfer from another engine: what all ranks have, by name and checksum."""
        self.absent += transfer.count - count
        ended = self._over(transfer.number, count if transfer.keys else 0)
        if not ended.count:
            return ended
        self.received += count
        by_block = list(zip(*(names_in(answer.checksums) for answer in answers)))[:count]
        checksums = b"".join(checksum for block in by_block for checksum in block)
        names = b"".join(transfer.keys[transfer.hits : transfer.hits + count])
        return BlocksReceived(transfer=transfer.number, count=count, names=names, checksums=checksums)

    def cancelled(self, state: State) -> PromotionEnded | None:
        event = next_cancellation(state)
        if event is not None:
            self.given_up += 1
            self._over(event.transfer, 0)
        return event

    def _over(self, number: int, count: int) -> PromotionEnded:
        self.began_s.pop(number, None)
        self._answers.pop(number, None)
        self._fetched.discard(number)
        return PromotionEnded(transfer=number, count=count)

    def begun(self, state: State) -> tuple[BlocksPromoted | None, str]:
        """The next transfer, and the ticket for its blocks; "" where ranks read them from disk."""
        for id_ in [id_ for id_ in self.tickets if id_ not in state.requests]:
            del self.tickets[id_]
        if (event := next_promotion(state, self.tickets)) is None:
            return None, ""
        self.began_s[event.transfer] = time.monotonic()
        if ticket := self.tickets.pop(event.id, ""):
            self._fetched.add(event.transfer)
        return event, ticket


class TierTransfers(Facility):
    """What is being written and read."""

    answers = BlocksRead, BlocksWritten
    asks_behind = True

    def __init__(self, world_size: int, send: Send, opened: TierOpened, tickets: dict[int, str] | None = None) -> None:
        """`opened`: what the ranks have on disk. `tickets`: as of Reads."""
        self._reads = Reads(world_size, {} if tickets is None else tickets)
        self._opened: TierOpened | None = opened
        self._world_size = world_size
        self._blocks, self._snapshots = Backlog(), Backlog()
        self._next: deque[TierChanged] = deque()
        self._errors = self._damaged = 0
        self.begin_again(send, ())

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """Their pages are empty, and nobody answers what was asked. Where one of them has no disk, the tier has room for no block
        from now on."""
        if any(ready.disk is None for ready in ranks):
            self._opened = TierOpened(capacity=0)
        self._send = send
        self._reads.clear()
        self.lose_steps()

    def lose_steps(self) -> None:
        """Ranks have written none of what they were asked for: it is asked again, as far as it is complete."""
        self._asked = b"", b""
        self._written: dict[int, BlocksWritten] = {}
        self._blocks.clear()
        self._snapshots.clear()

    def wait_ms(self, state: State) -> int | None:
        """A transfer in flight may take too long."""
        return LOOK_MS if self._reads.began_s else None

    def answered(self, message: BlocksRead | BlocksWritten, state: State) -> Mapping[int, str]:
        if isinstance(message, BlocksRead):
            self._reads.answered(message)
        elif (message.blocks, message.snapshots) == self._asked:
            self._written[message.rank] = message
        return NO_ERRORS

    def next_event(self, state: State) -> TierEvent | None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            return opened
        tier = state.tier
        assert tier is not None, "asked of an engine with a disk tier"
        if self._reads.bad:
            self._take_bad(tier)
        if not self._next and len(self._written) == self._world_size:
            self._take_written(state, tier)
        if self._next:
            return self._next.popleft()
        if (event := self._reads.ended(tier) or self._reads.cancelled(state)) is not None:
            return event
        begun, ticket = self._reads.begun(state)
        if begun is not None and ticket:
            self._send(encode_fetch(FetchBlocks(transfer=begun.transfer, ticket=ticket)))
        return begun

    def ask(self, state: State) -> None:
        """Have blocks written that have become complete, unless the ranks are at it."""
        assert state.tier is not None, "asked of an engine with a disk tier"
        pool, tier = state.pool, state.tier
        if state.weights is not None or self._errors or not tier.capacity:
            self._blocks.names.clear()
            self._snapshots.names.clear()
            return
        self._blocks.look(pool, tier)
        if tier.snapshots is not None and pool.states is not None and tier.snapshots.capacity:
            self._snapshots.look(pool.states, tier.snapshots)
        if any(self._asked) or not (self._blocks.names or self._snapshots.names):
            return
        names, pages = self._blocks.take(pool, tier)
        behind, state_pages = tuple[bytes, ...](), tuple[int, ...]()
        if tier.snapshots is not None and pool.states is not None:
            behind, state_pages = self._snapshots.take_settled(pool.states, tier.snapshots)
        if names or behind:
            self._asked = b"".join(names), b"".join(behind)
            self._send(encode_store(StoreBlocks(self._asked[0], pages, self._asked[1], state_pages)))

    def stats(self, state: State) -> dict[str, object]:
        if (tier := state.tier) is None:
            return {}
        stats = TierStats(
            blocks=len(tier.disk), capacity=tier.capacity, stored=tier.stored, promoted=tier.promoted, gone=tier.gone,
            damaged=self._damaged, missed=self._blocks.missed, errors=self._errors, given_up=self._reads.given_up,
            received=self._reads.received, absent=self._reads.absent,
        )  # fmt: skip
        if (snapshots := tier.snapshots) is not None:
            counts = len(snapshots.disk), snapshots.capacity, snapshots.promoted
            stats = replace(stats, **dict(zip(("snapshots", "snapshots_max", "snapshots_promoted"), counts)))
        return {"tier": stats}

    def _take_bad(self, tier: Tier) -> None:
        """What is not on disk as it was written leaves."""
        bad, self._reads.bad = dict.fromkeys(self._reads.bad), []
        self._damaged += len(bad)
        for shelf, changed in ((tier, TierChanged), (tier.snapshots, SnapshotsChanged)):
            gone = [name for kind, name in bad if kind is changed and shelf is not None and name in shelf.disk]
            self._next += [changed(gone=b"".join(gone))] if gone else []

    def _take_written(self, state: State, tier: Tier) -> None:
        """What all ranks have written, and what leaves for it."""
        answers, self._written, (blocks, snapshots) = list(self._written.values()), {}, self._asked
        self._asked = b"", b""
        self._store(state, TierChanged, (tier, state.pool), blocks, [each.stored for each in answers])
        if tier.snapshots is not None and state.pool.states is not None:
            shelf = tier.snapshots, state.pool.states
            self._store(state, SnapshotsChanged, shelf, snapshots, [each.snapshots_stored for each in answers])

    def _store(
        self, state: State, changed: type[TierChanged], shelf: tuple[Tier, Pool], asked: bytes, answers: Sequence[bytes]
    ) -> None:
        (tier, pool), sets = shelf, [set(names_in(answer)) for answer in answers]
        stored = [name for name in names_in(asked) if all(name in each for each in sets)][: tier.capacity]
        self._errors += len(names_in(asked)) - len(stored)
        if state.weights is None and (stored := [name for name in stored if name not in tier.disk]):
            gone, kept = evictions(tier, pool, len(stored))
            self._next.append(changed(stored=b"".join(stored), gone=b"".join(gone), kept=b"".join(kept)))
