"""The disk tier of a simulation: slow, failing, full, lying and hanging disks, from the scenario's seed; other engines, which
have the blocks of some requests or of half of one, and get those of others; vectors of inputs; and the event clock.

Owns what is on disk, which outlives ranks and engines, and when it answers. The shadow cache has the contents (rank.py): a block
that a lying disk has damaged is found by its checksum, as on a real rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from tests.sim.deciding import DecidingCore
from tests.sim.scenario import Client, Disk
from vnext.sched.encoding import next_search
from vnext.sched.engine import Source
from vnext.sched.handover import next_hand_over
from vnext.sched.pinning import next_tick, next_yield, tick_due_s
from vnext.sched.tiering import evictions, next_cancellation, next_promotion
from vnext.sim.rank_values import BEHIND
from vnext.sim.rng import Rng
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AnyEvent,
    BlocksPromoted,
    BlocksReceived,
    InputsFound,
    InputsSought,
    PromotionEnded,
    RequestId,
    SnapshotsChanged,
    TierChanged,
    TierOpened,
)
from vnext.state.facilities.sought import lacking_places
from vnext.state.pool import Pool, indexed_since
from vnext.state.state import State, Tier, Transfer
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE

HANG_US = 20_000
"""After so long the engine core gives a transfer up."""
SPREAD = 37
"""Spreads neighbouring requests over all percents."""


class Stored(NamedTuple):
    """Blocks of which the disk says that they are written, and snapshots, whose names end with BEHIND."""

    names: tuple[bytes, ...]


class ReadBack(NamedTuple):
    """The disk's answer to a transfer: how many blocks are right, and the name of one that is not, b"" for none."""

    transfer: int
    blocks: int
    bad: bytes


Answer = Stored | ReadBack


