"""Pools of pages as a snapshot keeps them: the queue and the names of the cache's blocks, and of the states of recurrent layers;
and the clients, whose queues and rows are those of a state's requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.pool import Pool, free_blocks
from vnext.state.state import Copies, State
from vnext.state.store import extents, fields
from vnext.state.store.clients import Client, ClientClass, ClientKey, Clients, no_clients
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.store.pins import Pins
from vnext.state.store.prefix_index import prefix_index_of
from vnext.state.store.versions import VersionedArray, VersionedMap

QUEUE_RATIO_MAX = 64
NOBODY = -1
PIN_COUNTS = ("pinned", "expired", "displaced", "yielded", "dropped")


class StoredPages(Protocol):
    """The fields that a snapshot has of any pool."""

    @property
    def head(self) -> int: ...
    @property
    def queue_capacity(self) -> int: ...
    @property
    def queue(self) -> bytes: ...
    @property
    def named(self) -> bytes: ...
    @property
    def keys(self) -> bytes: ...


class StoredPins(msgspec.Struct, frozen=True, array_like=True):
    """The pins: `counts` are how many pages were pinned and how many pins have ended in each way, `pages` (int32 bytes) the pinned
    pages and `ends` (int64 bytes) when their pins end."""

    counts: tuple[int, ...]
    pages: bytes
    ends: bytes


class StoredStates(msgspec.Struct, frozen=True, array_like=True):
    """The pages for the states of recurrent layers: `queue` as that of a snapshot, `rows` int64[5, R], `named` and `keys` the
    snapshots among them, `copies` (int64[n, 2] before and after) of each step in flight, and the pins of snapshots."""

    head: int
    queue_capacity: int
    queue: bytes
    rows: bytes
    named: bytes
    keys: bytes
    copies: tuple[tuple[bytes, bytes], ...]
    pins: StoredPins | None = None


def stored_states(state: State) -> StoredStates | None:
    """What a snapshot keeps of recurrent layers, None without."""
    pool, rows = state.pool.states, state.rows.recurrent
    if pool is None or rows is None:
        return None
    names = pool.prefix_index.keys()
    copies = tuple((each.before.tobytes(), each.after.tobytes()) for step in state.in_flight if (each := step.copies))
    keys, named = b"".join(filter(None, names)), indexed_blocks(names).tobytes()
    queue, pins = stored_queue(pool).tobytes(), stored_pins(pool.pins)
    return StoredStates(pool.head, pool.queue.capacity, queue, rows.tobytes(), named, keys, copies, pins)


def stored_pins(pins: Pins | None) -> StoredPins | None:
    """What a snapshot keeps of pins, None without."""
    if pins is None:
        return None
    pages = pins.first_to_leave()
    counts = tuple(getattr(pins, name) for name in PIN_COUNTS)
    return StoredPins(counts, pages.tobytes(), pins.ends.at(pages).tobytes())


def pins_of(frame: StoredPins | None, page_count: int) -> Pins | None:
    """The pins of which `frame` was made, None without."""
    if frame is None:
        return None
    pages, ends = np.frombuffer(frame.pages, dtype=np.int32), np.zeros(page_count, dtype=np.int64)
    require(not len(pages) or 0 <= pages.min() <= pages.max() < page_count, "a page is pinned that does not exist")
    ends[pages] = np.frombuffer(frame.ends, dtype=np.int64)
    counts = dict(zip(PIN_COUNTS, frame.counts, strict=True))
    return Pins(ends=VersionedArray(ends), count=len(pages), **counts)


def recurrent_of(frame: StoredStates | None, config: SchedulerConfig, row_count: int) -> np.ndarray | None:
    """The rows' matrix of recurrent layers (int64[5, R]), None without such layers. ValueError for another model's."""
    require((frame is None) == (config.state_pages == 0), "its states are those of another model")
    if frame is None:
        return None
    return np.frombuffer(frame.rows, dtype=np.int64).reshape(fields.RECURRENT_FIELD_COUNT, row_count)


def copies_of(frame: StoredStates) -> tuple[Copies, ...]:
    """The copies of each step in flight."""
    return tuple(Copies(*(np.frombuffer(each, dtype=np.int64).reshape(-1, 2) for each in both)) for both in frame.copies)


def indexed_blocks(names: list[bytes | None]) -> np.ndarray:
    """Blocks that have a name, in rising order (int32[n]), from the names of all blocks."""
    return np.array([block for block, name in enumerate(names) if name is not None], dtype=np.int32)


def stored_queue(pool: Pool) -> np.ndarray:
    """The places from the head of the pool's queue on, NOBODY where one is stale (int32[n])."""
    queue = np.full(pool.queue.used - pool.head, NOBODY, dtype=np.int32)
    free = free_blocks(pool)
    queue[pool.status.at(free) - pool.head] = free
    return queue


