"""Digest of a state: equal on every replica that folded the same events.

It covers structure: counts, bounds, rows, block tables, holders, the order of free pages, the queue and steps in
flight. It contains no token value and no block hash, so a redacted log has the same digests. `State.token_digest`
chains the committed tokens separately.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import xxhash

from vnext.state.pool import Pool
from vnext.state.state import State, StepInFlight, Tier, label_of
from vnext.state.store import extents
from vnext.state.store.fields import FIELD_NAMES, STRUCTURE_FIELD_COUNT

DIGEST_VERSION = 2
"""The version of the computation in `digest` and `details`. A log names the version it uses; a log without one predates
the numbering and is version 1. When this number changes, add logs to tests/golden/logs.
"""
SCALAR_NAMES = (
    "sequence next_id planned committed row_count waiting_hash request_count flight_count pool.head pool.free "
    "pool.prefix_index pool.status_hash finished aborted preempted prompt_tokens generated_tokens "
    "prefix_queried_tokens prefix_hit_tokens"
).split()
DETAIL_NAMES = (
    *SCALAR_NAMES, *(f"rows.{name}" for name in FIELD_NAMES[:STRUCTURE_FIELD_COUNT]), "tables", "holders and free order",
    "waiting", "flights", "adapters",
)  # fmt: skip
_WORD = 2**64 - 1
_hashed: Callable[[bytes | np.ndarray | array[int]], int] = xxhash.xxh3_64_intdigest  # type: ignore[assignment]  # no buffer to it


def digest(state: State) -> int:
    """xxh3-64 over the state's structure.

    Block tables, holders, the order of free pages and the queue enter as incremental hashes (TABLE_HASH,
    VersionedArray.hash, State.waiting_hash), so a digest costs only what a step has changed. Law Y1 requires each hash
    to match its contents.
    """
    hashed = _hashed
    words = [*_scalars(state), hashed(state.rows.cells[:STRUCTURE_FIELD_COUNT])]
    for scheduled in state.in_flight:
        words += (scheduled.step, hashed(scheduled.entries), hashed(scheduled.samples))
    if state.rows.drafting is not None:
        words += (hashed(_drafting(state)), state.counters.draft_tokens, state.counters.accepted_tokens)
    if state.slots:
        words.append(hashed(_slots(state)))
    if state.cautious:
        words.append(state.cautious)
    if state.paused or state.weights:
        words.append(hashed(_weights(state)))
    if state.tier is not None:
        words.append(hashed(_tier(state)))
    if state.clock or state.pool.pins is not None:
        words.append(hashed(_pins(state)))
    if state.clients is not None:
        words.append(hashed(state.clients.structure))
    if state.lowered_from:
        words += (state.config.max_num_batched_tokens, state.lowered_from)
    if state.encoding is not None or state.sought is not None:
        words.append(hashed(_encoding(state)))
    if state.pool.states is not None:
        words.append(hashed(_states(state, state.pool.states)))
    return hashed(array("Q", words))


def parts(state: State) -> list[tuple[str, bytes]]:
    """The complete contents behind the digest, by name; comparing two states part by part names the parts that differ."""
    rows, pool = state.rows, state.pool
    table = extents.gather(state.tables, extents.spans(rows.table_at, rows.blocks * state.config.group_count))
    return [
        ("scalars", b"".join(word.to_bytes(8, "little") for word in _scalars(state))),
        ("rows", rows.cells[:STRUCTURE_FIELD_COUNT].tobytes()),
        ("tables", table.tobytes()),
        ("holders and free order", pool.status.values().tobytes() + (_states(state, pool.states) if pool.states else b"")),
        ("waiting", _queue(state)),
        ("flights", b"".join(_step_in_flight(scheduled) for scheduled in state.in_flight) + _drafting(state)),
        ("adapters", b"".join(each(state) for each in (_slots, _weights, _tier, _pins, _clients, _limit, _encoding))),
    ]


def details(state: State) -> tuple[int, ...]:
    """One word (uint64) for each of DETAIL_NAMES. Words that differ between two states name the fields that differ.

    The cost is proportional to the state, while that of `digest` is proportional to a step's changes. Replicas therefore
    exchange these words rarely.
    """
    hashed, cells = _hashed, state.rows.cells
    named = dict(parts(state))
    columns = [hashed(np.ascontiguousarray(cells[field])) for field in range(STRUCTURE_FIELD_COUNT)]
    rest = [hashed(named[name]) for name in DETAIL_NAMES[-5:]]
    return tuple(word & _WORD for word in (*_scalars(state), *columns, *rest))


def histories(state: State) -> tuple[int, ...]:
    """One word (uint64) for the tokens of each live request: rows in order, then the queue. Costs time proportional to
    the tokens.
    """
    hashed, rows = _hashed, state.rows
    reported = [
        hashed(extents.read(state.tokens, at, known)) for at, known in zip(rows.tokens_at.tolist(), rows.known.tolist())
    ]
    return (*reported, *(hashed(entry.tokens) for entry in state.waiting))


def requests_otherwise(state: State, words: Sequence[int]) -> tuple[int, ...]:
    """The requests whose tokens differ on another replica with the same structure; `words` are that replica's `histories`."""
    ids = (*state.rows.id.tolist(), *(entry.id for entry in state.waiting))
    return tuple(id_ for id_, mine, theirs in zip(ids, histories(state), words) if mine != theirs)