class SimTier(Source):
    """One disk under all engines of a run, and what they hand over. Mutable.

    `damaged` are the blocks that it has, and has not as they were written."""

    goes_out = True

    def __init__(self, disk: Disk, rng: Rng, damaged: set[bytes], takes_snapshots: bool) -> None:
        self._disk, self._rng, self.damaged, self._takes_snapshots = disk, rng, damaged, takes_snapshots
        self._promoted: BlocksPromoted | None = None
        self._coming: list[tuple[int, Answer]] = []
        self.blocks: dict[bytes, None] = {}
        self._received: set[int] = set()
        self._left: set[int] = set()
        self._seen: Pool | None = None

    def opened(self) -> TierOpened:
        """What an engine finds that starts; the first of it where that is too much, and sometimes less."""
        self._seen = self._promoted = None
        self._received.clear()
        self._left.clear()
        names, most = [name for name in self.blocks if not self._rng.happens(self._disk.fails)], self._disk.capacity
        blocks, snapshots = _apart(names)
        opened = TierOpened(capacity=most, blocks=b"".join(blocks[-most:]))
        return replace(opened, snapshots_max=most, snapshots=b"".join(snapshots[-most:])) if self._takes_snapshots else opened

    def next_event(self, state: State) -> AnyEvent | None:
        """Hand over, begin and give up transfers; behind these, have complete blocks written."""
        if self._promoted is not None and state.tier is not None and state.tier.transfers:
            self._coming.append(self._began(state.tier.transfers[-1], self._promoted))
        event = self._handed_over(state) or self._moved(state)
        self._promoted = event if isinstance(event, BlocksPromoted) else None
        if event is None and (written := self._written(state)) is not None:
            self._coming.append(written)
        return event

    def coming(self) -> Sequence[tuple[int, Answer]]:
        """The answers that come, each once, and after how many us."""
        coming, self._coming = self._coming, []
        return coming

    def _moved(self, state: State) -> BlocksPromoted | PromotionEnded | None:
        if state.tier is None:
            return None
        return next_cancellation(state) or next_promotion(state, self._of_peers(entry.id for entry in state.waiting))

    def _of_peers(self, ids: Iterable[int]) -> set[int]:
        """Those of these requests that another engine has something to do with."""
        return {id_ for id_ in ids if id_ * SPREAD % 100 < self._disk.peers}

    def _handed_over(self, state: State) -> AnyEvent | None:
        """The next prompt that is computed for others, each once."""
        ids = state.rows.id.tolist() if self._disk.peers else ()
        event = next_hand_over(state, self._of_peers(ids) - self._left)
        if event is not None:
            self._left.add(event.id)
        return event

    def _began(self, transfer: Transfer, event: BlocksPromoted) -> tuple[int, ReadBack]:
        """How long a transfer takes, and how it ends."""
        rng = self._rng
        if rng.happens(self._disk.hangs):
            return HANG_US, ReadBack(event.transfer, 0, b"")
        if self._of_peers((event.id,)):
            self._received.add(event.transfer)
            return 1 + rng.below(self._disk.slow_us), self._receive(transfer)
        return 1 + rng.below(self._disk.slow_us), self._read(transfer)

    def _read(self, transfer: Transfer) -> ReadBack:
        wanted = [*transfer.keys[transfer.hits :], *(key + BEHIND for key in transfer.keys[-1:] if transfer.state >= 0)]
        for count, key in enumerate(wanted):
            if key in self.damaged or key not in self.blocks or self._rng.happens(self._disk.fails):
                return ReadBack(transfer.number, count, key)
        return ReadBack(transfer.number, len(wanted), b"")

    def _receive(self, transfer: Transfer) -> ReadBack:
        """All that another engine has, or a part of it."""
        count = transfer.count
        return ReadBack(transfer.number, self._rng.below(count + 1) if self._rng.happens(30) else count, b"")

    def _written(self, state: State) -> tuple[int, Stored] | None:
        """Which blocks that have become complete the disk takes, and after how long; None for none."""
        rng, seen = self._rng, self._seen
        self._seen = state.pool
        if state.tier is None or state.weights is not None or seen is state.pool:
            return None
        came = [key for key in _came(state.pool, seen) if key not in state.tier.disk]
        if (snapshots := state.tier.snapshots) is not None and state.pool.states is not None:
            newer = _came(state.pool.states, seen and seen.states)
            came += [key + BEHIND for key in newer if key not in snapshots.disk]
        names = tuple(key for key in came if not rng.happens(self._disk.fails))
        for name in names:
            if name not in self.blocks:
                self.damaged.discard(name)
                if rng.happens(self._disk.lies):
                    self.damaged.add(name)
        return (1 + rng.below(self._disk.slow_us), Stored(names)) if names else None

    def events(self, core: DecidingCore, answer: Answer) -> tuple[AnyEvent, ...]:
        """The events of an answer; none of one that is too late."""
        tier = core.state.tier
        if tier is None:
            return ()
        if isinstance(answer, ReadBack):
            ended = PromotionEnded(transfer=answer.transfer, count=answer.blocks)
            if all(each.number != answer.transfer for each in tier.transfers):
                core.require_refused(ended)
                return ()
            if answer.transfer in self._received:
                return (self._come(core, tier, answer),)
            (bad, behind), there = _apart([answer.bad] if answer.bad else []), tier.snapshots
            gone = [TierChanged(gone=name) for name in bad if name in tier.disk]
            return (ended, *gone, *(SnapshotsChanged(gone=name) for name in behind if there is not None and name in there.disk))
        (blocks, snapshots), pool = _apart(answer.names), core.state.pool
        return (*self._stored(core, tier, pool, blocks), *self._stored(core, tier.snapshots, pool.states, snapshots))

    def _come(self, core: DecidingCore, tier: Tier, answer: ReadBack) -> PromotionEnded:
        """The end of a transfer from another engine. H1: no block comes under a name that its request does not have there."""
        transfer = next(each for each in tier.transfers if each.number == answer.transfer)
        names = transfer.keys[transfer.hits : transfer.hits + answer.blocks]
        if not transfer.keys or not answer.blocks:
            return PromotionEnded(transfer=answer.transfer)
        checksums = bytes(BLOCK_HASH_SIZE * answer.blocks)
        came = BlocksReceived(transfer=answer.transfer, count=answer.blocks, names=b"".join(names), checksums=checksums)
        stale = bytes(byte ^ 1 for byte in transfer.keys[-1])
        core.require_refused(replace(came, names=b"".join((*names[:-1], stale))))
        core.require_refused(replace(came, checksums=b""))
        return came

    def _stored(self, core: DecidingCore, tier: Tier | None, pool: Pool | None, names: list[bytes]) -> tuple[AnyEvent, ...]:
        """Of blocks and their pool, or of snapshots and theirs."""
        if tier is None or pool is None or core.state.weights is not None:
            return ()
        names = [name for name in names if name not in tier.disk][: tier.capacity]
        if not names:
            return ()
        changed, behind = (TierChanged, b"") if tier is core.state.tier else (SnapshotsChanged, BEHIND)
        gone, kept = evictions(tier, pool, len(names))
        if len(tier.disk) == tier.capacity:
            core.require_refused(changed(stored=b"".join(names)))
        self.blocks.update(dict.fromkeys(name + behind for name in names))
        for name in gone:
            self.blocks.pop(name + behind, None)
        return (changed(stored=b"".join(names), gone=b"".join(gone), kept=b"".join(kept)),)


