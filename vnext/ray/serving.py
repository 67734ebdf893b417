"""vnext in Ray Serve: a deployment whose replicas are whole vnext servers.

Owns a replica's server: started with the replica, watched by Serve's health checks, ended with it. Requests and answers pass as
bytes, so that Serve has every route of `vnext serve`. ingress.py speaks HTTP, routing.py chooses the replica.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, get_type_hints

import aiohttp
import msgspec
from msgspec.structs import replace
from ray import serve
from ray.util import get_node_ip_address

from vnext.commands.ready_lines import url_of
from vnext.commands.serve import start
from vnext.gateway.asked import to_client, to_server
from vnext.gateway.backends import fingerprint_of
from vnext.options.reader import ServeCommand
from vnext.options.settings_check import checked, engine_settings
from vnext.ray.ingress import Head, Ingress
from vnext.routing.policies import DEFAULT_POLICY, require_policy
from vnext.runtime.processes.rank_processes import cpus_of
from vnext.server.settings import ServerSettings

STARTING_POLL_S = 0.05
STATS_PERIOD_S = 1.0
"""How soon the router learns where a new replica's server is."""
HEALTH_PERIOD_S = 1.0
"""How soon Serve learns that a replica is lost; by itself it looks every ten seconds."""
_SERVER_HINTS = get_type_hints(ServerSettings)


def command_of(model: str, options: Mapping[str, Any]) -> ServeCommand:
    """The command of a replica. `options` are keywords of EngineSettings and ServerSettings. Raises SettingsError."""
    server = {name: checked(name, value, _SERVER_HINTS[name]) for name, value in options.items() if name in _SERVER_HINTS}
    engine = engine_settings(model=model, **{name: value for name, value in options.items() if name not in _SERVER_HINTS})
    return ServeCommand(engine=engine, server=ServerSettings(**server))


class LLMServer:
    """One replica: an engine and its API server on this node. `options` as in `command_of`; the server's address, key and events
    are the replica's own. Raises SettingsError, StartFailed, ChildDied."""

    def __init__(self, model: str = "", **options: Any) -> None:
        command = command_of(model, options)
        self._key = secrets.token_urlsafe()
        own = {"host": get_node_ip_address(), "port": 0, "api_keys": (self._key,), "api_key_file": "", "show_events": True}
        self._engines, self._edges = start(replace(command, server=replace(command.server, **own)))
        while not self._edges.is_healthy():
            self._edges.check_alive()
            self._engines.check_alive()
            time.sleep(STARTING_POLL_S)
        self._url = url_of(self._edges.settings)
        self._opened: aiohttp.ClientSession | None = None
        self._fingerprint: str | None = None

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, fingerprint: str = ""
    ) -> AsyncIterator[Head | bytes]:
        """Pass a request on. Yields the answer's head, and then its body as it comes. A caller that closes the iterator ends the
        request. `fingerprint` is for the router: that of the replicas which may answer, "" for all."""
        if self._fingerprint is None:
            await self._look()
        passed = to_server(headers, "", {}, self._key, True)
        async with self._session.request(method, self._url + path, headers=passed, data=body) as response:
            yield Head(response.status, to_client(response.headers), response.content_length, self._fingerprint or "")
            async for piece in response.content.iter_any():
                yield piece

    async def record_routing_stats(self) -> dict[str, Any]:
        """Of Ray Serve: what the router gets to know of a replica. The fingerprint changes with the weights."""
        await self._look()
        return {"url": self._url, "key": self._key, "fingerprint": self._fingerprint}

    async def _look(self) -> None:
        async with self._session.get(f"{self._url}/server_info", headers={"Authorization": f"Bearer {self._key}"}) as response:
            response.raise_for_status()
            self._fingerprint = fingerprint_of(msgspec.json.decode(await response.read()))

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Made in the event loop, which runs only after `__init__`."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        return self._opened

    def check_health(self) -> None:
        """Of Ray Serve: raises ChildDied where no engine or API server follows one that has ended; another replica does then."""
        self._engines.check_alive()
        self._edges.look()

    def __del__(self) -> None:
        if hasattr(self, "_edges"):  # not where the start has failed
            self._edges.end()
            self._engines.stop()


def app(
    model: str = "",
    *,
    replicas: int = 1,
    policy: str = DEFAULT_POLICY,
    ray_actor_options: Mapping[str, Any] | None = None,
    max_ongoing_requests: int = 256,
    **options: Any,
) -> serve.Application:
    """The application for `serve.run`: `replicas` servers of one model behind one ingress.

    `policy` is one of vnext/routing/policies.py. `options` are those of `vnext serve`, by their long names with underscores. Each
    replica reserves a CPU for each thread of its ranks unless `ray_actor_options` says otherwise. Raises SettingsError,
    RoutingPolicyError.
    """
    require_policy(policy)
    servers = serve.deployment()(LLMServer).options(
        num_replicas=replicas,
        max_ongoing_requests=max_ongoing_requests,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": cpus_of(command_of(model, options).engine)} | dict(ray_actor_options or {}),
        request_router_config={
            "request_router_class": "vnext.ray.routing:ViewRouter",
            "request_router_kwargs": {"policy": policy},
            "request_routing_stats_period_s": STATS_PERIOD_S,
        },
    )
    ingress = serve.deployment()(Ingress).options(
        max_ongoing_requests=replicas * max_ongoing_requests, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(servers.bind(model, **options))
