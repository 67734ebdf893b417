"""Clients: the tokens that each has had computed, from which the policy `fair` takes turns between them.

Owns `State.clients`, which only that policy has. A client is known by its number, and within each priority it is another one. Its
service is what it was charged and what its rows have computed, each token divided by its request's weight (`price`), so that a step
which admits and ends nothing changes nothing here. Who begins to wait is lifted to the least service of those who wait already, or
to the most of those who run where nobody does: time without requests earns nothing. Each one who is lifted puts the next one off by
NEXT_TOKENS of its own, so that no crowd of newcomers starves who waits. A client whose last request has ended is remembered while
others of its priority live: what it is ahead stays.

Who comes into an empty engine is alone, and nothing is counted until another one comes. It begins then with what its rows have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from vnext.state.store.rows import Rows
from vnext.state.store.versions import VersionedMap

FAIR = "fair"
UNIT = 27_720  # of which 1 to 12 are divisors, and no other weight is 0.4 % off
IDLE_CLIENTS_MAX = 256
NEXT_TOKENS = 16

replace = msgspec.structs.replace

ClientKey = tuple[int, int]
"""A priority and a client's number."""


class Client(msgspec.Struct, frozen=True):
    """A client with live requests of one priority. Its service is `charged` and what its `rows` rows have computed; `queue` are its
    requests that wait, in order of arrival."""

    charged: int
    rows: int = 0
    queue: tuple[int, ...] = ()


class ClientClass(msgspec.Struct, frozen=True):
    """A priority: its live clients, and the least service with which the next one that is lifted begins to wait."""

    live: int = 0
    next_start: int = 0


