"""Servers with roles behind a router: which one computes a prompt, and what becomes of a request when that one cannot."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from router_here import RouterHere, Toy

from vnext.base.version import __version__
from vnext.server.context.identity import TICKET_HEADER

LONG = {"model": "toy", "prompt": "What is the sea? " * 40}


class Roled(Toy):
    """A server that looks like vnext's. `handover`: how it answers when it is asked to compute a prompt for another one."""

    def __init__(self, role: str, handover: Any = None) -> None:
        super().__init__(answer=self.answer_by_path)
        self.role, self.handover = role, handover

    async def begin(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/events", self._no_events)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._any)
        return web.AppRunner(app, handler_cancellation=True, access_log=None)

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__, "system_fingerprint": "fp", "environment": {}, "role": self.role})

    async def _no_events(self, _: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def answer_by_path(self, request: web.Request) -> web.Response:
        if request.path == "/tokenize":
            return web.json_response({"tokens": list(range(100))})
        if request.path == "/handover":
            return await self.handover(request)
        return await self.echo(request)

    @property
    def paths(self) -> list[str]:
        return [each.path for each in self.seen]


async def sealed(_: web.Request) -> web.Response:
    return web.json_response({"ticket": "T", "cached_tokens": 0})


async def broken(request: web.Request) -> web.Response:
    request.transport.abort()
    raise web.HTTPInternalServerError


async def busy(_: web.Request) -> web.Response:
    raise web.HTTPServiceUnavailable


async def no_ticket(_: web.Request) -> web.Response:
    return web.json_response({"sentence": "hello"})


def test_a_prompt_is_computed_by_one_server_and_answered_by_the_other() -> None:
    with Roled("prefill", sealed) as prefill, Roled("decode") as decode, RouterHere(prefill.url, decode.url) as router:
        status, answer, _ = router.call("POST", "/v1/completions", LONG)
        assert (status, answer["port"]) == (200, decode.port)
        assert prefill.paths == ["/tokenize", "/handover"] and decode.paths == ["/v1/completions"]
        assert decode.seen[0].headers[TICKET_HEADER] == "T" and TICKET_HEADER not in prefill.seen[0].headers
        assert router.call("POST", "/v1/completions", LONG | {"prompt": "short"})[1]["port"] == decode.port
        assert router.call("POST", "/v1/embeddings", LONG)[1]["port"] == decode.port
        assert len(prefill.paths) == 2 and [TICKET_HEADER in each.headers for each in decode.seen] == [True, False, False]


@pytest.mark.parametrize("handover", [broken, busy, no_ticket])
def test_a_server_that_computes_no_prompt_costs_no_answer(handover: Any) -> None:
    with Roled("prefill", handover) as prefill, Roled("decode") as decode, RouterHere(prefill.url, decode.url) as router:
        assert router.call("POST", "/v1/completions", LONG)[1]["port"] == decode.port
        assert prefill.paths == ["/tokenize", "/handover"] and TICKET_HEADER not in decode.seen[0].headers


def test_each_server_answers_alone() -> None:
    with Roled("prefill", sealed) as prefill, Roled("decode") as decode, RouterHere(prefill.url, decode.url) as router:
        prefill.health = 503
        router.wait_ready(1)
        assert router.call("POST", "/v1/completions", LONG)[1]["port"] == decode.port and prefill.seen == []
        prefill.health = 200
        router.wait_ready(2)
        decode.health = 503
        router.wait_ready(1)
        assert router.call("POST", "/v1/completions", LONG)[1]["port"] == prefill.port and prefill.paths == ["/v1/completions"]
