"""Ranking: a state's waiting and running requests in the order of its policy, best first.

Owns the data that a policy sees. The built-in policies have fast forms, which tests compare with the plain form
(`keys`). First come, first served costs nothing, because the queue and the rows are already in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from msgspec.structs import replace

from vnext.sched.deadline import BEFORE_ALL, IN_TIME, LATE, NS_PER_MS, OVERDUE, Due, usual_ms
from vnext.sched.policies import PATIENCE, STEADY, Candidate, Key, key_of, policy_of
from vnext.state.facilities.weights import has_begun
from vnext.state.state import State, Waiting
from vnext.state.store import fields
from vnext.state.store.clients import ClientKey, key_of as client_key, price, services


def places_best_first(state: State, count: int) -> Sequence[int]:
    """Up to `count` places in the queue, best first; in a paused engine only of requests that have begun."""
    waiting = state.waiting
    if state.paused:
        best_first = places_best_first(replace(state, paused=""), len(waiting))
        return [place for place in best_first if has_begun(state, waiting[place])][:count]
    if state.config.policy == "fcfs" or (state.clients is not None and state.clients.alone is not None):
        return range(min(count, len(waiting)))
    if state.config.policy == "priority":
        priorities = np.array([entry.priority for entry in waiting], dtype=np.int64)
        best: list[int] = np.argsort(priorities, kind="stable")[:count].tolist()
        return best
    if state.config.policy == "fair":
        return places_in_turn(state, count)
    if (usual := usual_ms(state.config.policy)) is not None:
        return places_by_deadline(state, usual)[:count]
    ranked = keys(state)
    return sorted(range(len(waiting)), key=lambda place: ranked[waiting[place].id])[:count]


def rows_best_first(state: State) -> list[int]:
    """All rows, best first; the last one is preempted first."""
    rows = state.rows
    if state.config.policy == "fcfs":
        if state.tier is not None or state.sought is not None:  # a request for which ranks have read has been overtaken
            overtaken: list[int] = np.argsort(rows.id).tolist()
            return overtaken
        return list(range(len(rows)))
    if state.config.policy == "priority":
        best: list[int] = np.lexsort((rows.id, rows.cells[fields.PRIORITY])).tolist()
        return best
    if state.config.policy == "fair":
        return rows_in_turn(state)
    if (usual := usual_ms(state.config.policy)) is not None:
        return rows_by_deadline(state, usual)
    ranked, ids = keys(state), rows.id.tolist()
    return sorted(range(len(rows)), key=lambda row: ranked[ids[row]])


def keys(state: State) -> dict[int, Key]:
    """The distinct key of every live request; the smallest is served first. Raises PolicyError.

    This form works for every policy; tests compare the fast forms above with it. Under `fair` a key is a place in the order of the
    queue, or in that of the rows.
    """
    name = state.config.policy
    if name == "fair":
        queue, ids = [entry.id for entry in state.waiting], state.rows.id.tolist()
        best_first = [ids[row] for row in rows_in_turn(state)], [queue[place] for place in places_in_turn(state, len(queue))]
        return {id_: (waits, place) for waits, part in enumerate(best_first) for place, id_ in enumerate(part)}
    policy = policy_of(name)
    ranked = {}
    for candidate in candidates(state):
        key = (*key_of(name, policy, candidate), candidate.id)
        ranked[candidate.id] = key if name in STEADY else _with_patience(candidate, key)
    return ranked


def _with_patience(candidate: Candidate, key: Key) -> Key:
    return (0, candidate.id) if candidate.preemptions >= PATIENCE else (1, *key)


def candidates(state: State) -> list[Candidate]:
    """Every live request as a policy sees it, in order of arrival."""
    rows = state.rows
    columns_read = (rows.id.tolist(), rows.known.tolist(), rows.computed.tolist(), rows.preemption_count.tolist())
    progress = {id_: (known, computed, preemptions, True) for id_, known, computed, preemptions in zip(*columns_read)}
    progress |= {entry.id: (entry.known, 0, entry.preemption_count, False) for entry in state.waiting}
    live = Counter(state.requests[id_].root for id_ in progress)
    running = Counter(state.requests[id_].root for id_ in columns_read[0])
    before: Counter[bytes] = Counter()
    found, now_ns = [], _now_ns(state)
    for id_, (known, computed, preemptions, runs) in sorted(progress.items()):
        request = state.requests[id_]
        found.append(
            Candidate(
                id=id_,
                priority=request.priority,
                arrival_ns=request.arrival_ns,
                prompt_length=request.prompt_length,
                max_tokens=request.sampling.max_tokens,
                known=known,
                computed=computed,
                preemptions=preemptions,
                running=runs,
                tenant_live=live[request.root],
                tenant_running=running[request.root],
                tenant_before=before[request.root],
                now_ns=now_ns,
            )  # fmt: skip
        )
        before[request.root] += 1
    return found


def _now_ns(state: State) -> int:
    """When the latest live request arrived, by the wall clock."""
    return max((request.arrival_ns for request in state.requests.mapping().values()), default=0)


# ---- the policy deadline -----------------------------------------------------------------------------------------


def places_by_deadline(state: State, usual: int) -> list[int]:
    """All places in the queue, best first."""
    requests, waiting = state.requests.mapping(), state.waiting
    ids = [entry.id for entry in waiting]
    begun = np.array([entry.known > requests[entry.id].prompt_length for entry in waiting], dtype=bool)
    impatient = np.array([entry.preemption_count >= PATIENCE for entry in waiting], dtype=bool)
    return _deadline_order(requests, ids, begun, impatient, _now_ns(state), usual)


def rows_by_deadline(state: State, usual: int) -> list[int]:
    """All rows, best first."""
    requests, rows, ids = state.requests.mapping(), state.rows, state.rows.id.tolist()
    begun = rows.known > np.array([requests[id_].prompt_length for id_ in ids], dtype=np.int64)
    return _deadline_order(requests, ids, begun, rows.preemption_count >= PATIENCE, _now_ns(state), usual)


def _deadline_order(
    requests: Mapping[int, Due], ids: Sequence[int], begun: np.ndarray, impatient: np.ndarray, now_ns: int, usual: int
) -> list[int]:
    """The positions of these requests, best first: `deadline_key` of all at once, and `impatient` ones before all by arrival."""
    numbers = np.array(ids, dtype=np.int64)
    arrived = np.array([requests[id_].arrival_ns for id_ in ids], dtype=np.int64)
    priorities = np.array([requests[id_].priority for id_ in ids], dtype=np.int64)
    allowed = np.where(priorities > 0, priorities, usual) * NS_PER_MS
    due = arrived + allowed
    first = np.where(begun | (due >= now_ns), IN_TIME, LATE)
    hurries = now_ns - arrived >= OVERDUE * allowed
    first, second = np.where(hurries, BEFORE_ALL, first), np.where(hurries, numbers, due)
    order: list[int] = np.lexsort((numbers, np.where(impatient, numbers, second), np.where(impatient, -1, first))).tolist()
    return order


# ---- the policy fair ---------------------------------------------------------------------------------------------
# From the service of each client (vnext/state/store/clients.py). Lower priority numbers first; within one the client with the
# least service; within a client first come, first served. A client's oldest request comes before all others once it was preempted
# PATIENCE times, so that turns cannot starve it. Where one client waits, the order is that of arrival, and nothing is counted.

Turn = tuple[int, int, int, int]
"""Sorts what waits: 0 before all or 1, then priority, service and request."""


def places_in_turn(state: State, count: int) -> Sequence[int]:
    """Up to `count` places in the queue, best first. Each request counts with its tokens for those behind it."""
    assert state.clients is not None
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
        served[key] += state.waiting[place].known * price(state.clients, state.requests[state.waiting[place].id])
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
        key = client_key(state.requests[id_])
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
        key = client_key(state.requests[id_])
        found[key] = min(id_, found.get(key, id_))
    return found


def _place(state: State, id_: int) -> int:
    return bisect_left(state.waiting, id_, key=_id)


def _id(entry: Waiting) -> int:
    return entry.id
