"""Faults around LoRA adapters: who runs without a slot, who loses one, and who reads another adapter's blocks."""

from __future__ import annotations

from planting import Bug, Edit

NO_GUARD = Edit("state.fold_plan", "require(may_run(state, entry.id),", "require(True,")

ADAPTER_BUGS = [
    Bug(
        name="a request starts without its adapter",
        edits=(Edit("sched.admission", "if state.slots and not may_run(state, waiting.id):", "if False:"), NO_GUARD),
        found_by=("R1",),
    ),
    Bug(
        name="any adapter is as good as one's own",
        edits=(Edit("state.facilities.adapters", "slot_of(state, adapter) is not None", "any(state.slots)"),),
        found_by=("R1",),
    ),
    Bug(
        name="an adapter in use is evicted",
        edits=(
            Edit("sched.residency", "held(state).union(ahead)", "frozenset(ahead)"),
            Edit("state.facilities.adapters", "slot.digest not in held(state)", "True"),
        ),
        found_by=("R1", "R3", "should have been refused"),
    ),
    Bug(
        name="one adapter has two slots",
        edits=(
            Edit("sched.residency", "if digest not in resident", "if True"),
            Edit("state.facilities.adapters", "bool(event.digest) and slot_of(state, event.digest) is None", "True"),
        ),
        found_by=("R1", "should have been refused"),
    ),
    Bug(
        name="adapters share their blocks",
        edits=(Edit("state.block_hash", "    if adapter:", "    if False:"),),
        found_by=("R2", "reads other content", "P1"),
    ),
]
