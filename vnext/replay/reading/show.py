"""show: the state at a step, as plain values for people and tools; also the state in logs of a broken law, and in tests.

The state of step t is the state in which the step runs: right after its plan was folded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vnext.replay.reading.folding import Broken, Folded, fold_items
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import UnusableLog
from vnext.replay.reading.window import step_at
from vnext.state.digest import digest, hexadecimal
from vnext.state.events import StepPlanned
from vnext.state.pool import free_blocks
from vnext.state.state import State, StepInFlight, Tier
from vnext.state.store.fields import STORED_FIELD_NAMES, STRUCTURE_FIELD_COUNT
from vnext.state.store.pins import Pins
from vnext.state.windows import row_blocks

Json = dict[str, Any]
"""A state, or a part of it, as plain values."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """`event` is the number of the last folded event; `plan` is the step's plan, None at the end of the log."""

    step: int
    event: int
    digest: str
    plan: StepPlanned | None
    state: Json


def show(index: Index, step: int | str | None) -> Shown:
    """The state at `step`, which may be given as `step_at` reads it, or at the log's end. Raises UnusableLog if the log has no
    such step."""
    state, plan = state_at(index, step_at(index, step) if isinstance(step, str) else step)
    return Shown(
        step=state.planned - 1,
        event=state.sequence - 1,
        digest=hexadecimal(digest(state)),
        plan=plan,
        state=view(state),
    )


def state_at(index: Index, step: int | None) -> tuple[State, StepPlanned | None]:
    """The state in which `step` runs and its plan; for no step, the last state and None. Raises UnusableLog if there is
    none."""
    first_step = index.first.planned
    if step is not None and step < first_step:
        raise UnusableLog(f"step {step} is not in this log: it has {_steps(first_step, index.last.planned)}")
    place = index.at_end() if step is None else index.at_step(step)
    state, broken = place.state, ""
    for item in fold_items(place.state, place.items):
        if isinstance(item, Folded):
            state = item.after
            if isinstance(item.event, StepPlanned) and item.event.step == step:
                return state, item.event
        elif isinstance(item, Broken):
            broken = f" ({item.message})"
    if step is not None:
        raise UnusableLog(f"step {step} is not in this log: it has {_steps(first_step, state.planned)}{broken}")
    return state, None


def _steps(first: int, planned: int) -> str:
    older = ", the older ones are not here" if first else ""
    return f"steps {first} to {planned - 1}{older}" if planned > first else "no step"


# ---- a state as plain values -------------------------------------------------------------------------------------


def view(state: State) -> Json:
    """Everything but token values, JSON-ready."""
    return {
        "sequence": state.sequence,
        "planned": state.planned,
        "committed": state.committed,
        "running": [_row(state, row) for row in range(len(state.rows))],
        "waiting": [
            {"id": entry.id, "priority": entry.priority, "known": entry.known, "epoch": entry.preemption_count}
            for entry in state.waiting
        ],
        "flights": [_step_in_flight(scheduled) for scheduled in state.in_flight],
        "blocks": {
            "total": state.pool.page_count,
            "free": state.pool.free,
            "named": len(state.pool.prefix_index),
            "next": free_blocks(state.pool)[:16].tolist(),
        },
        "counters": {name: getattr(state.counters, name) for name in state.counters.__struct_fields__},
        **({"cautious": state.cautious} if state.cautious else {}),
        **({"clock": state.clock} if state.clock else {}),
        **({"pins": _pins(state.pool.pins)} if state.pool.pins else {}),
        **({"disk": _disk(state.tier)} if state.tier else {}),
        **({"slots": [_slot(state, place) for place in range(len(state.slots))]} if state.slots else {}),
    }


def _disk(tier: Tier) -> dict[str, object]:
    """The disk tier: its size, its counts, and the transfers that are in flight."""
    counts = {name: getattr(tier, name) for name in ("capacity", "stored", "promoted", "gone")}
    moving = [{"transfer": each.number, "request": each.request, "blocks": len(each.pages) - each.hits} for each in tier.transfers]
    snapshots = {"snapshots": len(tier.snapshots.disk)} if tier.snapshots else {}
    return {"blocks": len(tier.disk), **counts, **snapshots, "transfers": moving}


def _pins(pins: Pins) -> dict[str, object]:
    """How many pages are pinned, how pins have ended, and when the next one does."""
    counts = {name: getattr(pins, name) for name in ("count", "pinned", "expired", "displaced", "yielded", "dropped")}
    return counts | ({"next_end": pins.next_end()} if pins.count else {})


def _slot(state: State, place: int) -> dict[str, object] | None:
    """What a slot holds, and the running requests that compute with it; None for an empty one."""
    if (slot := state.slots[place]) is None:
        return None
    used_by = [id_ for id_ in state.rows.id.tolist() if state.requests[id_].sampling.adapter == slot.digest]
    return {"name": slot.name, "digest": slot.digest, "used": slot.used, "requests": used_by}


def _row(state: State, row: int) -> dict[str, object]:
    cells = state.rows.cells[:STRUCTURE_FIELD_COUNT, row].tolist()
    fields = dict(zip(STORED_FIELD_NAMES[:STRUCTURE_FIELD_COUNT], cells))
    return {**fields, "table": row_blocks(state, row).tolist()}


def _step_in_flight(scheduled: StepInFlight) -> dict[str, object]:
    entries = zip(scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist(), scheduled.samples.tolist())
    return {
        "step": scheduled.step,
        "requests": [
            {"id": id_, "start": start, "tokens": count, "samples": samples} for id_, start, count, samples in entries
        ],
    }
