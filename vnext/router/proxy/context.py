"""Router context: the objects that every view of the router uses, built once for its process."""

from __future__ import annotations

from collections.abc import Collection

import aiohttp
from aiohttp import web

from vnext.router.approximate import BYTES_PER_TOKEN
from vnext.router.proxy.asked import Asked
from vnext.router.proxy.backend import Backend
from vnext.router.proxy.fleet import Fleet, NoBackend
from vnext.router.proxy.headers import Pairs
from vnext.router.proxy.health import Health
from vnext.router.proxy.homes import Homes
from vnext.router.proxy.metrics import RouterMetrics
from vnext.router.proxy.settings import RouterSettings
from vnext.router.proxy.tokens import FIELDS, NOTHING, TEXT_BYTES_MIN, Known, text_prompt, token_prompt
from vnext.server.context.admission import Quota, RequestLimiter
from vnext.server.context.api_keys import ApiKeys

CONNECT_TIMEOUT_S = 3.0
OF_ONE_SERVER = ("/v1/files", "/v1/batches")
"""Paths whose state is in one server's folder: the first one's."""


class RouterContext:
    """See the module. Make it in the event loop; `close` ends its connections and its looks at the servers."""

    def __init__(self, settings: RouterSettings, name: str = "0") -> None:
        """`name` tells this router's record of decisions from others'. Raises BackendRefused, KeysUnusable, DecisionsUnusable."""
        http = settings.http
        self.settings = settings
        self.keys = ApiKeys(http)
        self.fleet = Fleet(settings.backends, settings.routing_policy)
        if settings.decisions_dir:
            self.fleet.record_in(settings.decisions_dir, name)
        self.homes = Homes()
        self.metrics = RouterMetrics(self.fleet)
        self.limiter = RequestLimiter(http.live_requests_max, 1, http.client_answers_max, limits_of=self.keys.limits)
        self.body_bytes = Quota(8 * http.body_bytes_max, 4 * http.body_bytes_max, "{} bytes of bodies are held")
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        )
        self.health = Health(self.fleet, self.session, settings.backend_api_key)

    async def known(self, asked: Asked, path: str, headers: Pairs) -> Known:
        """A request's prompt: by its tokens, where these decide among exact views and a server says them, or else by its text."""
        exact = [each for each in self.fleet if each.is_exact and each.is_ready and each.knows_tokens(asked.model)]
        is_long = asked.tokens * BYTES_PER_TOKEN >= TEXT_BYTES_MIN
        if len(exact) > 1 and is_long and path in FIELDS and self.settings.routing_policy == "prefix":
            least = min(exact, key=lambda each: each.live)
            prompt = await token_prompt(self.session, least.url, path, asked, headers)
            if prompt is not None:
                return Known(prompt, True)
        return Known(text_prompt(asked), False) if exact else NOTHING

    def choose(self, asked: Asked, known: Known, path: str, tried: Collection[Backend]) -> Backend:
        """The server for a request, none of `tried`. Raises NoBackend, ModelUnknown."""
        if path.startswith(OF_ONE_SERVER):
            first = next(iter(self.fleet))
            if first in tried or not first.is_ready:
                raise NoBackend("The server that keeps files and batches is not ready: try again later.")
            return first
        home = self.homes.of(path, asked)
        if home is not None and home.is_ready and home not in tried:
            return home
        return self.fleet.choose(asked, known, lambda each: each not in tried)

    async def close(self) -> None:
        self.health.close()
        self.fleet.close()
        await self.session.close()


ROUTER = web.AppKey("router", RouterContext)
