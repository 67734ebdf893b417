"""A state as plain values, for people and tools: `show`, the logs of a failed law, tests."""

from __future__ import annotations

from vnext.state.pool import free_blocks
from vnext.state.rows import FIELD_NAMES, STRUCTURE_FIELD_COUNT
from vnext.state.state import Flight, State
from vnext.state.windows import row_blocks


def view(state: State) -> dict:
    """Everything but token values, JSON-ready."""
    return {
        "sequence": state.sequence,
        "planned": state.planned,
        "committed": state.committed,
        "running": [_row(state, row) for row in range(len(state.rows))],
        "waiting": [
            {"id": entry.id, "priority": entry.priority, "known": entry.known, "epoch": entry.epoch}
            for entry in state.waiting
        ],
        "flights": [_flight(flight) for flight in state.flights],
        "blocks": {
            "total": state.pool.block_count,
            "free": state.pool.free,
            "named": len(state.pool.names),
            "next": free_blocks(state.pool)[:16].tolist(),
        },
        "counters": {name: getattr(state.counters, name) for name in state.counters.__struct_fields__},
    }


def _row(state: State, row: int) -> dict:
    cells = state.rows.cells[:STRUCTURE_FIELD_COUNT, row].tolist()
    fields = dict(zip(FIELD_NAMES[:STRUCTURE_FIELD_COUNT], cells))
    return {**fields, "table": row_blocks(state, row).tolist()}


def _flight(flight: Flight) -> dict:
    entries = zip(flight.ids.tolist(), flight.starts.tolist(), flight.counts.tolist(), flight.samples.tolist())
    return {
        "step": flight.step,
        "requests": [
            {"id": id_, "start": start, "tokens": count, "samples": samples} for id_, start, count, samples in entries
        ],
    }
