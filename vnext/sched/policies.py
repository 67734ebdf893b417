"""Policies: the order of service and of preemption, as one pure function from a candidate to a key.

The smallest key is served first, the largest is preempted first; of equal keys the earlier arrival is better. Owns the
contract, the built-in policies and the lookup of user policies named `package.module:function`. A policy only orders.
It does not decide what fits, what a step takes or what a plan contains, so it cannot break a law.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, cast

import msgspec

from vnext.sched.deadline import deadline_key, usual_ms

Key = tuple[int | float, ...]
PATIENCE = 8
"""The number of preemptions after which a request comes before all others, so that no policy whose order changes can starve it."""
OWN_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one live request that a policy may use. None of it depends on texts, so redacted logs replay any policy.

    `id` counts arrivals from 0. Of the `known` tokens, `computed` are in the cache (0 while the request waits).
    `preemptions` counts its preemptions. A tenant is the set of requests with one cache salt: `tenant_live` of them live
    (including this one), `tenant_running` run, and `tenant_before` live ones arrived before this one. `now_ns` is when the latest
    live request arrived.
    """

    id: int
    priority: int
    arrival_ns: int
    prompt_length: int
    max_tokens: int
    known: int
    computed: int
    preemptions: int
    running: bool
    tenant_live: int
    tenant_running: int
    tenant_before: int
    now_ns: int

    @property
    def generated(self) -> int:
        """Tokens sampled and committed."""
        return self.known - self.prompt_length

    @property
    def remaining(self) -> int:
        """The number of tokens still to be computed if the request reaches its limit."""
        return self.prompt_length + self.max_tokens - 1 - self.computed


class Policy(Protocol):
    """A pure function: equal candidates give equal keys, in any process and at any time."""

    def __call__(self, candidate: Candidate, /) -> Key: ...


class PolicyError(RuntimeError):
    """A policy that cannot be used. The message is one sentence with its name and the remedy."""


def first_come(candidate: Candidate) -> Key:
    return (candidate.id,)


def lowest_priority(candidate: Candidate) -> Key:
    """Lowest priority number first, then earliest arrival."""
    return (candidate.priority, candidate.id)


def by_deadline(usual: int) -> Policy:
    """The policy `deadline` whose requests allow `usual` ms where they say nothing."""
    return lambda each: deadline_key(each, each.id, each.generated > 0, each.now_ns, usual)


BUILT_IN: dict[str, Policy] = {"fcfs": first_come, "priority": lowest_priority, "fair": lowest_priority}
"""By name, but for `deadline:MS` (deadline.py). `fair` is more than a key: this one orders the requests of one client, and
ranking.py the clients."""
STEADY = ("fcfs", "priority")
"""Those that never change the order of two requests."""


def is_built_in(name: str) -> bool:
    """Whether the policy of this name needs no import of others' code."""
    return name in BUILT_IN or usual_ms(name) is not None


def require_name(name: str) -> None:
    """Raise PolicyError unless the name is built in or has the form of a user policy. Imports nothing."""
    if not is_built_in(name) and not OWN_NAME.fullmatch(name):
        known = ", ".join((*BUILT_IN, "deadline:MS"))
        raise PolicyError(f"there is no policy {name!r}: choose {known}, or name your own as package.module:function")


@cache
def policy_of(name: str) -> Policy:
    """The policy of this name, after a trial on two candidates. Raises PolicyError."""
    require_name(name)
    if (usual := usual_ms(name)) is not None:
        return by_deadline(usual)
    if name in BUILT_IN:
        return BUILT_IN[name]
    policy = _imported(name)
    _require_signature(name, policy)
    for candidate in SAMPLES:
        if key_of(name, policy, candidate) != key_of(name, policy, candidate):
            raise PolicyError(f"the policy {name} gives one candidate two different keys: it must be a pure function")
    return policy


def key_of(name: str, policy: Policy, candidate: Candidate) -> Key:
    """The candidate's key. Raises PolicyError if the policy raises or returns anything but a tuple of numbers."""
    try:
        key = policy(candidate)
    except Exception as error:  # user code: any exception becomes one sentence
        what = f"{type(error).__name__}: {error}"
        raise PolicyError(f"the policy {name} failed for request {candidate.id} with {what}") from error
    if not isinstance(key, tuple) or not all(isinstance(part, (int, float)) and part == part for part in key):
        what = f"returned {key!r:.80} for request {candidate.id}"
        raise PolicyError(f"the policy {name} {what}: it must return a tuple of numbers, none of them NaN")
    return key


def _imported(name: str) -> Policy:
    module, _, function = name.partition(":")
    try:
        with _working_directory_on_path():
            found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # user code runs when its module is imported
        what = f"the policy {name} cannot be imported ({type(error).__name__}: {error})"
        raise PolicyError(f"{what}: start where Python finds the module, or put its folder on PYTHONPATH") from error
    if not callable(found):
        raise PolicyError(f"the policy {name} cannot be used: the module {module} has no function {function}")
    return cast(Policy, found)  # key_of checks every key that it returns


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Python also finds modules of the working directory, after all others, until the block ends: a file that happens to lie there
    never takes the place of an installed module."""
    sys.path.append("")
    try:
        yield
    finally:
        sys.path.reverse()
        sys.path.remove("")  # the last one
        sys.path.reverse()


def _require_signature(name: str, policy: Policy) -> None:
    """Require one parameter of type Candidate, so that a name in a log cannot call a function that is not a policy."""
    try:
        parameters = list(inspect.signature(policy).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        parameters = []
    needed = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    hint = parameters[0].annotation if len(needed) == 1 and needed[0] is parameters[0] else None
    if hint is not Candidate and str(hint).split(".")[-1] != "Candidate":
        right = f"def {name.partition(':')[2]}(candidate: Candidate) -> tuple[int | float, ...]"
        raise PolicyError(f"the policy {name} has the wrong signature: write {right}")


def _sample(running: bool) -> Candidate:
    return Candidate(
        id=3, priority=0, arrival_ns=10**18, prompt_length=40, max_tokens=16, known=42 if running else 40,
        computed=41 if running else 0, preemptions=0, running=running, tenant_live=2, tenant_running=1 + running,
        tenant_before=1, now_ns=10**18 + 10**9,
    )  # fmt: skip


SAMPLES = (_sample(running=False), _sample(running=True))