def hexadecimal(value: int) -> str:
    """A digest in the form shown to people."""
    return f"{value:016x}"


def _scalars(state: State) -> tuple[int, ...]:
    pool, counters = state.pool, state.counters
    return (
        state.sequence, state.next_id, state.planned, state.committed, state.rows.cells.shape[1], state.waiting_hash,
        len(state.requests), len(state.in_flight), pool.head, pool.free, 2 * len(pool.prefix_index), pool.status.hash,
        counters.finished, counters.aborted, counters.preempted, counters.prompt_tokens, counters.generated_tokens,
        counters.prefix_queried_tokens, counters.prefix_hit_tokens,
    )  # fmt: skip


def _queue(state: State) -> bytes:
    entries = [(entry.id, entry.known, entry.preemption_count, entry.cached) for entry in state.waiting]
    return np.array(entries, dtype=np.int64).tobytes()


def _drafting(state: State) -> bytes:
    """What a state has only with speculation; empty without."""
    if state.rows.drafting is None:
        return b""
    drafts = [scheduled.drafts.tobytes() for scheduled in state.in_flight if scheduled.drafts is not None]
    return b"".join((state.rows.drafting.tobytes(), *drafts))


def _slots(state: State) -> bytes:
    """What each slot holds, by digest and last use; empty in an engine without adapters."""
    return b"".join(f"{slot.digest} {slot.used};".encode() if slot else b";" for slot in state.slots)


def _weights(state: State) -> bytes:
    """The pause and the version of the weights; empty in an engine that has met neither."""
    return f"{state.paused} {label_of(state.weights)}".encode() if state.paused or state.weights else b""


def _tier(state: State) -> bytes:
    """The sizes of the disk tier, its transfers and who has had one; no names. Empty in an engine without."""
    if (tier := state.tier) is None:
        return b""
    moving = [(each.number, each.request, each.hits, *each.pages) for each in tier.transfers]
    asked = [(entry.id, entry.transfer) for entry in state.waiting if entry.transfer >= 0]
    counts = _counts(tier)
    if tier.snapshots is None:
        return repr((counts, moving, asked)).encode()
    return repr((counts, moving, asked, _counts(tier.snapshots), [each.state for each in tier.transfers])).encode()


def _counts(tier: Tier) -> tuple[int, ...]:
    return tier.capacity, len(tier.disk), tier.begun, tier.stored, tier.gone, tier.promoted


def _pins(state: State) -> bytes:
    """The clock, the pins and how many have ended in each way; empty in an engine that has met neither."""
    pins = state.pool.pins
    if pins is None:
        return f"{state.clock}".encode() if state.clock else b""
    return repr((state.clock, pins.ends.hash, *msgspec.structs.astuple(pins)[1:])).encode()


def _clients(state: State) -> bytes:
    return b"" if state.clients is None else state.clients.structure


def _limit(state: State) -> bytes:
    """The tokens of a step while a shortage of memory has lowered them, and those before; empty otherwise."""
    return f"{state.config.max_num_batched_tokens} {state.lowered_from}".encode() if state.lowered_from else b""


def _encoding(state: State) -> bytes:
    """How far an input is encoded, and what ranks have read; empty where none is."""
    found = b"" if state.sought is None else repr(msgspec.structs.astuple(state.sought)).encode()
    return found if state.encoding is None else repr(msgspec.structs.astuple(state.encoding)).encode() + found


def _states(state: State, states: Pool) -> bytes:
    """The pages for the states of recurrent layers, those of each row, and the copies of steps in flight."""
    counts = states.head, states.free, len(states.prefix_index), states.status.hash
    copies = [each for step in state.in_flight if (each := step.copies)]
    rows = b"" if state.rows.recurrent is None else state.rows.recurrent.tobytes()
    pinned = b"" if states.pins is None else states.pins.ends.values().tobytes()
    return b"".join((repr(counts).encode(), rows, pinned, *(each.before.tobytes() + each.after.tobytes() for each in copies)))


def _step_in_flight(scheduled: StepInFlight) -> bytes:
    return scheduled.step.to_bytes(8, "little") + scheduled.entries.tobytes() + scheduled.samples.tobytes()
