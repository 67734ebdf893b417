"""Keyframes: a whole state as bytes, so that a log can be folded from the start of any of its segments.

Owns what of a state is kept and how it becomes a state again. Where its arenas keep things is not kept: a loaded state
says the same as the one it was made of, to every event that follows, and its digests are the same.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import extents, log_forms, rows as columns
from vnext.state.admitting import TOKENS_SPARE
from vnext.state.chain import KEY_SIZE, chain_keys
from vnext.state.config import SchedulerConfig
from vnext.state.errors import LawBroken
from vnext.state.extents import Extents
from vnext.state.laws import check
from vnext.state.log_plain import WIDTH_MAX
from vnext.state.names import names_of
from vnext.state.order import sum_of
from vnext.state.params import Sampling
from vnext.state.pool import Pool, free_blocks
from vnext.state.rows import Rows
from vnext.state.state import Counters, Flight, Request, State, Waiting
from vnext.state.versions import VersionedArray, VersionedMap
from vnext.state.windows import NULL, held_entries

ARENA_PLACES_MIN = 1 << 12
KEPT_FIELDS = (*range(columns.STRUCTURE_FIELD_COUNT), columns.CHAIN_0, columns.CHAIN_1)
QUEUE_RATIO_MAX = 64
NOBODY = -1


class Life(msgspec.Struct, frozen=True, array_like=True):
    """A live request: what never changes of it, and all its known tokens (int32 bytes; packed when encoded)."""

    id: int
    name: str
    sampling: Sampling
    priority: int
    arrival_ns: int
    root: bytes
    prompt_length: int
    tokens: bytes


class Keyframe(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A state's content. Columns are little-endian bytes.

    `lives` are the rows' requests in running order, then the queue's; `waits` (epoch, cached) of the latter. `fields`
    names the columns of `cells` int64[fields, R]; `tables` int32 are the rows' whole tables, one after the other.
    `flights` are (step, entries int64[4, n], samples bool[n]). `queue` int32 are the places from `head` on, NOBODY
    where one is stale; `named` int32 are the blocks with a name, in rising order, `keys` their names.
    """

    sequence: int
    next_id: int
    planned: int
    committed: int
    token_digest: int
    counters: tuple[int, ...]
    lives: tuple[Life, ...]
    waits: tuple[tuple[int, int], ...]
    fields: tuple[str, ...]
    cells: bytes
    tables: bytes
    flights: tuple[tuple[int, bytes, bytes], ...]
    head: int
    queue_capacity: int
    queue: bytes
    named: bytes
    keys: bytes
    width: int = WIDTH_MAX


class BadKeyframe(Exception):
    """Bytes that are no state of this engine."""


_decoder = msgspec.msgpack.Decoder(Keyframe)


# ---- a state's content -------------------------------------------------------------------------------------------


def keyframe(state: State) -> Keyframe:
    """What there is to keep of a state."""
    rows, pool = state.rows, state.pool
    names = pool.names.keys()
    return Keyframe(
        sequence=state.sequence,
        next_id=state.next_id,
        planned=state.planned,
        committed=state.committed,
        token_digest=state.token_digest,
        counters=msgspec.structs.astuple(state.counters),
        lives=tuple(_lives(state)),
        waits=tuple((entry.epoch, entry.cached) for entry in state.waiting),
        fields=tuple(columns.FIELD_NAMES[field] for field in KEPT_FIELDS),
        cells=rows.cells[list(KEPT_FIELDS)].tobytes(),
        tables=extents.gather(state.tables, extents.spans(rows.table_at, rows.blocks * state.config.group_count)).tobytes(),
        flights=tuple((flight.step, flight.entries.tobytes(), flight.samples.tobytes()) for flight in state.flights),
        head=pool.head,
        queue_capacity=pool.queue.capacity,
        queue=_queue(pool).tobytes(),
        named=blocks_with_names(names).tobytes(),
        keys=b"".join(filter(None, names)),
    )


def blocks_with_names(names: list[bytes | None]) -> np.ndarray:
    """Blocks that have a name, in rising order (int32[n]), from the names of all blocks."""
    return np.array([block for block, name in enumerate(names) if name is not None], dtype=np.int32)


