"""The waiting queue is in order of arrival. Who is served first is a decision (vnext/sched), never part of the state."""

from __future__ import annotations

from bisect import bisect_left

from vnext.state.state import Waiting


def enqueue(queue: tuple[Waiting, ...], entry: Waiting) -> tuple[Waiting, ...]:
    """The queue with one more entry at its place: a new one at the end, a preempted one where it once stood."""
    if not queue or queue[-1].id < entry.id:
        return (*queue, entry)
    at = bisect_left(queue, entry.id, key=lambda other: other.id)
    return (*queue[:at], entry, *queue[at:])
