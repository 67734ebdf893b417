"""Servers with roles behind a router: which one computes a prompt, and what becomes of a request when that one cannot."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_here import RouterHere, Toy

from vnext.base.version import __version__
from vnext.gateway import context
from vnext.gateway.asked import CHAT
from vnext.server.context.identity import INPUTS_HEADER, TICKET_HEADER

LONG = {"model": "toy", "prompt": "What is the sea? " * 40}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400}}
SHOWING = {"model": "toy", "messages": [{"role": "user", "content": [PICTURE]}], "cache_salt": "s"}


class Roled(Toy):
    """A server that looks like vnext's. `handover`: how it answers when it is asked to compute a prompt for another one."""

    def __init__(self, role: str, handover: Any = None) -> None:
        super().__init__(answer=self.answer_by_path)
        self.role, self.handover = role, handover

    def views(self) -> dict[str, Any]:
        return super().views() | {"/server_info": self._server_info, "/events": self._no_events}

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


async def of_inputs(_: web.Request) -> web.Response:
    return web.json_response({"ticket": "I", "cached_tokens": 0})


async def never(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise web.HTTPInternalServerError


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


def test_images_are_encoded_by_one_server_for_the_others() -> None:
    encode, prefill, decode = Roled("encode", of_inputs), Roled("prefill", sealed), Roled("decode")
    with encode, prefill, decode, RouterHere(encode.url, prefill.url, decode.url) as router:
        assert router.call("POST", CHAT, SHOWING)[1]["port"] == decode.port
        assert encode.paths == prefill.paths == ["/handover"] and decode.paths == [CHAT]
        assert json.loads(encode.bodies[0]) == SHOWING and encode.seen[0].query == {"path": CHAT}
        assert json.loads(prefill.bodies[0]) == {"chat": SHOWING, "cache_salt": "s", "model": "toy"}
        headers = [(each.seen[0].headers.get(INPUTS_HEADER), each.seen[0].headers.get(TICKET_HEADER)) for each in (encode, prefill, decode)]
        assert headers == [(None, None), ("I", None), ("I", "T")]
        assert router.call("POST", CHAT, {"model": "toy", "messages": [{"role": "user", "content": "x" * 400}]})[0] == 200
        assert len(encode.paths) == 1 and prefill.paths[1:] == ["/tokenize", "/handover"], "a text goes as before"
        assert router.call("POST", CHAT, SHOWING, X_Vnext_Inputs="forged")[0] == 200
        assert decode.seen[-1].headers[INPUTS_HEADER] == "I", "a client's would have ranks connect where it says"
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 400}}
        for path, shows, body in (
            ("/v1/messages", True, {"messages": [{"role": "user", "content": [image]}]}), ("/v1/responses", False, {"input": "an image"}),
            ("/api/generate", True, {"prompt": "what?", "images": ["A" * 400]}), ("/v1/audio/translations", True, b"a form"),
            ("/v1/completions", False, {"prompt": '"image"'}),
        ):  # fmt: skip
            count = len(encode.seen)
            kind = "multipart/form-data" if isinstance(body, bytes) else "application/json"
            assert router.call("POST", path, body, Content_Type=kind)[0] == 200 and (len(encode.seen) > count) == shows
            assert not shows or encode.seen[-1].query == {"path": path}
            assert (decode.seen[-1].headers.get(INPUTS_HEADER) == "I") == shows
        encode.handover = broken
        assert router.call("POST", CHAT, SHOWING, X_Vnext_Inputs="forged")[0] == 200
        assert INPUTS_HEADER not in decode.seen[-1].headers


@pytest.mark.parametrize("handover", [broken, busy, no_ticket, never])
def test_a_server_that_encodes_nothing_costs_no_answer(handover: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ENCODE_S", 0.3)
    with Roled("encode", handover) as encode, Roled("decode") as decode, RouterHere(encode.url, decode.url) as router:
        assert router.call("POST", CHAT, SHOWING)[1]["port"] == decode.port
        assert encode.paths == ["/handover"] and INPUTS_HEADER not in decode.seen[0].headers


def test_a_server_that_encodes_answers_nobody() -> None:
    with Roled("encode", of_inputs) as encode, Roled("decode") as decode, RouterHere(encode.url, decode.url) as router:
        decode.health = 503
        router.wait_ready(1)
        assert router.call("POST", CHAT, SHOWING)[0] == 503 and CHAT not in encode.paths
