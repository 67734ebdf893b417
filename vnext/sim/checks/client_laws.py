"""Laws of clients: what each has had computed, counted a second time, and that none falls far behind while it waits.

The engine's form is vnext/state/store/clients.py. This one counts token by token, from the rows before and after every event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from vnext.sim.checks.plain_state import PlainState
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, RequestArrived, StepCommitted, plan_of
from vnext.state.facilities.tier import transferring
from vnext.state.store.clients import NEXT_TOKENS, ClientKey, services
from vnext.state.traits import everyone_leaves

PATIENCE = 8


class ClientBook:
    """The clients of one run. Mutable: give it every event once, in order."""

    def __init__(self) -> None:
        self._keys: dict[int, ClientKey] = {}
        self._service: dict[ClientKey, int] = {}
        self._idle: dict[ClientKey, int] = {}
        self._next_starts: dict[int, int] = {}
        self._got: dict[ClientKey, int] = {}
        self._since: dict[ClientKey, dict[ClientKey, int]] = {}
        self._most: dict[int, int] = {}
        self._alone: ClientKey | None = None

    def write(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """F1, F2 of one event. Raises LawBroken."""
        self.note(event)
        gained = self.count(before, after)
        if after.state.clients is not None:
            self.falls_behind(before, event, after)
            self._count(before, event, after, gained)
            self._compare(before, event, after)

    def note(self, event: AnyEvent) -> None:
        """Whose request it is that arrives."""
        if isinstance(event, RequestArrived):
            self._keys[event.id] = event.priority, event.client

    def count(self, before: PlainState, after: PlainState) -> Counter[ClientKey]:
        """The tokens that an event computes for each client."""
        gained = self._gained(before, after)
        self._got |= {key: self._got.get(key, 0) + tokens for key, tokens in gained.items()}
        return gained

    def restart(self) -> None:
        """Somebody was admitted whose turn it was not: from here on everybody is as far behind as it is."""
        self._since.clear()

    def _gained(self, before: PlainState, after: PlainState) -> Counter[ClientKey]:
        """The tokens that an event computes for each client, less what rows lose that go back: of rows that were there, and of
        those that join behind their hits."""
        had = dict(zip(before.rows.id, before.rows.computed))
        starts = dict(zip(after.in_flight[-1].ids, after.in_flight[-1].starts)) if after.in_flight else {}
        gained: Counter[ClientKey] = Counter()
        for id_, computed in zip(after.rows.id, after.rows.computed):
            start = had.get(id_)
            gained[self._keys[id_]] += computed - (starts[id_] if start is None else start)
        return gained

    def falls_behind(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """F1: while a client waits, no other of its priority gets more tokens computed than it and four times what the rows of a
        client may compute, and NEXT_TOKENS for each client."""
        state = after.state
        for priority, most in self._at_most(after).items():
            self._most[priority] = max(self._most.get(priority, 0), most)
        if state.paused or transferring(before.state) or transferring(state) or _hurries(before, event):
            self.restart()
        waiting = dict.fromkeys(self._keys[entry.id] for entry in state.waiting)
        self._since = {key: since for key, since in self._since.items() if key in waiting}
        for key in waiting:
            since = self._since.setdefault(key, dict(self._got))
            known = [other for other in self._got if other[0] == key[0]]
            bound = 4 * self._most.get(key[0], 0) + NEXT_TOKENS * len(known)
            for other in known:
                lead = self._got[other] - since.get(other, 0) - self._got.get(key, 0) + since.get(key, 0)
                if lead > bound:
                    raise LawBroken("F1", f"client {other} got {lead} tokens more than {key}, which waits: {bound} at most")

    def _at_most(self, seen: PlainState) -> dict[int, int]:
        """By priority, the most tokens that the rows of one client have and may come to have."""
        limits: Counter[ClientKey] = Counter()
        for id_, limit in zip(seen.rows.id, seen.rows.limit):
            limits[self._keys[id_]] += limit
        return {priority: max(each for key, each in limits.items() if key[0] == priority) for priority, _ in limits}

    def _count(self, before: PlainState, event: AnyEvent, after: PlainState, gained: Counter[ClientKey]) -> None:
        begin = [self._keys[id_] for id_ in _who_waits(before, event)]
        if isinstance(event, RequestArrived) and not before.state.config.counts_alone and self._alone != begin[0]:
            if not before.rows.id and not before.state.waiting:
                self._service, self._idle, self._next_starts, self._alone = {}, {}, {}, begin[0]
            elif self._alone is not None:
                self._service, self._alone = {self._alone: sum(before.rows.computed)}, None
        if self._alone is not None:
            return
        if isinstance(event, RequestArrived) and begin[0] not in self._service:
            self._service[begin[0]] = self._idle.pop(begin[0], 0)
        waited = dict.fromkeys(self._keys[entry.id] for entry in before.state.waiting)
        old = dict(self._service)
        for key in dict.fromkeys(begin):
            if key not in waited:
                self._lift(key, old, waited)
        for key, tokens in gained.items():
            self._service[key] += tokens
        live = dict.fromkeys(self._keys[id_] for id_ in (*after.rows.id, *(entry.id for entry in after.state.waiting)))
        self._idle |= {key: service for key, service in self._service.items() if key not in live}
        priorities = dict.fromkeys(priority for priority, _ in live)
        self._service = {key: service for key, service in self._service.items() if key in live}
        self._idle = {key: service for key, service in self._idle.items() if key[0] in priorities}
        self._next_starts = {priority: start for priority, start in self._next_starts.items() if priority in priorities}

    def _lift(self, key: ClientKey, old: dict[ClientKey, int], waited: Container[ClientKey]) -> None:
        others = {other: service for other, service in old.items() if other[0] == key[0] and other != key}
        if not others:
            return
        queued = [service for other, service in others.items() if other in waited]
        start = max(min(queued) if queued else max(others.values()), self._next_starts.get(key[0], 0))
        if old[key] <= start:
            self._service[key], self._next_starts[key[0]] = start, start + NEXT_TOKENS

    def _compare(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """F2: a client's service is what was computed for it, behind the service at which it began to wait."""
        clients = after.state.clients
        assert clients is not None
        served, idle = services(after.state, clients), clients.idle
        if isinstance(event, StepCommitted) and any(before.in_flight[0].drafts):  # those of a row that ends may stay
            for key in dict.fromkeys(self._keys[id_] for id_ in before.rows.id if id_ not in after.rows.id):
                for own, engines in ((self._service, served), (self._idle, idle)):
                    own |= {key: engines[key]} if key in own and key in engines else {}
        starts = {priority: group.next_start for priority, group in clients.classes.items() if group.next_start}
        found, right = (served, idle, starts), (self._service, self._idle, self._next_starts)
        if found != right:
            raise LawBroken("F2", f"the clients, those idle and the next starts are {found} where {right} is what was computed")


def _who_waits(before: PlainState, event: AnyEvent) -> Sequence[int]:
    """The requests that an event puts into the queue."""
    if isinstance(event, RequestArrived):
        return (event.id,)
    if (plan := plan_of(event)) is not None:
        return [before.rows.id[row] for row in plan.preempted]
    return before.rows.id if everyone_leaves(event) else ()


def _hurries(before: PlainState, event: AnyEvent) -> bool:
    """Whether a plan admits a request that was preempted so often that it comes before others."""
    admitted = plan.admitted if (plan := plan_of(event)) is not None else ()
    return any(before.state.waiting[place].preemption_count >= PATIENCE for place, _ in admitted)
