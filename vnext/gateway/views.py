"""Views of the router: what it passes on, and what it answers itself: health, models, metrics, and the routes of its operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from aiohttp import web

from vnext.gateway.asked import Asked, read_asked
from vnext.gateway.backends import Backend, BackendRefused, NoBackend
from vnext.gateway.context import ROUTER, RouterContext
from vnext.gateway.continuing import SHOWN
from vnext.gateway.exchange import Exchange
from vnext.gateway.outgoing import EVENTS
from vnext.server.context.errors import ClientGone, ModelUnknown, RoutesClosed
from vnext.server.context.identity import VERSION_HEADER, client_of
from vnext.server.http.bodies import body_pieces, is_json
from vnext.server.http.middleware import FRONT, failure_at
from vnext.server.http.pages import anthropic_model, anthropic_page, ollama_model

PASSED = ("/v1/", "/v2/rerank", "/rerank", "/score", "/tokenize", "/detokenize", "/api/")
"""Beginnings of the paths that pass."""
OF_A_SERVER = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/pause", "/resume", "/is_paused", "/sleep", "/wake_up",
    "/is_sleeping", "/reset_prefix_cache", "/collective_rpc", "/log", "/events", "/server_info", "/load",
)  # fmt: skip
"""Beginnings of paths that are about one server's own state."""


async def forward(request: web.Request) -> web.StreamResponse:
    """Every path that has no view of its own. Raises the errors of its parts, NoBackend, ModelUnknown, RoutesClosed."""
    context, client = request.app[ROUTER], client_of(request)
    if request.path.startswith(OF_A_SERVER):
        raise RoutesClosed(f"{request.path} is about one server's own state: ask that server itself, not the router.")
    if not passes(request.path):
        raise web.HTTPNotFound
    with context.limiter.enter(1, client):
        body = bytearray()
        try:
            if request.can_read_body:
                async for piece in body_pieces(request, context.body_bytes, client, context.settings.http.body_bytes_max):
                    body += piece
            return await _exchanged(request, read_asked(request.path, bytes(body), is_json(request)))
        finally:
            context.body_bytes.give(len(body), client)


def passes(path: str) -> bool:
    """Whether requests with this path go to a server."""
    beyond = ".." in path.split("/")  # a server might take /v1/../sleep for /sleep
    return path.startswith(PASSED) and not path.startswith(OF_A_SERVER) and not beyond


async def _exchanged(request: web.Request, asked: Asked) -> web.StreamResponse:
    """The answer of a server, which is started first if it must be. Raises the errors of `forward`."""
    context, head = request.app[ROUTER], Head(request)
    interval_s = context.settings.http.sse_ping_interval_s if asked.is_stream and context.shelf is not None else 0.0
    try:
        async with head.commenting(interval_s), context.loaded(asked, request.path) as asked:
            return await head.ended(await Exchange(context, request, asked, await head.stop()).run())
    except Exception as error:  # the effect boundary of a stream that has begun, as `translate` is of others
        if head.response is None or isinstance(error, (ClientGone, ConnectionError)):
            raise
        failure = failure_at(request, request.app[FRONT], error)
        return await head.fail(failure.message, failure.code or failure.type)


async def get_health(request: web.Request) -> web.Response:
    """GET /health and its synonym /ping: 200 while requests are taken and a server is ready."""
    context = request.app[ROUTER]
    context.limiter.check_open()
    ready = sum(each.is_ready for each in context.fleet)
    if context.shelf is not None:
        return web.json_response({"status": "ok", "ready": ready, "models": context.shelf.states()})
    if not ready:
        raise NoBackend("No server behind this router is ready.")
    return web.json_response({"status": "ok", "ready": ready})


async def get_metrics(request: web.Request) -> web.Response:
    text = request.app[ROUTER].metrics.text()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models: those of all ready servers."""
    models = [*_models(request).values()]
    if VERSION_HEADER in request.headers:
        return web.json_response(anthropic_page(models, request.query))
    return web.json_response(body=msgspec.json.encode({"object": "list", "data": models}))


def _models(request: web.Request) -> dict[str, dict[str, Any]]:
    context = request.app[ROUTER]
    return context.shelf.shown() if context.shelf is not None else context.fleet.models()


async def list_ollama_models(request: web.Request) -> web.Response:
    """GET /api/tags, and /api/ps, which leaves out what is not loaded."""
    everywhere = request.path != "/api/ps"
    models = [each for each in _models(request).values() if everywhere or each.get("state", "loaded") == "loaded"]
    return web.json_response({"models": [ollama_model(each) for each in models]})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}. Raises ModelUnknown."""
    name = request.match_info["model"]
    if (model := _models(request).get(name)) is None:
        raise ModelUnknown(f"There is no model {name[:200]!r} here: GET /v1/models lists the models.")
    return web.json_response(body=msgspec.json.encode(anthropic_model(model) if VERSION_HEADER in request.headers else model))


# ---- the operator's routes ---------------------------------------------------------------------------------------


