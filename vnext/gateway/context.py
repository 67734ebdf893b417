"""Router context: the objects that every view of the router uses, built once for its process.

Owns which server has stored a response of the Responses API, under an id that nobody can guess. The router remembers the ids that
it saw; of others, as after a restart, it asks one server after the other. A stream that went on elsewhere is stored there under
another id, which takes the place of the client's in requests.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vnext.gateway.asked import (
    FIELDS,
    NOTHING,
    TEXT_BYTES_MIN,
    Asked,
    Known,
    Pairs,
    inputs_ticket_from,
    text_prompt,
    ticket_from,
    token_prompt,
)
from vnext.gateway.backends import Backend, Fleet, NoBackend
from vnext.gateway.continuing import Shown, ShownResponse
from vnext.gateway.health import Health
from vnext.gateway.settings import RouterSettings
from vnext.gateway.shelf import Shelf
from vnext.routing.approximate import BYTES_PER_TOKEN
from vnext.server.context.admission import Quota, RequestLimiter
from vnext.server.context.api_keys import ApiKeys
from vnext.server.context.errors import BatchesOff, ModelUnknown
from vnext.server.context.tallies import Histogram, LabelledCounter
from vnext.server.tls import verifying_context

CONNECT_TIMEOUT_S = 3.0
ENCODE_S = 30.0
"""For a server that encodes what a prompt shows."""
APART = frozenset({"prefill", "encode"})
"""Roles of servers that compute something for those that answer."""
OF_ONE_SERVER = ("/v1/files", "/v1/batches")
"""Paths whose state is in one server's folder: the first one's."""
KNOWN_MAX = 2**16
BEGINNING_BYTES = 512
"""Of an answer, in which its id stands."""
PREFIX = "/v1/responses/"
_ID = re.compile(rb'"id":\s?"(resp_\w+)"')


class Home(NamedTuple):
    """Where a response is stored, and under which id."""

    backend: Backend
    id: str


class Homes:
    """See the module."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def of(self, path: str, asked: Asked) -> Backend | None:
        """The server that has the response which a request is about, None if that is not known."""
        home = self._homes.get(_id_in(path, asked))
        return home.backend if home else None

    def learn(self, backend: Backend, answer: bytes) -> None:
        """Take in an answer, or its beginning."""
        if found := _ID.search(answer[:BEGINNING_BYTES]):
            id_ = found[1].decode()
            self._put(id_, Home(backend, id_))

    def rename(self, backend: Backend, shown: Shown) -> None:
        """A stream has ended at a server that went on with it: the client knows its response by the first one's id."""
        for id_, known in shown.names.items() if isinstance(shown, ShownResponse) else ():
            if known.startswith("resp_"):
                self._put(known, Home(backend, id_))

    def renamed(self, backend: Backend, path: str, body: bytes, previous: str) -> tuple[str, bytes]:
        """Path and body of a request with the id that the server itself gave."""
        known = previous or path.removeprefix(PREFIX).split("/")[0].split("?")[0]
        home = self._homes.get(known)
        if home is None or home.id == known or home.backend is not backend:
            return path, body
        return path.replace(known, home.id), body.replace(known.encode(), home.id.encode())

    @staticmethod
    def is_elsewhere(path: str, asked: Asked, status: int) -> bool:
        """Whether an answer may mean that another server has the response."""
        return status == 404 if path.startswith(PREFIX) else status == 400 and bool(asked.previous)

    def _put(self, id_: str, home: Home) -> None:
        self._homes[id_] = home
        self._homes.move_to_end(id_)
        if len(self._homes) > KNOWN_MAX:
            self._homes.popitem(last=False)


