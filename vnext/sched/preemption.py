"""Preemption: which requests are preempted when the running rows need more pages than are free.

Rows are served in order. While a row lacks pages, the worst row by policy is preempted. This may be the row itself, or
a row that was already served, which then hands back its tokens and pages. The best row always advances: a request that
could not fit alone was refused at arrival.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from vnext.sched.ranking import rows_best_first
from vnext.state.events import StepPlanned
from vnext.state.expected import expected_work, in_turn
from vnext.state.recurrent import cut
from vnext.state.state import State, blocks_for
from vnext.state.store.rows import wants, without_rows
from vnext.state.windows import row_blocks


class _Room:
    """Scratch data of one decision: free pages, the rows that still run (also `best_first`), and each row's tokens and pages."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ref = state.pool.ref
        self.free = state.pool.free
        self.budget = state.config.max_num_batched_tokens
        self.runs = np.ones(len(state.rows), dtype=bool)
        self.tokens = np.zeros(len(state.rows), dtype=np.int64)
        self.taken = np.zeros(len(state.rows), dtype=np.int64)
        self.best_first = rows_best_first(state)
        self.victims: list[int] = []

    def worst_gives_way(self) -> None:
        row = self.best_first.pop()
        blocks = row_blocks(self.state, row)
        self.ref[blocks] -= 1
        self.free += int((self.ref[blocks] == 0).sum()) + int(self.taken[row])
        self.budget += int(self.tokens[row])
        self.runs[row], self.tokens[row], self.taken[row] = False, 0, 0
        self.victims.append(row)

    def serve(self, row: int, want: int) -> None:
        config, rows = self.state.config, self.state.rows
        tokens = max(min(want, config.long_prefill_token_threshold or want, self.budget), 0)
        lacks = max(blocks_for(int(rows.computed[row]) + tokens, config.block_size) - int(rows.blocks[row]), 0)
        need = lacks * config.group_count
        while need > self.free and self.runs[row]:
            self.worst_gives_way()
        if self.runs[row]:
            self.free -= need
            self.budget -= tokens
            self.tokens[row], self.taken[row] = tokens, need


def make_room(state: State) -> StepPlanned | None:
    """The plan of a step that preempts some rows. If no row of its microbatch is left then, all rows are served."""
    turn = in_turn(state)
    room = _served(state, turn)
    if not room.tokens.any() and not turn.all():
        room = _served(state, np.ones_like(turn))
    if not room.tokens.any():
        return None
    rest = replace(state, rows=without_rows(state.rows, np.flatnonzero(~room.runs).tolist()))
    tokens = room.tokens[room.runs]
    differs = np.flatnonzero(tokens != expected_work(rest, drafts=False).tokens).tolist()
    changed = tuple((row, int(tokens[row])) for row in differs)
    return StepPlanned(step=state.planned, preempted=tuple(room.victims), changed=changed)


def _served(state: State, turn: np.ndarray) -> _Room:
    """The room in which the rows of `turn` (bool[R]) are served."""
    room = _Room(state)
    for row, want in enumerate((cut(state.config, state.rows, wants(state.rows)) * turn).tolist()):
        if room.runs[row]:
            room.serve(row, want)
    return room
