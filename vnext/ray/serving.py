"""vnext in Ray Serve: a deployment whose replicas are whole vnext servers, and the deployment in front that speaks HTTP.

Owns a replica's server: started with the replica, watched by Serve's health checks, ended with it. Requests and answers pass as
bytes, so that Serve has every route of `vnext serve`. routing.py chooses the replica.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, get_type_hints

import aiohttp
from msgspec.structs import replace
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address
from starlette.requests import Request
from starlette.responses import StreamingResponse

from vnext.options.reader import ServeCommand
from vnext.options.settings_check import checked, engine_settings
from vnext.ray.routing import REQUEST_ID
from vnext.ready_lines import url_of
from vnext.router.policies import DEFAULT_POLICY, require_policy
from vnext.router.proxy.headers import Pairs, to_client, to_server
from vnext.runtime.processes.rank_processes import cpus_of
from vnext.serve import start
from vnext.server.settings import ServerSettings

STARTING_POLL_S = 0.05
STATS_PERIOD_S = 1.0
"""How soon the router learns where a new replica's server is."""
_SERVER_HINTS = get_type_hints(ServerSettings)
Head = tuple[int, Pairs]


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
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Head | bytes]:
        """Pass a request on. Yields the answer's status and headers, and then its body as it comes. A caller that closes
        the iterator ends the request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        passed = to_server(headers, "", {}, self._key, True)
        async with self._session.request(method, self._url + path, headers=passed, data=body) as response:
            yield response.status, to_client(response.headers)
            async for piece in response.content.iter_any():
                yield piece

    def record_routing_stats(self) -> dict[str, Any]:
        """Of Ray Serve: what the router gets to know of a replica."""
        return {"url": self._url, "key": self._key}

    def check_health(self) -> None:
        """Of Ray Serve: raises ChildDied where no engine or API server follows one that has ended; another replica does then."""
        self._engines.check_alive()
        self._edges.look()

    def __del__(self) -> None:
        if hasattr(self, "_edges"):  # not where the start has failed
            self._edges.end()
            self._engines.stop()


class Ingress:
    """The deployment that HTTP requests reach. It reads a request's body, which the router needs."""

    def __init__(self, servers: DeploymentHandle) -> None:
        self._servers = servers.options(stream=True, method_name="ask")

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = {REQUEST_ID: uuid.uuid4().hex, **request.headers}
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        path += f"?{request.url.query}" if request.url.query else ""
        answer = self._servers.remote(request.method, path, headers, await request.body())
        status, answered = await anext(answer)
        response = StreamingResponse(answer, status)
        response.raw_headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in answered]
        return response


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

    `policy` is one of vnext/router/policies.py. `options` are those of `vnext serve`, by their long names with underscores. Each
    replica reserves a CPU for each thread of its ranks unless `ray_actor_options` says otherwise. Raises SettingsError,
    RoutingPolicyError.
    """
    require_policy(policy)
    servers = serve.deployment(LLMServer).options(
        num_replicas=replicas,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options={"num_cpus": cpus_of(command_of(model, options).engine)} | dict(ray_actor_options or {}),
        request_router_config=RequestRouterConfig(
            request_router_class="vnext.ray.routing:ViewRouter",
            request_router_kwargs={"policy": policy},
            request_routing_stats_period_s=STATS_PERIOD_S,
        ),
    )
    ingress = serve.deployment(Ingress).options(
        max_ongoing_requests=replicas * max_ongoing_requests, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(servers.bind(model, **options))
