"""Microbatches: whose turn a step is, decided a second time.

The engine's forms are vnext/state/store/columns_numpy.py (`in_turn`) and columns.h; this one goes row by row.
"""

from __future__ import annotations

from vnext.sim.checks.plain_state import PlainState


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
