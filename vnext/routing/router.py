"""A router: the views of several engines, a policy, and a record of each decision.

Owns the order of a decision: what each view knows, the policy's choice, the record, and only then the request counts as
routed. It sends nothing: its caller feeds the views (View.feed), says which replicas may get requests, and sends the
request where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vnext.routing.decisions import NOBODY, Decision, key_digest
from vnext.routing.policies import DEFAULT_POLICY, HIT_WEIGHT, Arriving, Candidate, require_policy, route
from vnext.routing.prompts import Prompt
from vnext.routing.view import View

BLIND = Candidate(hit_tokens=0, waiting_tokens=0, running=0, waiting=0, free_pages=0, page_count=0)
"""A replica that may get requests and of which nothing is known: all are alike to any policy."""
Record = Callable[[Decision], None]


class Router:
    """Mutable. `views` has one for each replica, at its place. `record` takes every decision before it has an effect, None for no
    record; `clock_us` gives a decision's time. `hit_weight` as in Arriving."""

    def __init__(
        self, replica_count: int, policy: str = DEFAULT_POLICY, record: Record | None = None, clock_us: Callable[[], int] = int,
        hit_weight: float = HIT_WEIGHT,
    ) -> None:  # fmt: skip
        """Raises RoutingPolicyError."""
        require_policy(policy)
        self.policy = policy
        self.views = [View() for _ in range(replica_count)]
        self.record, self.clock_us, self.hit_weight = record, clock_us, hit_weight
        self._places: dict[str, int] = {}
        self._sequence = 0

    def choose(self, name: str, prompt: Prompt, ready: Sequence[bool], key: bytes = b"") -> int | None:
        """The place of the replica that this request goes to, None if none is ready. `ready`: which may get requests now.
        `key`: what `consistent_hash` keeps together, such as a user or a session. A request that is routed again counts
        where it was routed last.

        A replica whose view is being renewed gets nothing meanwhile, a matter of milliseconds, unless that is true of all.
        """
        self.done(name)
        candidates = self._candidates(prompt, ready)
        arriving = Arriving(tokens=len(prompt), key=key_digest(key), sequence=self._sequence, hit_weight=self.hit_weight)
        chosen = route(self.policy, candidates, arriving)
        if self.record is not None:
            place, time_us = NOBODY if chosen is None else chosen, self.clock_us()
            taken = tuple(view.snapshots for view in self.views)
            self.record(Decision(arriving=arriving, candidates=candidates, chosen=place, time_us=time_us, snapshots=taken))
        self._sequence += 1
        if chosen is not None:
            self._places[name] = chosen
            self.views[chosen].routed(name, prompt)
        return chosen

    def done(self, name: str) -> None:
        """The request was refused or withdrawn, was lost with its replica, or has ended. Idempotent."""
        if (place := self._places.pop(name, None)) is not None:
            self.views[place].done(name)

    def _candidates(self, prompt: Prompt, ready: Sequence[bool]) -> tuple[Candidate, ...]:
        found = tuple(view.candidate(prompt, is_ready) for view, is_ready in zip(self.views, ready))
        if any(each.is_ready for each in found):
            return found
        return tuple(BLIND if is_ready else each for each, is_ready in zip(found, ready))
