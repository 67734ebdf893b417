"""Order: the order of a policy, computed a second time from the simulator's own numbers.

The engine's forms are in vnext/sched/ranking.py, policies.py and sample_policies.py. Only policies that are unknown
here, such as those of tests, are called as the engine calls them.
"""

from __future__ import annotations

from collections.abc import Callable

from vnext.sched.policies import Key
from vnext.sched.ranking import keys
from vnext.sim import sample_policies
from vnext.sim.checks.plain_state import PlainState
from vnext.state.state import Request

Order = Callable[["Request", "Tenants", int, int, int], Key]
"""The key that a policy of sample_policies.py gives to a request among all tenants, from its known and computed tokens
and its preemption count.
"""
PATIENCE = 8
"""The number of preemptions after which a request comes before all others, under every policy but fcfs and priority."""


class Tenants:
    """For each cache salt: its live requests in order of arrival, and those that run."""

    def __init__(self, requests: list[Request], running: list[int]) -> None:
        self.live: dict[bytes, list[int]] = {}
        self.running: dict[bytes, int] = {}
        for request in requests:
            self.live.setdefault(request.root, []).append(request.id)
            self.running[request.root] = self.running.get(request.root, 0) + (request.id in running)


def policy_keys(seen: PlainState) -> dict[int, Key]:
    """Key of every live request; the smallest is served first."""
    state, requests, policy = seen.state, seen.state.requests.mapping(), seen.state.config.policy
    live = [*(entry.id for entry in state.waiting), *seen.rows.id]
    if policy == "fcfs":
        return {id_: (id_,) for id_ in live}
    if policy == "priority":
        return {id_: (requests[id_].priority, id_) for id_ in live}
    if policy == "fair":
        return turn_keys(seen)
    if policy.startswith("deadline"):
        return due_keys(seen, int(policy.partition(":")[2] or 1000))
    order = SAMPLE_ORDERS.get(policy)
    if order is None:
        return keys(state)
    return _sample_keys(seen, [requests[id_] for id_ in sorted(live)], order)


def turn_keys(seen: PlainState) -> dict[int, Key]:
    """Under `fair`, the place of every row among the rows and of every waiting request in the queue. Law F2 has compared what the
    clients were charged, in units of which a token of weight 3 costs a third as many as one of weight 1."""
    state, requests = seen.state, seen.state.requests.mapping()
    assert state.clients is not None
    of = {id_: (requests[id_].priority, requests[id_].client) for id_ in (*seen.rows.id, *(entry.id for entry in state.waiting))}
    cost = {id_: state.clients.unit // requests[id_].weight for id_ in of}
    served = dict.fromkeys(of.values(), 0) | {key: client.charged for key, client in state.clients.live.items()}
    oldest = {key: min(id_ for id_ in of if of[id_] == key) for key in of.values()}
    for id_, computed in zip(seen.rows.id, seen.rows.computed):
        served[of[id_]] += computed * cost[id_]

    def turn(id_: int, preemptions: int) -> Key:
        hurries = preemptions >= PATIENCE and oldest[of[id_]] == id_
        return (0, id_) if hurries else (1, of[id_][0], served[of[id_]], id_)

    rows = sorted(zip(seen.rows.id, seen.rows.preemption_count), key=lambda row: turn(*row))
    found: dict[int, Key] = {id_: (0, place) for place, (id_, _) in enumerate(rows)}
    queue = list(state.waiting)
    while queue:
        best = min(queue, key=lambda entry: turn(entry.id, entry.preemption_count))
        found[best.id] = (1, len(state.waiting) - len(queue))
        served[of[best.id]] += best.known * cost[best.id]
        queue.remove(best)
    return found


def due_keys(seen: PlainState, usual: int) -> dict[int, Key]:
    """Under `deadline:MS`: impatient and then overdue requests by arrival, then those in time by deadline, then the late ones. A
    request that has its first token is in time."""
    state, requests = seen.state, seen.state.requests.mapping()
    progress: dict[int, tuple[int, int]] = {entry.id: (entry.known, entry.preemption_count) for entry in state.waiting}
    progress |= zip(seen.rows.id, zip(seen.rows.known, seen.rows.preemption_count))
    now_ns = max((requests[id_].arrival_ns for id_ in progress), default=0)
    found: dict[int, Key] = {}
    for id_, (known, preemptions) in progress.items():
        request = requests[id_]
        allowed_ns = 10**6 * (usual if request.priority <= 0 else request.priority)
        waited_ns = now_ns - request.arrival_ns
        is_late = waited_ns > allowed_ns and known == len(request.prompt) // 4
        place = -2 if preemptions >= PATIENCE else -1 if waited_ns >= 8 * allowed_ns else int(is_late)
        found[id_] = (place, 0 if place < 0 else request.arrival_ns + allowed_ns, id_)
    return found


def _sample_keys(seen: PlainState, requests: list[Request], order: Order) -> dict[int, Key]:
    tenants = Tenants(requests, seen.rows.id)
    found: dict[int, Key] = {}
    progress: dict[int, tuple[int, int, int]] = {
        entry.id: (entry.known, 0, entry.preemption_count) for entry in seen.state.waiting
    }
    progress |= zip(seen.rows.id, zip(seen.rows.known, seen.rows.computed, seen.rows.preemption_count))
    for request in requests:
        known, computed, preemptions = progress[request.id]
        impatient = preemptions >= PATIENCE
        first: Key = (0,) if impatient else (1, *order(request, tenants, known, computed, preemptions))
        found[request.id] = (*first, request.id)
    return found


def fair_share(request: Request, tenants: Tenants, *_: int) -> Key:
    mine = tenants.live[request.root]
    return (request.id + 4 * (mine.index(request.id) + len(mine)),)


def crowd_last(request: Request, tenants: Tenants, *_: int) -> Key:
    return (tenants.running[request.root], request.priority, request.arrival_ns)


def least_computed(request: Request, tenants: Tenants, known: int, computed: int, preemptions: int) -> Key:
    return (computed, len(request.prompt) // 4 + request.sampling.max_tokens - 1 - computed)


def scattered(request: Request, tenants: Tenants, known: int, computed: int, preemptions: int) -> Key:
    return ((7919 * request.id + 31 * known + 17 * computed + preemptions) % 13,)


SAMPLE_ORDERS: dict[str, Order] = {
    f"{sample_policies.__name__}:fair_share": fair_share,
    f"{sample_policies.__name__}:crowd_last": crowd_last,
    f"{sample_policies.__name__}:least_computed": least_computed,
    f"{sample_policies.__name__}:last_come": lambda request, *_: (-request.id,),
    f"{sample_policies.__name__}:all_equal": lambda request, *_: (),
    f"{sample_policies.__name__}:scattered": scattered,
}
