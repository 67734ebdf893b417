"""Adapter rows: which tokens of a step are computed with which slot's adapter. Derived from the state in every step that
changes its rows; a steady step has those of the step before, because no slot of a running request changes."""

from __future__ import annotations

import numpy as np

from vnext.models.layers.batch import AdapterRows
from vnext.state.state import State, StepInFlight

NO_SLOT = -1


def adapter_rows(state: State, scheduled: StepInFlight) -> tuple[AdapterRows, ...]:
    """One entry for each adapter of the step, in the order of their slots."""
    if not state.slots:
        return ()
    slot_of = {slot.digest: place for place, slot in enumerate(state.slots) if slot is not None}
    adapters = [state.requests[id_].sampling.adapter for id_ in scheduled.ids.tolist()]
    slots = [slot_of[adapter] if adapter else NO_SLOT for adapter in adapters]
    owners = np.repeat(np.array(slots, dtype=np.int64), scheduled.counts)
    used = sorted(set(slots) - {NO_SLOT})
    return tuple(AdapterRows(slot, np.flatnonzero(owners == slot)) for slot in used)