def pages_of(frame: StoredPages, page_count: int, held: np.ndarray) -> Pool:
    """The pool of which `frame` was made; `held` (int[n]) are its pages once for each holder, other than pins."""
    places = np.frombuffer(frame.queue, dtype=np.int32)
    valid = (places != NOBODY).nonzero()[0]
    blocks = np.frombuffer(frame.named, dtype=np.int32).tolist()
    keys = [frame.keys[at : at + BLOCK_HASH_SIZE] for at in range(0, len(frame.keys), BLOCK_HASH_SIZE)]
    status = -np.bincount(held, minlength=page_count)
    status[places[valid]] = frame.head + valid
    used = frame.head + len(places)
    require(len(status) == page_count and min(blocks, default=0) >= 0, "a block that does not exist")
    require(len(frame.keys) == BLOCK_HASH_SIZE * len(blocks), "a name of another length")
    require(0 <= frame.head <= used <= frame.queue_capacity <= QUEUE_RATIO_MAX * page_count, "another queue of blocks")
    queue = extents.own(extents.empty(frame.queue_capacity), used)
    return Pool(
        status=VersionedArray(status),
        queue=extents.write(queue, slice(frame.head, used), places),
        head=frame.head,
        free=len(valid),
        kept=int(np.count_nonzero(status[blocks] >= 0)),
        prefix_index=prefix_index_of(dict(zip(keys, blocks, strict=True)), page_count),
    )


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


# ---- clients -----------------------------------------------------------------------------------------------------


class StoredClients(msgspec.Struct, frozen=True, array_like=True):
    """(priority, number, charged) of the clients that live, in rising order; (priority, number, service) of those that are
    remembered, longest first; (priority, least service of the next one that is lifted). `alone`, `unit`: as in Clients."""

    live: tuple[tuple[int, int, int], ...]
    idle: tuple[tuple[int, int, int], ...]
    next_starts: tuple[tuple[int, int], ...]
    alone: tuple[int, int] | None = None
    unit: int = 1


def stored_clients(clients: Clients) -> StoredClients:
    return StoredClients(
        live=tuple(sorted((*key, client.charged) for key, client in clients.live.items())),
        idle=tuple((*key, service) for key, service in clients.idle.items()),
        next_starts=tuple(sorted((priority, group.next_start) for priority, group in clients.classes.items())),
        alone=clients.alone,
        unit=clients.unit,
    )


def renumbered(stored: StoredClients, number_of: Callable[[int], int]) -> StoredClients:
    live, idle = (
        tuple((priority, number_of(number), tokens) for priority, number, tokens in some) for some in (stored.live, stored.idle)
    )
    alone = stored.alone and (stored.alone[0], number_of(stored.alone[1]))
    return StoredClients(tuple(sorted(live)), idle, stored.next_starts, alone, stored.unit)


def clients_of(
    stored: StoredClients | None, config: SchedulerConfig, keys: Mapping[Any, ClientKey], running: Sequence[int]
) -> Clients | None:
    """The clients of a state with these live requests, of which `running` are in the batch and the others wait. None where the
    policy takes no turns. A snapshot from before there were any has been charged nothing."""
    if (clients := no_clients(config.policy)) is None:
        return None
    stored = stored or StoredClients((), (), ())
    if stored.alone:
        return msgspec.structs.replace(clients, alone=stored.alone, unit=stored.unit)
    rows, queues = Counter(keys[id_] for id_ in running), defaultdict[ClientKey, list[int]](list)
    for id_ in sorted(set(keys).difference(running)):
        queues[keys[id_]].append(id_)
    charged = dict.fromkeys(sorted(set(keys.values())), 0)
    charged |= {(priority, number): tokens for priority, number, tokens in stored.live}
    counts, starts = Counter(priority for priority, _ in charged), dict(stored.next_starts)
    return Clients(
        live=VersionedMap({key: Client(tokens, rows[key], tuple(queues[key])) for key, tokens in charged.items()}),
        idle={(priority, number): tokens for priority, number, tokens in stored.idle},
        classes={priority: ClientClass(live=count, next_start=starts.get(priority, 0)) for priority, count in counts.items()},
        unit=stored.unit,
    )
