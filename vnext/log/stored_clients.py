"""The clients of a state (vnext/state/store/clients.py) in a snapshot. Their queues and rows are those of its requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vnext.state.config import SchedulerConfig
from vnext.state.store.clients import Client, ClientClass, ClientKey, Clients, no_clients
from vnext.state.store.versions import VersionedMap


class StoredClients(msgspec.Struct, frozen=True, array_like=True):
    """(priority, number, charged) of the clients that live, in rising order; (priority, number, service) of those that are
    remembered, longest first; (priority, least service of the next one that is lifted). `alone`: as in Clients."""

    live: tuple[tuple[int, int, int], ...]
    idle: tuple[tuple[int, int, int], ...]
    next_starts: tuple[tuple[int, int], ...]
    alone: tuple[int, int] | None = None


def stored_clients(clients: Clients) -> StoredClients:
    return StoredClients(
        live=tuple(sorted((*key, client.charged) for key, client in clients.live.items())),
        idle=tuple((*key, service) for key, service in clients.idle.items()),
        next_starts=tuple(sorted((priority, group.next_start) for priority, group in clients.classes.items())),
        alone=clients.alone,
    )


def renumbered(stored: StoredClients, number_of: Callable[[int], int]) -> StoredClients:
    """The clients under other numbers."""
    live, idle = (
        tuple((priority, number_of(number), tokens) for priority, number, tokens in some) for some in (stored.live, stored.idle)
    )
    alone = stored.alone and (stored.alone[0], number_of(stored.alone[1]))
    return StoredClients(tuple(sorted(live)), idle, stored.next_starts, alone)


def clients_of(
    stored: StoredClients | None, config: SchedulerConfig, keys: Mapping[Any, ClientKey], running: Sequence[int]
) -> Clients | None:
    """The clients of a state with these live requests, of which `running` are in the batch and the others wait. None where the
    policy takes no turns. A snapshot from before there were any has been charged nothing."""
    if (clients := no_clients(config.policy)) is None:
        return None
    stored = stored or StoredClients((), (), ())
    if stored.alone:
        return msgspec.structs.replace(clients, alone=stored.alone)
    rows, queues = Counter(keys[id_] for id_ in running), defaultdict[ClientKey, list[int]](list)
    for id_ in sorted(set(keys).difference(running)):
        queues[keys[id_]].append(id_)
    charged = dict.fromkeys(sorted(set(keys.values())), 0)
    charged |= {(priority, number): tokens for priority, number, tokens in stored.live}
    counts, starts = Counter(priority for priority, _ in charged), dict(stored.next_starts)
    return Clients(
        live=VersionedMap({key: Client(tokens, rows[key], tuple(queues[key])) for key, tokens in charged.items()}),
        idle={(priority, number): tokens for priority, number, tokens in stored.idle},
        classes={priority: ClientClass(live=count, next_start=starts.get(priority, 0)) for priority, count in counts.items()},
    )
