"""Snapshots: a whole state as bytes, so that a log can be folded from the start of any of its segments.

Owns the selection of a state's contents and their restoration. Positions inside arenas are not stored: a loaded state
responds to every later event as the original does, and its digests are the same.
"""

from __future__ import annotations

from itertools import zip_longest

import msgspec
import numpy as np

from vnext.log import log_bytes
from vnext.log.log_plain import WIDTH_MAX
from vnext.log.stored_pages import (
    StoredClients,
    StoredPins,
    StoredStates,
    clients_of,
    copies_of,
    indexed_blocks,
    pages_of,
    pins_of,
    recurrent_of,
    stored_clients,
    stored_pins,
    stored_queue,
    stored_states,
)  # fmt: skip
from vnext.state.allocate import TOKENS_SPARE
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import Pause, RequestId
from vnext.state.facilities.draft_costs import costs_of, with_costs
from vnext.state.facilities.shortage import lowered
from vnext.state.facilities.tier import names_in
from vnext.state.laws import check
from vnext.state.params import Sampling
from vnext.state.pool import Pool
from vnext.state.state import (
    Copies,
    Counters,
    Encoding,
    Request,
    Slot,
    Sought,
    State,
    StepInFlight,
    Tier,
    Transfer,
    Waiting,
    Weights,
    label_of,
)
from vnext.state.store import extents, fields
from vnext.state.store.clients import Clients
from vnext.state.store.columns_numpy import BLOCK_HASH_SIZE
from vnext.state.store.disk_index import disk_index_of
from vnext.state.store.extents import Extents
from vnext.state.store.rows import Rows
from vnext.state.store.versions import VersionedMap
from vnext.state.waiting_queue import entry_of, queue_hash
from vnext.state.windows import NULL, held_entries

ARENA_PLACES_MIN = 1 << 12
KEPT_FIELDS = (*range(fields.STRUCTURE_FIELD_COUNT), fields.BLOCK_HASH_0, fields.BLOCK_HASH_1)
DRAFTLESS_COUNTERS = 7
"""The leading counters, which every engine has; the others count drafts."""


class LiveRequest(msgspec.Struct, frozen=True, array_like=True):
    """A live request: what never changes of it, and all its known tokens (int32 bytes; packed when encoded)."""

    id: RequestId
    name: str
    sampling: Sampling
    priority: int
    arrival_ns: int
    root: bytes
    prompt_length: int
    tokens: bytes
    client: int = 0
    weight: int = 1


