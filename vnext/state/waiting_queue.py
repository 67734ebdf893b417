"""The waiting queue, in order of arrival. Who is served first is a decision (vnext/sched), not part of the state.

Owns every change of the queue, and `State.waiting_hash`, which lets a digest cover the queue without reading it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Set

import msgspec
import xxhash

from vnext.state.block_hash import block_hashes, versioned_root
from vnext.state.config import SchedulerConfig
from vnext.state.state import Request, State, Waiting

_ENTRY = struct.Struct("<4q")
_WORD = 2**64 - 1


def entry_of(
    config: SchedulerConfig, label: str, request: Request, tokens: bytes, preemptions: int = 0, cached: int = -1, transfer: int = -1
) -> Waiting:
    """The entry of a request with these tokens, whose blocks are named by the weights of this label."""
    root = versioned_root(request.root, label)
    return Waiting(
        id=request.id,
        priority=request.priority,
        tokens=tokens,
        block_hashes=block_hashes(root, tokens, config.block_size) if config.prefix_caching else (),
        preemption_count=preemptions,
        cached=cached,
        hits_max=request.hits_max(config),
        transfer=transfer,
    )


def enqueue(state: State, entry: Waiting) -> State:
    """Add one entry at its place: a new request at the end, a preempted one in order of arrival."""
    queue = state.waiting
    at = len(queue) if not queue or queue[-1].id < entry.id else bisect_left(queue, entry.id, key=lambda other: other.id)
    return msgspec.structs.replace(
        state, waiting=(*queue[:at], entry, *queue[at:]), waiting_hash=(state.waiting_hash + entry_hash(entry)) & _WORD
    )


def dequeue(state: State, places: Set[int]) -> State:
    """The queue without the entries at these places."""
    queue = state.waiting
    gone = sum(entry_hash(queue[place]) for place in places)
    rest = tuple(entry for place, entry in enumerate(queue) if place not in places)
    return msgspec.structs.replace(state, waiting=rest, waiting_hash=(state.waiting_hash - gone) & _WORD)


def entry_hash(entry: Waiting) -> int:
    """The contribution of one entry to the queue's hash: 64 bits over everything in it that decisions depend on."""
    return xxhash.xxh3_64_intdigest(_ENTRY.pack(entry.id, entry.known, entry.preemption_count, entry.cached))


def queue_hash(queue: tuple[Waiting, ...]) -> int:
    """The hash of a whole queue: the sum over its entries."""
    return sum(map(entry_hash, queue)) & _WORD
