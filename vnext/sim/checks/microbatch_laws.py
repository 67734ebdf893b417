"""Laws of microbatches: whose turn a step is, decided a second time, and that everybody's comes.

The engine's forms are vnext/state/store/columns_numpy.py (`in_turn`) and columns.h; this one goes row by row.
"""

from __future__ import annotations

from vnext.sim.checks.plain_state import PlainState
from vnext.state.errors import LawBroken


def wants(seen: PlainState) -> list[int]:
    """The number of tokens that each row could compute. The token at its limit is never computed, because nothing is sampled after
    it."""
    columns_ = zip(seen.rows.known, seen.rows.placeholders, seen.rows.limit, seen.rows.computed)
    return [min(known + due, limit - 1) - computed for known, due, limit, computed in columns_]


def decoding(seen: PlainState) -> list[int]:
    """The rows that could compute a single token."""
    return [row for row, want in enumerate(wants(seen)) if want == 1]


def parts_of(seen: PlainState) -> int:
    """The parts into which the rows that decode are divided; 1 where a step takes them all."""
    count = 1 if seen.state.cautious else seen.state.config.microbatches
    return count if len(decoding(seen)) >= count else 1


def left_out(seen: PlainState) -> set[int]:
    """The rows that decode and that the next step does not take: it is the turn of others, or their tokens are in flight."""
    rows, parts = decoding(seen), parts_of(seen)
    if parts == 1:
        return set()
    size, place = len(rows), seen.state.planned % parts
    first, room = place * size // parts, (place + 1) * size // parts - place * size // parts
    for row in rows[first:] + rows[:first]:
        if room and not seen.rows.placeholders[row]:
            room -= 1
            rows.remove(row)
    return set(rows)


class TurnBook:
    """How long each request has been left out of the decisions of one run. Mutable: give it every decision once, in order."""

    def __init__(self) -> None:
        self._decoding: list[int] = []
        self._step = 0
        self._passed: dict[int, int] = {}

    def write(self, before: PlainState, after: PlainState, fills: bool) -> None:
        """S7, S8 of one decision, which `fills` a step and makes no room: a step that does may take everybody. Raises LawBroken.

        S7: a step takes no request whose token is in flight, and at most a part of those that decode.
        S8: while the same requests decode, each of them whose token is not in flight is in one of as many steps as there are
        microbatches, unless a step's budget ends before it.
        """
        if not fills or (parts := parts_of(before)) == 1:
            self._decoding = []
            return
        step, owed = after.in_flight[-1], [id_ for id_, due in zip(before.rows.id, before.rows.placeholders) if due]
        ids = [before.rows.id[row] for row in decoding(before)]
        taken = [id_ for id_ in step.ids if id_ in ids]
        if len(taken) > -(-len(ids) // parts) or set(taken) & set(owed):
            raise LawBroken("S7", f"step {step.step} takes {taken} of {ids}, and tokens of {owed} are in flight")
        if ids != self._decoding or step.step != self._step + 1 or sum(step.counts) >= before.state.config.max_num_batched_tokens:
            self._passed = {}
        self._decoding, self._step = ids, step.step
        self._passed = {id_: self._passed.get(id_, 0) + 1 for id_ in ids if id_ not in taken and id_ not in owed}
        if late := [id_ for id_, steps in self._passed.items() if steps >= parts]:
            raise LawBroken("S8", f"step {step.step} is the last of {parts} that leave out the requests {late}")