class StoredTier(msgspec.Struct, frozen=True, array_like=True):
    """The disk tier: `counts` are capacity, begun, stored, gone and promoted, `blocks` the names on disk, oldest first, `asked` the
    waiting requests that have had a transfer, each with its number. `snapshots`: those on disk, None without recurrent layers."""

    counts: tuple[int, int, int, int, int]
    blocks: bytes
    transfers: tuple[Transfer, ...]
    asked: tuple[tuple[int, int], ...]
    snapshots: StoredTier | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A state's content. Columns are little-endian bytes.

    `lives` are the rows' requests in running order, then the queue's; `waits` (preemption_count, cached) of the latter. `fields`
    names the columns of `cells` int64[fields, R]; `tables` int32 are the rows' whole tables, one after the other.
    `in_flight` are (step, entries int64[4, n], samples bool[n]). `queue` int32 are the places from `head` on, NOBODY
    where one is stale; `named` int32 are the blocks with a name, in rising order, `keys` their names. With speculation,
    `drafting` is the rows' second matrix and `drafts` int64[n] those of each step in flight. `slots` are the adapters',
    `cautious`, `paused`, `weights`, `tier`, `clock`, `pins`, `clients` and `states` are the state's; by `draft_costs` it decides.
    `lowered`: while memory is short, the tokens that a step may take, and those before. `encoding` and `sought` are the state's.
    """

    sequence: int
    next_id: int
    planned: int
    committed: int
    token_digest: int
    counters: tuple[int, ...]
    lives: tuple[LiveRequest, ...]
    waits: tuple[tuple[int, int], ...]
    fields: tuple[str, ...]
    cells: bytes
    tables: bytes
    in_flight: tuple[tuple[int, bytes, bytes], ...]
    head: int
    queue_capacity: int
    queue: bytes
    named: bytes
    keys: bytes
    width: int = WIDTH_MAX
    drafting: bytes = b""
    drafts: tuple[bytes, ...] = ()
    slots: tuple[Slot | None, ...] = ()
    cautious: int = 0
    paused: Pause = ""
    weights: Weights | None = None
    tier: StoredTier | None = None
    clock: int = 0
    pins: StoredPins | None = None
    clients: StoredClients | None = None
    states: StoredStates | None = None
    draft_costs: tuple[int, int, int] | None = None
    lowered: tuple[int, int] | None = None
    encoding: Encoding | None = None
    sought: Sought | None = None


class BadSnapshot(Exception):
    """Bytes that are not a state of this engine."""


_decoder = msgspec.msgpack.Decoder(Snapshot)


# ---- a state's content -------------------------------------------------------------------------------------------


def snapshot(state: State) -> Snapshot:
    rows, pool = state.rows, state.pool
    names = pool.prefix_index.keys()
    return Snapshot(
        sequence=state.sequence,
        next_id=state.next_id,
        planned=state.planned,
        committed=state.committed,
        token_digest=state.token_digest,
        counters=msgspec.structs.astuple(state.counters)[: None if state.config.speculation else DRAFTLESS_COUNTERS],
        lives=tuple(_lives(state)),
        waits=tuple((entry.preemption_count, entry.cached) for entry in state.waiting),
        fields=tuple(fields.STORED_FIELD_NAMES[field] for field in KEPT_FIELDS),
        cells=rows.cells[list(KEPT_FIELDS)].tobytes(),
        tables=extents.gather(
            state.tables, extents.spans(rows.table_at, rows.blocks * state.config.group_count)
        ).tobytes(),
        in_flight=tuple(
            (scheduled.step, scheduled.entries.tobytes(), scheduled.samples.tobytes()) for scheduled in state.in_flight
        ),
        head=pool.head,
        queue_capacity=pool.queue.capacity,
        queue=stored_queue(pool).tobytes(),
        named=indexed_blocks(names).tobytes(),
        keys=b"".join(filter(None, names)),
        drafting=b"" if rows.drafting is None else rows.drafting.tobytes(),
        drafts=tuple(scheduled.drafts.tobytes() for scheduled in state.in_flight if scheduled.drafts is not None),
        slots=state.slots,
        cautious=state.cautious,
        paused=state.paused,
        weights=state.weights,
        tier=None if state.tier is None else _stored_tier(state.tier, state.waiting),
        clock=state.clock, pins=stored_pins(pool.pins),
        clients=None if state.clients is None else stored_clients(state.clients),
        states=stored_states(state),
        draft_costs=None if state.config.speculation is None else costs_of(state.config.speculation),
        lowered=(state.config.max_num_batched_tokens, state.lowered_from) if state.lowered_from else None,
        encoding=state.encoding, sought=state.sought,
    )


def _stored_tier(tier: Tier, waiting: tuple[Waiting, ...]) -> StoredTier:
    counts = tier.capacity, tier.begun, tier.stored, tier.gone, tier.promoted
    asked = tuple((entry.id, entry.transfer) for entry in waiting if entry.transfer >= 0)
    snapshots = None if tier.snapshots is None else _stored_tier(tier.snapshots, ())
    return StoredTier(counts, b"".join(tier.disk.oldest_first()), tier.transfers, asked, snapshots)


def _lives(state: State) -> list[LiveRequest]:
    rows, data = state.rows, state.tokens.arena.data
    spans = zip(rows.id.tolist(), rows.tokens_at.tolist(), rows.known.tolist())
    known = [(id_, data[at : at + count].tobytes()) for id_, at, count in spans]
    return [_life(state.requests[id_], tokens) for id_, tokens in (*known, *((e.id, e.tokens) for e in state.waiting))]


def _life(request: Request, tokens: bytes) -> LiveRequest:
    return LiveRequest(
        request.id, request.name, request.sampling, request.priority, request.arrival_ns, request.root,
        request.prompt_length, tokens, request.client, request.weight,
    )  # fmt: skip


def with_block_hashes(cells: bytes, keys: list[bytes]) -> bytes:
    """A snapshot's `cells` with other keys of the rows' last hashed blocks."""
    kept = np.frombuffer(cells, dtype=np.int64).reshape(len(KEPT_FIELDS), -1).copy()
    kept[-2:] = np.frombuffer(b"".join(keys), dtype=np.int64).reshape(-1, 2).T
    return kept.tobytes()


# ---- bytes -------------------------------------------------------------------------------------------------------


def encode(frame: Snapshot, width: int) -> bytes:
    """A snapshot as it stands in a segment's header; tokens take `width` bytes, or 4 if one does not fit."""
    packed = [tokens for life in frame.lives if (tokens := log_bytes.impl.narrow(life.tokens, width)) is not None]
    if len(packed) < len(frame.lives):
        return encode(frame, WIDTH_MAX)
    return msgspec.msgpack.encode(_with_tokens(frame, packed, width))


