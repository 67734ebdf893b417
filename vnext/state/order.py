"""The waiting queue is in order of arrival. Who is served first is a decision (vnext/sched), never part of the state.

Owns every change of the queue, and with it `State.waiting_sum`, by which a digest knows the queue without reading it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Set

import msgspec
import xxhash

from vnext.state.state import State, Waiting

_ENTRY = struct.Struct("<4q")
_WORD = 2**64 - 1


def enqueue(state: State, entry: Waiting) -> State:
    """One more entry at its place: a new one at the end, a preempted one where it once stood."""
    queue = state.waiting
    at = len(queue) if not queue or queue[-1].id < entry.id else bisect_left(queue, entry.id, key=lambda other: other.id)
    return msgspec.structs.replace(
        state, waiting=(*queue[:at], entry, *queue[at:]), waiting_sum=(state.waiting_sum + word_of(entry)) & _WORD
    )


def dequeue(state: State, places: Set[int]) -> State:
    """The queue without the entries at these places."""
    queue = state.waiting
    gone = sum(word_of(queue[place]) for place in places)
    rest = tuple(entry for place, entry in enumerate(queue) if place not in places)
    return msgspec.structs.replace(state, waiting=rest, waiting_sum=(state.waiting_sum - gone) & _WORD)


def word_of(entry: Waiting) -> int:
    """What one entry adds to the queue's sum: 64 bits over all of it that decisions depend on."""
    return xxhash.xxh3_64_intdigest(_ENTRY.pack(entry.id, entry.known, entry.epoch, entry.cached))


def sum_of(queue: tuple[Waiting, ...]) -> int:
    """The sum over a whole queue."""
    return sum(map(word_of, queue)) & _WORD