def _lives(state: State) -> list[Life]:
    rows, data = state.rows, state.tokens.arena.data
    spans = zip(rows.id.tolist(), rows.tokens_at.tolist(), rows.known.tolist())
    known = [(id_, data[at : at + count].tobytes()) for id_, at, count in spans]
    return [_life(state.requests[id_], tokens) for id_, tokens in (*known, *((e.id, e.tokens) for e in state.waiting))]


def _life(request: Request, tokens: bytes) -> Life:
    return Life(
        request.id, request.name, request.sampling, request.priority, request.arrival_ns, request.root,
        request.prompt_length, tokens,
    )  # fmt: skip


def _queue(pool: Pool) -> np.ndarray:
    queue = np.full(pool.queue.used - pool.head, NOBODY, dtype=np.int32)
    free = free_blocks(pool)
    queue[pool.status.at(free) - pool.head] = free
    return queue


def with_chains(cells: bytes, keys: list[bytes]) -> bytes:
    """A keyframe's `cells` with other keys of the rows' last sealed blocks."""
    kept = np.frombuffer(cells, dtype=np.int64).reshape(len(KEPT_FIELDS), -1).copy()
    kept[-2:] = np.frombuffer(b"".join(keys), dtype=np.int64).reshape(-1, 2).T
    return kept.tobytes()


# ---- bytes -------------------------------------------------------------------------------------------------------


def encode(frame: Keyframe, width: int) -> bytes:
    """A keyframe as it stands in a segment's header; tokens take `width` bytes, or 4 if one does not fit."""
    packed = [log_forms.kernels.narrow(life.tokens, width) for life in frame.lives]
    if None in packed:
        return encode(frame, WIDTH_MAX)
    return msgspec.msgpack.encode(_with_tokens(frame, packed, width))


def decode(data: bytes) -> Keyframe:
    """The inverse of `encode`. BadKeyframe for other bytes."""
    try:
        frame = _decoder.decode(data)
        wide = [log_forms.kernels.widen(life.tokens, frame.width) for life in frame.lives]
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadKeyframe(f"it has another form ({error})") from error
    return _with_tokens(frame, wide, WIDTH_MAX)


def _with_tokens(frame: Keyframe, tokens: list[bytes], width: int) -> Keyframe:
    lives = tuple(msgspec.structs.replace(life, tokens=each) for life, each in zip(frame.lives, tokens))
    return msgspec.structs.replace(frame, lives=lives, width=width)


# ---- a state again -----------------------------------------------------------------------------------------------


def load(frame: Keyframe, config: SchedulerConfig) -> State:
    """The state of which `frame` was made; all laws hold in it. BadKeyframe if there is no such state."""
    try:
        state = _state(frame, config)
        check(state)
    except (ValueError, TypeError, LookupError, OverflowError, LawBroken) as error:
        raise BadKeyframe(f"it is no state of this engine ({error})") from error
    return state