def decode(data: bytes) -> Snapshot:
    """The inverse of `encode`. BadSnapshot for other bytes."""
    try:
        frame = _decoder.decode(data)
        wide = [log_bytes.impl.widen(life.tokens, frame.width) for life in frame.lives]
    except (ValueError, RecursionError) as error:
        raise BadSnapshot(f"it has another form ({error})") from error
    return _with_tokens(frame, wide, WIDTH_MAX)


def _with_tokens(frame: Snapshot, tokens: list[bytes], width: int) -> Snapshot:
    lives = tuple(msgspec.structs.replace(life, tokens=each) for life, each in zip(frame.lives, tokens))
    return msgspec.structs.replace(frame, lives=lives, width=width)


# ---- a state again -----------------------------------------------------------------------------------------------


def load(frame: Snapshot, config: SchedulerConfig) -> State:
    """The state of which `frame` was made; all laws hold in it. BadSnapshot if there is no such state."""
    try:
        state = _state(frame, lowered(_with_draft_costs(config, frame.draft_costs), frame.lowered))
        check(state)
    except (ValueError, TypeError, LookupError, OverflowError, IllegalEvent, LawBroken) as error:
        raise BadSnapshot(f"it is no state of this engine ({error})") from error
    return state


def _state(frame: Snapshot, config: SchedulerConfig) -> State:
    _require(len(frame.slots) == config.max_loras, "it has another number of slots for adapters")
    _require(frame.planned - frame.committed == len(frame.in_flight), "other steps are in flight")
    _require(frame.fields == tuple(fields.STORED_FIELD_NAMES[field] for field in KEPT_FIELDS), "its rows have other fields")
    kept = np.frombuffer(frame.cells, dtype=np.int64).reshape(len(KEPT_FIELDS), -1)
    count = kept.shape[1]
    running, queued = frame.lives[:count], frame.lives[count:]
    _require([life.id for life in running] == kept[fields.ID].tolist(), "its rows are of other requests")
    limits = [life.prompt_length + life.sampling.max_tokens for life in running]
    _require(kept[fields.LIMIT].tolist() == limits and max(limits, default=0) <= config.max_model_len, "a row is too long")
    tables = np.frombuffer(frame.tables, dtype=np.int32)
    cells = np.zeros((fields.FIELD_COUNT, count), dtype=np.int64)
    cells[list(KEPT_FIELDS)] = kept
    rows = Rows(cells, _drafting(frame, config, count), recurrent_of(frame.states, config, count))
    requests = VersionedMap[int, Request]({life.id: _request(life) for life in frame.lives})
    waiting = _queue_of(frame, config, queued, requests)
    return State(
        config=config,
        sequence=frame.sequence,
        next_id=frame.next_id,
        planned=frame.planned,
        committed=frame.committed,
        rows=rows,
        waiting=waiting,
        waiting_hash=queue_hash(waiting),
        requests=requests,
        tokens=_tokens(cells, running),
        tables=_tables(config, cells, tables),
        pool=_pool(frame, config, tables[held_entries(config, rows.computed_at_least, rows.blocks)], rows.recurrent),
        in_flight=_steps_in_flight(frame),
        counters=Counters(**dict(zip(Counters.__struct_fields__, frame.counters))),
        token_digest=frame.token_digest,
        slots=frame.slots,
        cautious=frame.cautious,
        paused=frame.paused,
        weights=frame.weights,
        tier=_tier(frame.tier) if frame.tier else None,
        clock=frame.clock, clients=_clients(frame, config, count), lowered_from=frame.lowered[1] if frame.lowered else 0,
        encoding=frame.encoding, sought=frame.sought,
    )