def _apart(names: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Those of blocks, and those of snapshots by the names of their blocks."""
    known = list(names)
    blocks = [name for name in known if len(name) == BLOCK_HASH_SIZE]
    return blocks, [name.removesuffix(BEHIND) for name in known if len(name) > BLOCK_HASH_SIZE]


def _came(pool: Pool, older: Pool | None) -> Iterable[bytes]:
    """The names in a pool's index that were not in an older one's, or all of them."""
    return pool.prefix_index.blocks() if older is None else dict(indexed_since(pool, older))


class SimClock(Source):
    """The event clock of a simulation, at `now_us`: `second_us` of virtual time are a second, 0 for no clock. Its readings may be
    wrong by `error_us`, a minute at most, and then go back."""

    goes_out = True

    def __init__(self, second_us: int, error_us: int, rng: Rng) -> None:
        self._second_us, self._error_us, self._rng = second_us, min(error_us, 60 * second_us), rng
        self.now_us, self.is_on = 0, second_us > 0

    def next_event(self, state: State) -> AnyEvent | None:
        """The tick or the yield that is due; None for none."""
        seconds = (self.now_us + self._rng.between(-self._error_us, self._error_us)) // self._second_us
        return next_tick(state, seconds, _is_retaining(state)) or next_yield(state)

    def wake(self, state: State, at: Callable[[int, Literal["wake"], None], None]) -> None:
        """Have the engine core wake `at` the end of the next pin."""
        due_s = tick_due_s(state, False) if self._second_us else None
        if due_s is not None:
            at(max(self.now_us + 1, due_s * self._second_us), "wake", None)


def _is_retaining(state: State) -> bool:
    return any(request.sampling.retention for _, request in state.requests.items())


# ---- what a seed draws -------------------------------------------------------------------------------------------


def as_kept(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """Memory that has room for some requests and not for all prefixes."""
    return replace(
        config, prefix_caching=True, windows=(), block_size=rng.choose((1, 2, 2, 4)), page_count=rng.between(24, 48),
        max_model_len=24, max_num_seqs=rng.between(2, 6),
    )  # fmt: skip


def returning(rng: Rng, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests further apart, the later half of which often begins as one of the earlier half did."""
    half, found = len(clients) // 2, list[Client]()
    for place, client in enumerate(clients):
        if place >= half and rng.happens(60):
            client = replace(client, prompt=clients[place - half].prompt, cache_salt=clients[place - half].cache_salt)
        found.append(replace(client, arrival_us=9 * client.arrival_us))
    return tuple(found)


def draw_disk(rng: Rng) -> Disk:
    """Small and large ones, each with some of the faults."""

    def class_of(percent: int) -> int:
        return rng.between(1, percent) if rng.happens(50) else 0

    return Disk(
        capacity=rng.choose((0, 1, 4, 16, 100, 1000, 1000)), fails=class_of(15), lies=class_of(60), hangs=class_of(15),
        slow_us=rng.choose((1, 20, 20, 100, 1000)),
    )  # fmt: skip


# ---- vectors of inputs ---------------------------------------------------------------------------------------------
# Ranks look for those of most requests in files, late, and find some of them.

SEARCH_US = 400
"""How long a search takes at most."""
HANGS, FOUND, ASKED = 5, 60, 80
"""Percentages: of searches, those without an answer; of inputs, those in files; of requests, those whose inputs ranks look for."""


class SimSearches(Source):
    """Those of one engine. Mutable."""

    goes_out = True

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._coming: list[tuple[int, InputsFound]] = []

    def next_event(self, state: State) -> InputsSought | None:
        """The next search, in the order of the queue."""
        sought = state.sought
        known = set() if sought is None else {*sought.searches, *(id_ for id_, _ in sought.found)}
        fresh = [entry.id for entry in state.waiting if entry.id not in known and entry.id * SPREAD % 100 < ASKED]
        event = next_search(state, fresh)
        if event is not None:
            places = tuple(place for place in sorted(lacking_places(state, event.id)) if self._rng.happens(FOUND))
            hangs = self._rng.happens(HANGS)
            answer = HANG_US if hangs else 1 + self._rng.below(SEARCH_US), InputsFound(id=event.id, places=() if hangs else places)
            self._coming.append(answer)
        return event

    def coming(self) -> Sequence[tuple[int, InputsFound]]:
        """The answers that come, each once, and after how many us."""
        coming, self._coming = self._coming, []
        return coming


def found(core: DecidingCore, answer: InputsFound) -> tuple[InputsFound, ...]:
    """The event of an answer; none of one that comes for somebody who has left, or too late."""
    if core.state.sought is not None and answer.id in core.state.sought.searches and RequestId(answer.id) in core.state.requests:
        return (answer,)
    core.require_refused(answer)
    return ()