async def list_backends(request: web.Request) -> web.Response:
    return web.json_response([_shown(each) for each in request.app[ROUTER].fleet])


async def add_backend(request: web.Request) -> web.Response:
    """POST /router/backends?backend=URL: one more server, which gets requests as soon as it answers. Raises BackendRefused."""
    context = request.app[ROUTER]
    backend = context.fleet.add(_url(request))
    await context.health.look(backend)
    context.health.watch(backend)
    return web.json_response(_shown(backend))


async def remove_backend(request: web.Request) -> web.Response:
    """DELETE /router/backends?backend=URL: a server less. Its streams go on to their ends. Raises BackendRefused."""
    context, backend = request.app[ROUTER], _named(request)
    backend.is_draining = True
    context.fleet.remove(backend)
    context.health.forget(backend)
    return web.json_response(_shown(backend))


async def drain_backend(request: web.Request) -> web.Response:
    """POST /router/drain?backend=URL: no new requests for a server; answers when those that it has are done, or after `timeout`
    seconds. Raises BackendRefused."""
    backend, given = _named(request), request.query.get("timeout", "")
    if given and not given.replace(".", "", 1).isdecimal():
        raise BackendRefused("timeout must be a number of seconds")
    backend.is_draining = True
    try:
        async with asyncio.timeout(float(given) if given else request.app[ROUTER].settings.http.drain_s):
            await backend.idle.wait()
    except TimeoutError:
        pass
    return web.json_response(_shown(backend) | {"drained": backend.live == 0})


async def resume_backend(request: web.Request) -> web.Response:
    """POST /router/resume?backend=URL: a server that was drained gets requests again. Raises BackendRefused."""
    backend = _named(request)
    backend.is_draining = False
    request.app[ROUTER].fleet.news()
    return web.json_response(_shown(backend))


def _url(request: web.Request) -> str:
    if not (url := request.query.get("backend", "")):
        raise BackendRefused("backend is missing: write ?backend=URL")
    return url


def _named(request: web.Request) -> Backend:
    context: RouterContext = request.app[ROUTER]
    return context.fleet.named(_url(request))


def _shown(backend: Backend) -> dict[str, Any]:
    identity = backend.identity
    return {
        "backend": backend.url,
        "ready": backend.is_ready,
        "trouble": backend.trouble or None,
        "draining": backend.is_draining,
        "models": [*identity.models],
        "vnext": identity.version or None,
        "fingerprint": identity.fingerprint or None,
        "view": backend.view,
        "running": backend.running,
        "waiting": backend.waiting,
        "waiting_tokens": backend.waiting_tokens,
    }


# ---- loading -------------------------------------------------------------------------------------------------------
# Loading: what a streaming client is sent while its model loads: the stream's head and comments, so that it does not time out.
# From then on the status is 200: what goes wrong is the stream's last event, in the form of its API.

COMMENT = b": loading\n\n"


class _Error(msgspec.Struct):
    message: str
    type: str = "server_error"
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class Head:
    """The beginning of a client's stream. `response` is None while it has not begun. Mutable."""

    def __init__(self, request: web.Request) -> None:
        self.response: web.StreamResponse | None = None
        self._request, self._is_over = request, asyncio.Event()

    @asynccontextmanager
    async def commenting(self, interval_s: float) -> AsyncIterator[None]:
        """Send a comment every `interval_s` seconds (0: never) until `stop` or the end of the block. Raises ConnectionError."""
        self._commenting = asyncio.create_task(self._comment(interval_s))
        try:
            yield
        except asyncio.CancelledError:  # the client has gone
            self._commenting.cancel()
            raise
        finally:
            self._is_over.set()
            await asyncio.gather(self._commenting, return_exceptions=True)

    async def stop(self) -> web.StreamResponse | None:
        """No more comments; returns the response if it has begun. Raises ConnectionError where the client has gone."""
        self._is_over.set()
        await self._commenting
        return self.response

    async def ended(self, answer: web.StreamResponse) -> web.StreamResponse:
        """The client's response after an exchange: a server's refusal, which is no stream, ends the one that has begun."""
        if self.response is None or not isinstance(answer, web.Response):
            return answer
        try:
            error = msgspec.json.decode(answer.text or "", type=_Refusal).error
        except (ValueError, RecursionError):
            error = _Error(f"The server answers with status {answer.status}.")
        return await self.fail(error.message, error.code or error.type)

    async def fail(self, message: str, code: str) -> web.StreamResponse:
        """End the stream that has begun with its API's error event. Raises ConnectionError."""
        assert self.response is not None, "it has begun"
        await self.response.write(SHOWN[self._request.path]().error(message, code))
        await self.response.write_eof()
        return self.response

    async def _comment(self, interval_s: float) -> None:
        while interval_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), interval_s)
                return
            if self.response is None:
                response = web.StreamResponse(headers={"Content-Type": f"{EVENTS}; charset=utf-8", "Cache-Control": "no-cache"})
                await response.prepare(self._request)
                self.response = response
            await self.response.write(COMMENT)
