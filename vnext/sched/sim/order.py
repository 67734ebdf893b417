"""Order: whom a policy serves first, spelled a second time from the simulator's own numbers.

The engine's forms are in vnext/sched/ranking.py, policies.py and house.py. Only a policy that is not known here, as tests
bring them, is asked as the engine asks it.
"""

from __future__ import annotations

from collections.abc import Callable

from vnext.sched.ranking import keys
from vnext.sched.sim import house
from vnext.sched.sim.snapshot import Snapshot
from vnext.state.state import Request

PATIENCE = 8
"""Preemptions after which a request comes before all others, under every policy that is not built in."""


class Tenants:
    """Of each cache salt: its live requests in order of arrival, and those of them that run."""

    def __init__(self, requests: list[Request], running: list[int]) -> None:
        self.live: dict[bytes, list[int]] = {}
        self.running: dict[bytes, int] = {}
        for request in requests:
            self.live.setdefault(request.root, []).append(request.id)
            self.running[request.root] = self.running.get(request.root, 0) + (request.id in running)


def policy_keys(seen: Snapshot) -> dict[int, tuple]:
    """Key of every live request; the smallest is served first."""
    state, requests, policy = seen.state, seen.state.requests.mapping(), seen.state.config.policy
    live = [*(entry.id for entry in state.waiting), *seen.id]
    if policy == "fcfs":
        return {id_: (id_,) for id_ in live}
    if policy == "priority":
        return {id_: (requests[id_].priority, id_) for id_ in live}
    order = HOUSE.get(policy)
    if order is None:
        return keys(state)
    return _house_keys(seen, [requests[id_] for id_ in sorted(live)], order)


def _house_keys(seen: Snapshot, requests: list[Request], order: Callable) -> dict[int, tuple]:
    tenants, found = Tenants(requests, seen.id), {}
    progress = {entry.id: (entry.known, 0, entry.epoch) for entry in seen.state.waiting}
    progress |= zip(seen.id, zip(seen.known, seen.computed, seen.epoch))
    for request in requests:
        known, computed, epoch = progress[request.id]
        impatient = epoch >= PATIENCE
        first = (0,) if impatient else (1, *order(request, tenants, known, computed, epoch))
        found[request.id] = (*first, request.id)
    return found


def fair_share(request: Request, tenants: Tenants, *_: int) -> tuple:
    mine = tenants.live[request.root]
    return (request.id + 4 * (mine.index(request.id) + len(mine)),)


def crowd_last(request: Request, tenants: Tenants, *_: int) -> tuple:
    return (tenants.running[request.root], request.priority, request.arrival_ns)


def least_computed(request: Request, tenants: Tenants, known: int, computed: int, epoch: int) -> tuple:
    return (computed, len(request.prompt) // 4 + request.sampling.max_tokens - 1 - computed)


def scattered(request: Request, tenants: Tenants, known: int, computed: int, epoch: int) -> tuple:
    return ((7919 * request.id + 31 * known + 17 * computed + epoch) % 13,)


HOUSE: dict[str, Callable] = {
    f"{house.__name__}:fair_share": fair_share,
    f"{house.__name__}:crowd_last": crowd_last,
    f"{house.__name__}:least_computed": least_computed,
    f"{house.__name__}:last_come": lambda request, *_: (-request.id,),
    f"{house.__name__}:all_equal": lambda request, *_: (),
    f"{house.__name__}:scattered": scattered,
}
