"""Faults around shortages of memory: names of what nobody wrote, who goes on, and limits that do not move as they must."""

from __future__ import annotations

from planting import Bug, Edit

FOLD = "state.facilities.shortage"
SHORTAGE_BUGS = [
    Bug(
        name="a block that no step has written keeps its name",
        edits=(Edit(FOLD, "pool=_without_unwritten(state), rows", "pool=state.pool, rows"),),
        found_by=("reads other content", "P1", "K1"),
    ),
    Bug(
        name="a block keeps its name that only the newest step was to write",
        edits=(Edit(FOLD, "for step in state.in_flight:", "for step in state.in_flight[:1]:"),),
        found_by=("reads other content", "P1", "K1", "C6"),
    ),
    Bug(
        name="a request that has left keeps the names of what nobody wrote",
        edits=(Edit(FOLD, "                return None\n    return firsts", "                pass\n    return firsts"),),
        found_by=("reads other content", "P1", "K1"),
    ),
    Bug(
        name="pages that windows gave back, and states, keep their names",
        edits=(Edit(FOLD, "None if _writes_in_place(state) else _firsts(state)", "_firsts(state)"),),
        found_by=("reads other content", "P1", "M1"),
    ),
    Bug(
        name="rows go back where windows gave pages back, and states were written",
        edits=(Edit(FOLD, "None if _writes_in_place(state) or not", "None if not"),),
        found_by=("C6", "M2", "reads other content"),
    ),
    Bug(
        name="who cannot go back runs on behind a shortage",
        edits=(Edit(FOLD, "preempt(state, tuple(range(len(state.rows))))", "preempt(state, ())"),),
        found_by=("A2", "C6", "M2", "S2", "D1", "Y3"),
    ),
    Bug(
        name="a row that goes back keeps a page that another was to write",
        edits=(Edit(FOLD, "int(shared[0]) * size if len(shared) else first", "first"),),
        found_by=("reads other content", "C6", "P1", "K1"),
    ),
    Bug(
        name="a row goes back to one token too many",
        edits=(Edit(FOLD, "fields.BLOCKS, row] = first, 0, kept", "fields.BLOCKS, row] = first + 1, 0, kept"),),
        found_by=("C6", "M4", "P1", "S2", "reads other content"),
    ),
    Bug(
        name="a row that goes back holds pages that it has no tokens for",
        edits=(Edit(FOLD, "pool=pools.release(state.pool, table[kept:][::-1])", "pool=state.pool"),),
        found_by=("M2",),
    ),
    Bug(
        name="a row that goes back names its next block after its first",
        edits=(Edit(FOLD, "hashes[-1] if hashes else root", "root"),),
        found_by=("P1", "K1", "reads other content"),
    ),
    Bug(
        name="a shorter table is written where older states read it",
        edits=(Edit(FOLD, "state = replace(state, tables=tables)", "pass"), Edit(FOLD, "cells[fields.TABLE_AT] = at", "pass")),
        found_by=("Y2",),
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
