"""Settings of `vnext router`: one frozen argument, which the command line makes. Imports nothing slow."""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.routing.policies import DEFAULT_POLICY, POLICIES
from vnext.server.settings import ServerSettings

PolicyName = Literal[tuple(POLICIES)]  # type: ignore[valid-type]  # derived from the table


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`backends`: the servers' URLs, in normal form and all different. `backend_api_key`: the key that the router sends them, ""
    for none; clients' own keys then pass where the router has none. `admin_key` opens the routes below /router, "" keeps them
    closed. `decisions_dir`: the folder in which each decision is recorded, "" for none. `http`: address, keys and bounds of the
    router itself, as those of a server."""

    backends: tuple[str, ...]
    routing_policy: PolicyName = DEFAULT_POLICY  # type: ignore[valid-type]
    backend_api_key: str = ""
    admin_key: str = ""
    decisions_dir: str = ""
    http: ServerSettings = ServerSettings()