def _state(frame: Keyframe, config: SchedulerConfig) -> State:
    _require(frame.planned - frame.committed == len(frame.flights), "other steps are in flight")
    _require(frame.fields == tuple(columns.FIELD_NAMES[field] for field in KEPT_FIELDS), "its rows have other fields")
    kept = np.frombuffer(frame.cells, dtype=np.int64).reshape(len(KEPT_FIELDS), -1)
    count = kept.shape[1]
    running, queued = frame.lives[:count], frame.lives[count:]
    _require([life.id for life in running] == kept[columns.ID].tolist(), "its rows are of other requests")
    limits = [life.prompt_length + life.sampling.max_tokens for life in running]
    longest = max(limits, default=0)
    _require(kept[columns.LIMIT].tolist() == limits and longest <= config.model_len_max, "a row is too long")
    tables = np.frombuffer(frame.tables, dtype=np.int32)
    cells = np.zeros((columns.FIELD_COUNT, count), dtype=np.int64)
    cells[list(KEPT_FIELDS)] = kept
    waiting = tuple(_waiting(config, life, *wait) for life, wait in zip(queued, frame.waits, strict=True))
    return State(
        config=config,
        sequence=frame.sequence,
        next_id=frame.next_id,
        planned=frame.planned,
        committed=frame.committed,
        rows=Rows(cells),
        waiting=waiting,
        waiting_sum=sum_of(waiting),
        requests=VersionedMap({life.id: _request(life) for life in frame.lives}),
        tokens=_tokens(cells, running),
        tables=_tables(config, cells, tables),
        pool=_pool(frame, config.block_count, tables[held_entries(config, cells[columns.COMPUTED], cells[columns.BLOCKS])]),
        flights=tuple(_flight(*flight) for flight in frame.flights),
        counters=Counters(**dict(zip(Counters.__struct_fields__, frame.counters))),
        token_digest=frame.token_digest,
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _request(life: Life) -> Request:
    _require(0 < life.prompt_length <= len(life.tokens) // 4, "a request has lost its prompt")
    return Request(
        id=life.id,
        name=life.name,
        prompt=life.tokens[: 4 * life.prompt_length],
        sampling=life.sampling,
        priority=life.priority,
        arrival_ns=life.arrival_ns,
        root=life.root,
    )


def _waiting(config: SchedulerConfig, life: Life, epoch: int, cached: int) -> Waiting:
    keys = chain_keys(life.root, life.tokens, config.block_size) if config.prefix_caching else ()
    return Waiting(id=life.id, priority=life.priority, tokens=life.tokens, keys=keys, epoch=epoch, cached=cached)


def _tokens(cells: np.ndarray, running: tuple[Life, ...]) -> Extents:
    """All rows' histories in a fresh arena; writes where they are into the cells."""
    known = [len(life.tokens) // 4 for life in running]
    _require(known == cells[columns.KNOWN].tolist(), "a row has lost tokens")
    sizes = np.minimum(cells[columns.LIMIT], cells[columns.KNOWN] + TOKENS_SPARE)
    tokens = _reserved(cells, columns.TOKENS_AT, sizes)
    histories = np.frombuffer(b"".join(life.tokens for life in running), dtype="<i4")
    return extents.write(tokens, extents.spans(cells[columns.TOKENS_AT], cells[columns.KNOWN]), histories)


def _tables(config: SchedulerConfig, cells: np.ndarray, blocks: np.ndarray) -> Extents:
    """All rows' block tables in a fresh arena; writes where they are into the cells."""
    counts, least = cells[columns.BLOCKS] * config.group_count, NULL if config.windows else 0
    _require(int(counts.sum()) == len(blocks) and bool((counts >= 0).all()), "a block table has another length")
    _require(not len(blocks) or least <= blocks.min() <= blocks.max() < config.block_count, "a block that does not exist")
    sizes = -(-cells[columns.LIMIT] // config.block_size) * config.group_count
    tables = _reserved(cells, columns.TABLE_AT, sizes)
    return extents.write(tables, extents.spans(cells[columns.TABLE_AT], counts), blocks)


def _reserved(cells: np.ndarray, field: int, sizes: np.ndarray) -> Extents:
    """A fresh arena with places for each row; writes `field`, where they are, and the field after it, their number."""
    total = int(sizes.sum())
    cells[field], cells[field + 1] = np.cumsum(sizes) - sizes, sizes
    reserved, _ = extents.reserve(extents.empty(max(ARENA_PLACES_MIN, 2 * total)), total)
    return reserved


def _pool(frame: Keyframe, block_count: int, held: np.ndarray) -> Pool:
    places = np.frombuffer(frame.queue, dtype=np.int32)
    valid = (places != NOBODY).nonzero()[0]
    blocks = np.frombuffer(frame.named, dtype=np.int32).tolist()
    keys = [frame.keys[at : at + KEY_SIZE] for at in range(0, len(frame.keys), KEY_SIZE)]
    status = -np.bincount(held, minlength=block_count)
    status[places[valid]] = frame.head + valid
    used = frame.head + len(places)
    _require(len(status) == block_count and min(blocks, default=0) >= 0, "a block that does not exist")
    _require(len(frame.keys) == KEY_SIZE * len(blocks), "a name of another length")
    _require(0 <= frame.head <= used <= frame.queue_capacity <= QUEUE_RATIO_MAX * block_count, "another queue of blocks")
    queue, _ = extents.reserve(extents.empty(frame.queue_capacity), used)
    return Pool(
        status=VersionedArray(status),
        queue=extents.write(queue, slice(frame.head, used), places),
        head=frame.head,
        free=len(valid),
        kept=int(np.count_nonzero(status[blocks] >= 0)),
        names=names_of(dict(zip(keys, blocks, strict=True)), block_count),
    )


def _flight(step: int, entries: bytes, samples: bytes) -> Flight:
    columns_ = np.frombuffer(entries, dtype=np.int64).reshape(4, -1)
    return Flight(step, columns_, np.frombuffer(samples, dtype=bool), int(columns_[3].sum()))