def _id_in(path: str, asked: Asked) -> str:
    return asked.previous or (path.removeprefix(PREFIX).split("/")[0] if path.startswith(PREFIX) else "")


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
        tls = verifying_context()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        )
        self.shelf: Shelf | None = None
        self.health = Health(self.fleet, self.session, settings.backend_api_key, tls)

    async def known(self, asked: Asked, path: str, headers: Pairs) -> Known:
        """A request's prompt: by its tokens, where these decide among exact views and a server says them, or else by its text."""
        exact = [each for each in self.fleet if each.is_exact and each.is_ready and each.knows_tokens(asked.model)]
        if len(exact) > 1 and _is_long(asked) and path in FIELDS and self.settings.routing_policy == "prefix":
            least = min(exact, key=lambda each: each.live)
            prompt = await token_prompt(self.session, least.url, path, asked, headers)
            if prompt is not None:
                return Known(prompt, True)
        return Known(text_prompt(asked), False) if exact else NOTHING

    def choose(self, asked: Asked, known: Known, path: str, tried: Collection[Backend], begun_by: str = "") -> Backend:
        """The server for a request, none of `tried`. `begun_by`: the fingerprint of the system that began its stream. Raises
        NoBackend, ModelUnknown, BatchesOff."""
        if path.startswith(OF_ONE_SERVER):
            if self.shelf is not None:
                raise BatchesOff("A server of several models keeps no files: start one with one model and --batch-dir FOLDER.")
            first = next(iter(self.fleet))
            if first in tried or not first.is_ready:
                raise NoBackend("The server that keeps files and batches is not ready: try again later.")
            return first
        home = self.homes.of(path, asked)
        if home is not None and home.is_ready and home not in tried:
            return home
        fit = {each for each in self.fleet if each not in tried and self._answers(each, tried)}
        of_kind = {each for each in fit if each.is_ready and each.identity.fingerprint == begun_by} if begun_by else fit
        return self.fleet.choose(asked, known, lambda each: each in (of_kind or fit))

    def _answers(self, backend: Backend, tried: Collection[Backend]) -> bool:
        """Whether a server answers requests: one that computes prompts for others does while there is none of these, one that
        encodes never."""
        if backend.identity.role not in APART:
            return True
        others = (each for each in self.fleet if each.is_ready and each.identity.role not in APART and each not in tried)
        return backend.identity.role == "prefill" and next(others, None) is None

    async def inputs_ticket(self, asked: Asked, known: Known, path: str, headers: Pairs) -> str:
        """The ticket of the images and sounds that a server has encoded for the others; "" where none has."""
        try:
            first = self.fleet.choose(asked, known, lambda each: each.identity.role == "encode") if asked.shows else None
        except (NoBackend, ModelUnknown):
            first = None
        if first is None:
            return ""
        with first.serving(asked, known, "handover-"):
            return await inputs_ticket_from(self.session, first.url, asked, path, headers, ENCODE_S)

    async def ticket(self, asked: Asked, known: Known, path: str, headers: Pairs) -> str:
        """The ticket of a prompt that a server has computed for the one that answers; "" where no two servers share the work, the
        prompt is short, or its tokens are not known."""
        kinds = {each.identity.role for each in self.fleet if each.is_ready and each.knows_tokens(asked.model)}
        if path not in FIELDS or not _is_long(asked) or not {"prefill", "decode"} <= kinds:
            return ""
        try:
            first = self.fleet.choose(asked, known, lambda each: each.identity.role == "prefill" and each.knows_tokens(asked.model))
        except (NoBackend, ModelUnknown):
            return ""
        prompt = None
        if not asked.shows:
            prompt = known.prompt if known.by_tokens else await token_prompt(self.session, first.url, path, asked, headers)
            if prompt is None:
                return ""
            known = Known(prompt, True)
        with first.serving(asked, known, "handover-"):
            return await ticket_from(self.session, first.url, asked, prompt, headers)

    @asynccontextmanager
    async def loaded(self, asked: Asked, path: str) -> AsyncIterator[Asked]:
        """The request with the name of its model, which is loaded until the block ends where there is a shelf. Raises ModelUnknown,
        LoadFailed, ModelGone."""
        home = self.homes.of(path, asked)
        if self.shelf is None or not (asked.body or home):
            yield asked
            return
        async with self.shelf.using(self.shelf.name_at(home) if home else asked.model) as name:
            yield asked if home else msgspec.structs.replace(asked, model=name)

    async def close(self) -> None:
        if self.shelf is not None:
            await self.shelf.close()
        self.health.close()
        self.fleet.close()
        await self.session.close()


def _is_long(asked: Asked) -> bool:
    """Whether its prompt has a prefix worth knowing."""
    return asked.tokens * BYTES_PER_TOKEN >= TEXT_BYTES_MIN


ROUTER = web.AppKey("router", RouterContext)


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Backends(Collector):
    """The servers at this moment."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("vnext_router_backend_up", "1 while the server gets requests.", labels=("backend", "view"))
        running = GaugeMetricFamily("vnext_router_running", "Requests whose answer has begun.", labels=("backend",))
        waiting = GaugeMetricFamily("vnext_router_waiting", "Requests whose answer has not begun.", labels=("backend",))
        tokens = GaugeMetricFamily("vnext_router_waiting_tokens", "Prompt tokens of those, about.", labels=("backend",))
        for each in self._backends:
            up.add_metric((each.url, each.view), float(each.is_ready))
            running.add_metric((each.url,), each.running)
            waiting.add_metric((each.url,), each.waiting)
            tokens.add_metric((each.url,), each.waiting_tokens)
        yield from (up, running, waiting, tokens)


class _Models(Collector):
    """Those of a server with several."""

    def __init__(self, states: Callable[[], Mapping[str, str]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("vnext_router_model_loaded", "1 while the model is loaded.", labels=("model",))
        for name, state in self._states().items():
            loaded.add_metric((name,), float(state == "loaded"))
        yield loaded


class RouterMetrics:
    """Counters of one router."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.http = LabelledCounter("vnext_router_http_requests", "HTTP requests answered, by their status.", ("status",))
        self.failed = LabelledCounter(
            "vnext_router_backend_failures", "Requests and streams that a server did not answer to the end.", ("backend", "reason")
        )
        self.continued = LabelledCounter("vnext_router_streams_continued", "Times that a stream went on at another server.", ())
        self.lost = LabelledCounter("vnext_router_streams_lost", "Streams that ended with an error, because none could.", ())
        self.closed = LabelledCounter("vnext_router_connections_closed", "Connections closed by the router.", ("reason",))
        self.first_byte = Histogram(
            "vnext_router_first_byte_seconds", "From a request's arrival to the first byte of its answer.", _SECONDS
        )
        for each in (_Backends(backends), self.http, self.failed, self.continued, self.lost, self.closed, self.first_byte):
            self._registry.register(each)

    def follow(self, states: Callable[[], Mapping[str, str]]) -> None:
        """Show the models of a server with several, by the state of each."""
        self._registry.register(_Models(states))

    def text(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self._registry)
