"""Faults around shortages of memory: names of what nobody wrote, who goes on, and limits that do not move as they must."""

from __future__ import annotations

from planting import Bug, Edit

FOLD = "state.facilities.shortage"
SHORTAGE_BUGS = [
    Bug(
        name="a block that no step has written keeps its name",
        edits=(Edit(FOLD, "pool=_without_unwritten(state)", "pool=state.pool"),),
        found_by=("reads other content", "P1", "K1"),
    ),
    Bug(
        name="a block keeps its name that only the newest step was to write",
        edits=(Edit(FOLD, "for step in state.in_flight:", "for step in state.in_flight[:1]:"),),
        found_by=("reads other content", "P1", "K1"),
    ),
    Bug(
        name="a request that has left keeps the names of what nobody wrote",
        edits=(Edit(FOLD, "                return None\n    found", "                pass\n    found"),),
        found_by=("reads other content", "P1", "K1"),
    ),
    Bug(
        name="pages that windows gave back, and states, keep their names",
        edits=(Edit(FOLD, "if config.windows or config.state_pages:", "if False:"),),
        found_by=("reads other content", "P1", "M1"),
    ),
    Bug(
        name="who ran goes on behind a shortage",
        edits=(Edit(FOLD, "preempt(state, tuple(range(len(state.rows))))", "preempt(state, ())"),),
        found_by=("A2", "C6", "M2", "S2", "D1", "Y3"),
    ),
    Bug(
        name="a step takes as much as before",
        edits=(Edit(FOLD, "event.limit)\n\n\ndef fold_step", "state.config.max_num_batched_tokens)\n\n\ndef fold_step"),),
        found_by=("C6",),
    ),
    Bug(
        name="the engine forgets what a step took at first",
        edits=(Edit(FOLD, "lowered_from=before if limit < before else 0", "lowered_from=0"),),
        found_by=("C6",),
    ),
    Bug(
        name="a limit is raised beyond what it was",
        edits=(
            Edit(FOLD, "limit < event.limit <= most", "limit < event.limit"),
            Edit("sched.shortage", "min(2 * state.config.max_num_batched_tokens, state.lowered_from)", "2 * state.config.max_num_batched_tokens"),
        ),
        found_by=("C6", "Divergence", "should have been refused"),
    ),
]
