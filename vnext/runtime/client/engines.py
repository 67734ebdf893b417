"""A client of one engine or of several: what programs connect with.

Several need a router (replicas.py), which folds their events. One needs neither that nor numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from vnext.routing.policies import DEFAULT_POLICY
from vnext.runtime.client.client import EngineClient
from vnext.runtime.protocol.settings import NO_ROLES, Roles

if TYPE_CHECKING:
    from vnext.runtime.client.replicas import Replicas

AnyEngineClient: TypeAlias = "EngineClient | Replicas"


async def connect_engines(
    addresses: Sequence[str], timeout_s: float | None = 60.0, policy: str = DEFAULT_POLICY, number: int = 0,
    roles: Roles = NO_ROLES,
) -> AnyEngineClient:
    """A client of one engine, or of several among which `policy` chooses, in the process of this number among those that use them.
    Raises what EngineClient.connect does."""
    if len(addresses) == 1:
        return await EngineClient.connect(addresses[0], timeout_s)
    from vnext.runtime.client.replicas import Replicas

    return await Replicas.connect(addresses, timeout_s, policy, number, roles)
