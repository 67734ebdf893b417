"""Turns: the order of the policy `fair`, from the service of each client (vnext/state/store/clients.py).

Lower priority numbers first; within one the client with the least service; within a client first come, first served. A client's
oldest request comes before all others once it was preempted PATIENCE times, so that turns cannot starve it. Where one client
waits, the order is that of arrival, and nothing is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from vnext.sched.policies import PATIENCE
from vnext.state.state import State, Waiting
from vnext.state.store.clients import ClientKey, key_of, services

Turn = tuple[int, int, int, int]
"""Sorts what waits: 0 before all or 1, then priority, service and request."""


def places_in_turn(state: State, count: int) -> Sequence[int]:
    """Up to `count` places in the queue, best first. Each request counts with its tokens for those behind it."""
    assert state.clients is not None
    if state.clients.alone is not None:
        return range(min(count, len(state.waiting)))
    queues = {key: client.queue for key, client in state.clients.live.mapping().items() if client.queue}
    if len(queues) <= 1:
        return range(min(count, len(state.waiting)))
    served, oldest = services(state, state.clients), _oldest(state)
    turns = [(_turn(state, key, queue[0], served[key], oldest), key, 0) for key, queue in queues.items()]
    heapify(turns)
    places: list[int] = []
    while turns and len(places) < count:
        _, key, at = heappop(turns)
        places.append(place := _place(state, queues[key][at]))
        served[key] += state.waiting[place].known
        if at + 1 < len(queues[key]):
            heappush(turns, (_turn(state, key, queues[key][at + 1], served[key], oldest), key, at + 1))
    return places


def rows_in_turn(state: State) -> list[int]:
    """All rows, best first. The last one is preempted first: the latest of the client with the most service."""
    assert state.clients is not None
    if state.clients.alone is not None:
        by_arrival: list[int] = state.rows.id.argsort().tolist()
        return by_arrival
    ids, preemptions = state.rows.id.tolist(), state.rows.preemption_count.tolist()
    served, oldest = services(state, state.clients), _oldest(state)
    turns = []
    for row, (id_, count) in enumerate(zip(ids, preemptions)):
        key = key_of(state.requests[id_])
        turns.append((_sorted_by(key, id_, served[key], oldest.get(key) == id_ and count >= PATIENCE), row))
    return [row for _, row in sorted(turns)]


def _turn(state: State, key: ClientKey, id_: int, service: int, oldest: dict[ClientKey, int]) -> Turn:
    hurries = oldest.get(key) == id_ and state.waiting[_place(state, id_)].preemption_count >= PATIENCE
    return _sorted_by(key, id_, service, hurries)


def _sorted_by(key: ClientKey, id_: int, service: int, hurries: bool) -> Turn:
    return (0, 0, 0, id_) if hurries else (1, key[0], service, id_)


def _oldest(state: State) -> dict[ClientKey, int]:
    """The request of each client that came first; none while no request can have been preempted PATIENCE times."""
    assert state.clients is not None
    if state.counters.preempted < PATIENCE:
        return {}
    found = {key: client.queue[0] for key, client in state.clients.live.mapping().items() if client.queue}
    for id_ in state.rows.id.tolist():
        key = key_of(state.requests[id_])
        found[key] = min(id_, found.get(key, id_))
    return found


def _place(state: State, id_: int) -> int:
    return bisect_left(state.waiting, id_, key=_id)


def _id(entry: Waiting) -> int:
    return entry.id