class Clients(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All clients with live requests, the service of those remembered without any, longest first, and their priorities. `alone`:
    the only one, for whom nothing else is here; None while clients are counted. `unit`: what a token of weight 1 costs, in which
    services are; above 1 where another weight has come."""

    live: VersionedMap[ClientKey, Client]
    idle: dict[ClientKey, int]
    classes: dict[int, ClientClass]
    alone: ClientKey | None = None
    unit: int = 1

    @cached_property
    def structure(self) -> bytes:
        """What each client was charged and has in the batch and in the queue, without its number."""
        if self.alone is not None:
            return f"alone {self.alone[0]}{self._weighed}".encode()
        live = sorted((key[0], client.queue, client.rows, client.charged) for key, client in self.live.items())
        idle = [(priority, service) for (priority, _), service in self.idle.items()]
        classes = sorted((priority, group.live, group.next_start) for priority, group in self.classes.items())
        return f"{(live, idle, classes)}{self._weighed}".encode()

    @property
    def _weighed(self) -> str:
        return f" of {self.unit}" if self.unit > 1 else ""


class Numbered(Protocol):
    """What of a request tells which one it is."""

    @property
    def id(self) -> int: ...


class Owned(Numbered, Protocol):
    """What of a request tells its client."""

    @property
    def priority(self) -> int: ...
    @property
    def client(self) -> int: ...
    @property
    def weight(self) -> int: ...


class Counting(Protocol):
    """What of a configuration tells whether one that is alone is counted."""

    @property
    def counts_alone(self) -> bool: ...


class Served(Protocol):
    """What of a state tells the service of its clients; `requests` are `Owned`."""

    @property
    def config(self) -> Counting: ...
    @property
    def clients(self) -> Clients | None: ...
    @property
    def waiting(self) -> Sequence[Numbered]: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def requests(self) -> VersionedMap[Any, Any]: ...


class _Change(msgspec.Struct, frozen=True):
    """What one request changes of its client: what it is charged, the number of rows, and who begins or ceases to wait."""

    key: ClientKey
    cost: int = 0
    rows: int = 0
    joins: int = -1
    leaves: int = -1


def no_clients(policy: str) -> Clients | None:
    """The clients before the first request; None where the policy takes no turns."""
    return Clients(live=VersionedMap(), idle={}, classes={}) if policy == FAIR else None


def key_of(request: Owned) -> ClientKey:
    return request.priority, request.client


def services(state: Served, clients: Clients) -> dict[ClientKey, int]:
    """The service of every client that is counted, in units. Costs time proportional to the clients and the rows."""
    if clients.alone is not None:
        return {}
    found = {key: client.charged for key, client in clients.live.mapping().items()}
    requests = state.requests.mapping()
    ids, had = state.rows.id.tolist(), state.rows.computed.tolist()
    if clients.unit > 1:
        had = [computed * price(clients, requests[id_]) for id_, computed in zip(ids, had)]
    for id_, cost in zip(ids, had):
        request = requests[id_]
        found[request.priority, request.client] += cost
    return found


def price(clients: Clients, request: Owned) -> int:
    """What a token of this request costs its client, in units: of weight 3, a third of one of weight 1, as the tags of start-time
    fair queueing advance (Goyal, Vin and Cheng, SIGCOMM 1996). Its client so gets three times the tokens while both wait."""
    return clients.unit // request.weight


def arrived(state: Served, request: Owned) -> Clients | None:
    """The clients after a request has joined the queue."""
    clients, key = state.clients, key_of(request)
    if clients is None:
        return None
    if len(state.requests) == 0 and not state.config.counts_alone and clients.alone != key:
        clients = Clients(live=VersionedMap(), idle={}, classes={}, alone=key)
    if request.weight != 1 and clients.unit == 1:
        clients = _in_units(clients)
    if clients.alone == key:
        return clients
    if clients.alone is not None:
        clients = _counted(state, clients, clients.alone)
    if key not in clients.live:
        clients = _with_newcomer(clients, key)
    return _changed(_lifted(state, clients, {key: price(clients, request)}), [_Change(key, joins=request.id)])


def left_queue(state: Served, ids: Iterable[int]) -> Clients | None:
    """The clients after these waiting requests have ended."""
    return _changed(state.clients, (_Change(key_of(state.requests[id_]), leaves=id_) for id_ in ids))


def admitted(state: Served, ids: Iterable[int], starts: Sequence[int]) -> Clients | None:
    """The clients after these requests have become rows, which compute from `starts` on."""
    requests = ((state.requests[id_], at) for id_, at in zip(ids, starts))
    return _changed(state.clients, (_Change(key_of(each), -_cost(state, each, at), 1, leaves=each.id) for each, at in requests))


def left_batch(state: Served, rows: Iterable[int]) -> Clients | None:
    """The clients after the requests of these rows have ended."""
    return _changed(state.clients, (_gone(state, row) for row in rows))


def preempted(state: Served, rows: Sequence[int]) -> Clients | None:
    """The clients after the requests of these rows wait again."""
    if (clients := state.clients) is None or clients.alone is not None:
        return clients
    changes = [replace(_gone(state, row), joins=int(state.rows.id[row])) for row in rows]
    prices: dict[ClientKey, int] = {}
    for change in changes:
        prices.setdefault(change.key, price(clients, state.requests[change.joins]))
    return _changed(_lifted(state, clients, prices), changes)


def _gone(state: Served, row: int) -> _Change:
    request = state.requests[int(state.rows.id[row])]
    return _Change(key_of(request), cost=_cost(state, request, int(state.rows.computed[row])), rows=-1)


def _cost(state: Served, request: Owned, tokens: int) -> int:
    return tokens * price(state.clients, request) if state.clients else 0


def _in_units(clients: Clients) -> Clients:
    """The clients, with UNIT units a token where there was one."""
    return replace(
        clients,
        live=VersionedMap({key: replace(each, charged=UNIT * each.charged) for key, each in clients.live.mapping().items()}),
        idle={key: UNIT * service for key, service in clients.idle.items()},
        classes={key: replace(group, next_start=UNIT * group.next_start) for key, group in clients.classes.items()},
        unit=UNIT,
    )


def _counted(state: Served, clients: Clients, key: ClientKey) -> Clients:
    """The clients of a state from here on, where one was alone."""
    client = Client(charged=0, rows=len(state.rows), queue=tuple(entry.id for entry in state.waiting))
    return replace(clients, live=VersionedMap({key: client}), classes={key[0]: ClientClass(live=1)}, alone=None)


def _with_newcomer(clients: Clients, key: ClientKey) -> Clients:
    group = clients.classes.get(key[0], ClientClass())
    return replace(
        clients,
        live=clients.live.with_items([(key, Client(charged=clients.idle.get(key, 0)))]),
        idle={other: ahead for other, ahead in clients.idle.items() if other != key} if key in clients.idle else clients.idle,
        classes={**clients.classes, key[0]: replace(group, live=group.live + 1)},
    )


def _lifted(state: Served, clients: Clients, prices: Mapping[ClientKey, int]) -> Clients:
    """The clients of a state after those of `prices` that have nothing in the queue begin to wait, for a token of such a price."""
    begin = [key for key in prices if not clients.live[key].queue and clients.classes[key[0]].live > 1]
    served, found = (services(state, clients), clients) if begin else ({}, clients)
    for key in begin:
        group, client = clients.classes[key[0]], clients.live[key]
        start = max(_least(found, key, served), group.next_start)
        if served[key] <= start:
            client = replace(client, charged=client.charged + start - served[key])
            group = replace(group, next_start=start + NEXT_TOKENS * prices[key])
            clients = replace(
                clients, live=clients.live.with_items([(key, client)]), classes={**clients.classes, key[0]: group}
            )
    return clients


def _least(clients: Clients, key: ClientKey, served: Mapping[ClientKey, int]) -> int:
    """The least service of the others of a client's priority that wait; where none does, the most of those that run."""
    others = [(other, each) for other, each in clients.live.mapping().items() if other[0] == key[0] and other != key]
    return min((served[other] for other, each in others if each.queue), default=max(served[other] for other, _ in others))


def _changed(clients: Clients | None, changes: Iterable[_Change]) -> Clients | None:
    """The clients after these changes, in order. Who has no request any more is remembered by what it is ahead."""
    if clients is None or clients.alone is not None:
        return clients
    changed: dict[ClientKey, Client] = {}
    for change in changes:
        client = changed.get(change.key) or clients.live[change.key]
        queue = _queue(client.queue, change)
        changed[change.key] = Client(charged=client.charged + change.cost, rows=client.rows + change.rows, queue=queue)
    ended = {key: client.charged for key, client in changed.items() if not client.rows and not client.queue}
    live = clients.live.with_items([(key, client) for key, client in changed.items() if key not in ended])
    if not ended:
        return replace(clients, live=live)
    classes = _less(clients.classes, [priority for priority, _ in ended])
    idle = {key: service for key, service in {**clients.idle, **ended}.items() if key[0] in classes}
    return replace(clients, live=live.without(ended), idle=_furthest(idle), classes=classes)


def _queue(queue: tuple[int, ...], change: _Change) -> tuple[int, ...]:
    if change.leaves >= 0:
        return tuple(id_ for id_ in queue if id_ != change.leaves) if queue[0] != change.leaves else queue[1:]
    if change.joins >= 0:
        return (*queue, change.joins) if not queue or queue[-1] < change.joins else tuple(sorted((*queue, change.joins)))
    return queue


def _less(classes: Mapping[int, ClientClass], ended: Iterable[int]) -> dict[int, ClientClass]:
    """The classes without one live client for each of the priorities `ended`, and without those where none lives."""
    rest = dict(classes)
    for priority in ended:
        rest[priority] = replace(rest[priority], live=rest[priority].live - 1)
    return {priority: group for priority, group in rest.items() if group.live}


def _furthest(idle: dict[ClientKey, int]) -> dict[ClientKey, int]:
    """At most IDLE_CLIENTS_MAX of them, those with the most service; of equals those that are remembered longest."""
    if len(idle) <= IDLE_CLIENTS_MAX:
        return idle
    kept = set(sorted(idle, key=lambda key: -idle[key])[:IDLE_CLIENTS_MAX])
    return {key: service for key, service in idle.items() if key in kept}
