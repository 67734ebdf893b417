"""House policies: what users might bring as `package.module:function`, for the simulator to play with.

Good ones and bad ones: keys that change while a request runs, that are all equal, that turn the order round. The
simulator spells their order a second time (order.py). Logs of simulated runs name them by this module, which stays here.
"""

from __future__ import annotations

from vnext.sched.policies import Candidate

Key = tuple[int | float, ...]


def fair_share(candidate: Candidate) -> Key:
    return (candidate.id + 4 * (candidate.tenant_before + candidate.tenant_live),)


def crowd_last(candidate: Candidate) -> Key:
    """Tenants with much in the batch last, then by priority and the wall clock, which jumps."""
    return (candidate.tenant_running, candidate.priority, candidate.arrival_ns)


def least_computed(candidate: Candidate) -> Key:
    """Whoever has come furthest gives way: only patience ends that."""
    return (candidate.computed, candidate.remaining)


def last_come(candidate: Candidate) -> Key:
    return (-candidate.id,)


def all_equal(candidate: Candidate) -> Key:
    return ()


def scattered(candidate: Candidate) -> Key:
    """An order that means nothing and changes with every token."""
    return ((candidate.id * 7919 + candidate.known * 31 + candidate.computed * 17 + candidate.preemptions) % 13,)


FUNCTIONS = (fair_share, crowd_last, least_computed, last_come, all_equal, scattered)
POLICIES = tuple(f"{__name__}:{function.__name__}" for function in FUNCTIONS)
"""Their names in a configuration."""