def _with_draft_costs(config: SchedulerConfig, costs: tuple[int, int, int] | None) -> SchedulerConfig:
    if config.speculation is None or costs is None:
        _require(costs is None, "an engine without drafts has costs of drafts")
        return config
    return msgspec.structs.replace(config, speculation=with_costs(config.speculation, costs))


def _clients(frame: Snapshot, config: SchedulerConfig, running: int) -> Clients | None:
    keys = {life.id: (life.priority, life.client) for life in frame.lives}
    return clients_of(frame.clients, config, keys, [life.id for life in frame.lives[:running]])


def _queue_of(
    frame: Snapshot, config: SchedulerConfig, lives: tuple[LiveRequest, ...], requests: VersionedMap[int, Request]
) -> tuple[Waiting, ...]:
    asked, weights = dict(frame.tier.asked) if frame.tier else {}, label_of(frame.weights)
    waits = zip(lives, frame.waits, strict=True)
    return tuple(entry_of(config, weights, requests[life.id], life.tokens, *wait, asked.get(life.id, -1)) for life, wait in waits)


def _tier(frame: StoredTier) -> Tier:
    capacity, begun, stored, gone, promoted = frame.counts
    disk = disk_index_of(names_in(frame.blocks))
    _require(len(disk) * BLOCK_HASH_SIZE == len(frame.blocks), "a block is on its disk twice")
    return Tier(
        capacity=capacity, disk=disk, transfers=frame.transfers, begun=begun, stored=stored, gone=gone, promoted=promoted,
        snapshots=None if frame.snapshots is None else _tier(frame.snapshots),
    )  # fmt: skip


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _request(life: LiveRequest) -> Request:
    _require(0 < life.prompt_length <= len(life.tokens) // 4, "a request has lost its prompt")
    return Request(
        id=life.id,
        name=life.name,
        prompt=life.tokens[: 4 * life.prompt_length],
        sampling=life.sampling,
        priority=life.priority,
        arrival_ns=life.arrival_ns,
        root=life.root,
        client=life.client,
        weight=life.weight,
    )


def _tokens(cells: np.ndarray, running: tuple[LiveRequest, ...]) -> Extents:
    """All rows' histories in a fresh arena; writes where they are into the cells."""
    known = [len(life.tokens) // 4 for life in running]
    _require(known == cells[fields.KNOWN].tolist(), "a row has lost tokens")
    sizes = np.minimum(cells[fields.LIMIT], cells[fields.KNOWN] + TOKENS_SPARE)
    tokens = _reserved(cells, fields.TOKENS_AT, sizes)
    histories = np.frombuffer(b"".join(life.tokens for life in running), dtype="<i4")
    return extents.write(tokens, extents.spans(cells[fields.TOKENS_AT], cells[fields.KNOWN]), histories)


def _tables(config: SchedulerConfig, cells: np.ndarray, blocks: np.ndarray) -> Extents:
    """All rows' block tables in a fresh arena; writes where they are into the cells."""
    counts, least = cells[fields.BLOCKS] * config.group_count, NULL if config.windows else 0
    _require(int(counts.sum()) == len(blocks) and bool((counts >= 0).all()), "a block table has another length")
    _require(not len(blocks) or least <= blocks.min() <= blocks.max() < config.page_count, "a block that does not exist")
    sizes = -(-cells[fields.LIMIT] // config.block_size) * config.group_count
    tables = _reserved(cells, fields.TABLE_AT, sizes)
    return extents.write(tables, extents.spans(cells[fields.TABLE_AT], counts), blocks)


def _reserved(cells: np.ndarray, field: int, sizes: np.ndarray) -> Extents:
    """A fresh arena with places for each row; writes `field`, where they are, and the field after it, their number."""
    total = int(sizes.sum())
    cells[field], cells[field + 1] = np.cumsum(sizes) - sizes, sizes
    reserved = extents.own(extents.empty(max(ARENA_PLACES_MIN, 2 * total)), total)
    return reserved


def _pool(frame: Snapshot, config: SchedulerConfig, tables: np.ndarray, recurrent: np.ndarray | None) -> Pool:
    pins = pins_of(frame.pins, config.page_count)
    transfers = frame.tier.transfers if frame.tier else ()
    moving = (np.array(each.pages, np.int32) for each in transfers)
    held = np.concatenate((tables, *moving, *(() if pins is None else (pins.first_to_leave(),))))
    pool = msgspec.structs.replace(pages_of(frame, config.page_count, held), pins=pins)
    if frame.states is None or recurrent is None:
        return pool
    own = recurrent[[fields.LIVE, fields.NEWEST, fields.SPARE]]
    kept = pins_of(frame.states.pins, config.state_pages)
    read = np.array([each.state for each in transfers if each.state >= 0], np.int64)
    held = np.concatenate((own[own >= 0], read, *(() if kept is None else (kept.first_to_leave(),))))
    states = msgspec.structs.replace(pages_of(frame.states, config.state_pages, held), pins=kept)
    return msgspec.structs.replace(pool, states=states)


def _drafting(frame: Snapshot, config: SchedulerConfig, row_count: int) -> np.ndarray | None:
    """The rows' second matrix, None without speculation."""
    steps = len(frame.in_flight) if config.speculation else 0
    _require(len(frame.drafts) == steps, "its steps in flight do not count their drafts")
    size = 8 * fields.DRAFTING_FIELD_COUNT * row_count if config.speculation else 0
    _require(len(frame.drafting) == size, "its rows' drafts have another length")
    if config.speculation is None:
        return None
    return np.frombuffer(frame.drafting, dtype=np.int64).reshape(fields.DRAFTING_FIELD_COUNT, row_count)


def _steps_in_flight(frame: Snapshot) -> tuple[StepInFlight, ...]:
    copies = () if frame.states is None else copies_of(frame.states)
    _require(len(copies) in (0, len(frame.in_flight)), "its steps in flight do not copy their states")
    return tuple(_step_in_flight(*each) for each in zip_longest(frame.in_flight, frame.drafts, copies))


def _step_in_flight(scheduled: tuple[int, bytes, bytes], drafts: bytes | None, copies: Copies | None) -> StepInFlight:
    step, entries, samples = scheduled
    columns_ = np.frombuffer(entries, dtype=np.int64).reshape(4, -1)
    counted = None if drafts is None else np.frombuffer(drafts, dtype=np.int64)
    _require(counted is None or len(counted) == columns_.shape[1], "a step in flight does not count its drafts")
    return StepInFlight(step, columns_, np.frombuffer(samples, dtype=bool), int(columns_[3].sum()), counted, copies)
