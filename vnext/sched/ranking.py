"""Ranking: a state's waiting and running requests in the order of its policy, best first.

Owns the data that a policy sees. The built-in policies have fast forms, which tests compare with the plain form
(`keys`). First come, first served costs nothing, because the queue and the rows are already in order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from vnext.sched.policies import PATIENCE, STEADY, Candidate, Key, key_of, policy_of
from vnext.sched.turns import places_in_turn, rows_in_turn
from vnext.state.facilities.weights import has_begun
from vnext.state.state import State
from vnext.state.store import fields


def places_best_first(state: State, count: int) -> Sequence[int]:
    """Up to `count` places in the queue, best first; in a paused engine only of requests that have begun."""
    waiting = state.waiting
    if state.paused:
        best_first = places_best_first(replace(state, paused=""), len(waiting))
        return [place for place in best_first if has_begun(state, waiting[place])][:count]
    if state.config.policy == "fcfs":
        return range(min(count, len(waiting)))
    if state.config.policy == "priority":
        priorities = np.array([entry.priority for entry in waiting], dtype=np.int64)
        best: list[int] = np.argsort(priorities, kind="stable")[:count].tolist()
        return best
    if state.config.policy == "fair":
        return places_in_turn(state, count)
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
    found = []
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
            )  # fmt: skip
        )
        before[request.root] += 1
    return found
