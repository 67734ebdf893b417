"""Every path through the router is guarded but those of a short list: by the keys, by the admin's key, by the page that asks."""

from __future__ import annotations

import json
import random
import re

import pytest
from aiohttp import web
from router_here import RouterHere, Toy, wait_until

from vnext.gateway.exchange import SEED_HEADER
from vnext.gateway.run import ADMIN, OPEN, make_app
from vnext.server.context.identity import ENGINES_HEADER, TICKET_HEADER
from vnext.server.routes import ROUTES
from vnext.server.views.welcome import PAGE_PATHS

BODY = {"model": "toy", "prompt": "a"}


def paths(router: RouterHere) -> list[tuple[str, str]]:
    """Each route of the router's table, and each of a server's, which it passes on or refuses; (method, path)."""
    own = {(route.method, route.resource.canonical) for route in make_app(router.context).router.routes() if route.method not in ("*", "HEAD")}
    found = own | {(route.method, route.path) for route in ROUTES}
    return sorted({(method, re.sub(r"\{[^}]*\}+(?:[^/]*\})?", "1", path)) for method, path in found})


def test_every_path_but_the_open_ones_needs_a_key_and_the_operator_s_their_own() -> None:
    with Toy() as toy, RouterHere(toy.url, http={"api_keys": ("sk-one",)}, admin_key="sk-admin") as router:
        found = paths(router)
        known = {"/health", "/ping", "/live", "/version", "/metrics", "/", "/docs", "/openapi.json"}
        assert OPEN - PAGE_PATHS == known, "a new one is guarded, unless it is added here too"
        assert len(found) > 60 and {path for _, path in found if path.startswith(ADMIN)} >= {"/router/backends", "/router/drain"}
        for method, path in found:
            asked = (method, path, BODY if method == "POST" else None)
            if path in OPEN:
                assert router.call(*asked)[0] in (200, 404, 405), asked
                continue
            for wrong in ({}, {"Authorization": "Bearer sk-two"}, {"Authorization": "sk-one"}, {"X_Api_Key": "sk-admin"}):
                status, answer, _ = router.call(*asked, **wrong)
                sentence = answer["error"] if path.startswith("/api/") else answer["error"]["message"]  # in Ollama's and OpenAI's shape
                assert status == 401 and "key" in sentence, (asked, wrong, answer)
            if path.startswith(ADMIN):
                assert router.call(*asked, Authorization="Bearer sk-one")[0] == 401, asked
        assert not [each.path for each in toy.seen], "no server heard of any of them"
    with Toy() as toy, RouterHere(toy.url) as router:
        for method, path in found:
            if path in OPEN:
                continue
            asked = (method, path, BODY if method == "POST" else None)
            assert router.call(*asked, Origin="http://evil.example")[0] == 403, asked
            if path.startswith(ADMIN):
                assert router.call(*asked)[0] == 403, asked
        assert not toy.seen


def test_what_a_client_says_between_machines_reaches_no_server() -> None:
    """The headers by which routers and servers speak with each other: a client's are dropped, whatever they hold."""
    rng = random.Random(5)
    words = ("", "{}", "1", "-1", '{"folder":"/x","addresses":["127.0.0.1:9"],"seal":"\\u00e9"}', "a" * 4000, "\\ud800", "é")
    with Toy() as toy, RouterHere(toy.url) as router:
        for _ in range(40):
            given = {name: rng.choice(words) for name in (TICKET_HEADER, ENGINES_HEADER, SEED_HEADER, "X-Request-Id", "Last-Event-ID")}
            given = {rng.choice((str, str.lower, str.upper))(name): value for name, value in given.items()}
            status, answer, _ = router.call("POST", rng.choice(("/v1/completions", "/v1/responses", "/rerank")), BODY, **given)
            assert status < 500, (given, answer)
        assert len(toy.seen) > 20 and all(TICKET_HEADER not in each.headers for each in toy.seen)


def test_a_server_that_says_anything_of_itself_is_looked_at_again() -> None:
    """Its words are not known to be right: a look that fails on them must not be the last one."""
    rng = random.Random(6)
    odd = [None, 1, [], {}, "x", [None], {"a": 1}, "é" * 300, 1e308, True]
    with Toy() as toy, RouterHere(toy.url) as router:
        [backend] = router.context.fleet
        for _ in range(25):
            info = {name: rng.choice(odd) for name in ("version", "role", "environment", "config", "engines", "model", "system_fingerprint")}
            info["system_fingerprint"] = rng.choice(("fp_1", info["system_fingerprint"]))
            models = rng.choice(({"data": rng.choice(odd)}, {"data": [{"id": rng.choice(odd), "created": rng.choice(odd)}]}, {"data": [{"id": "m"}]}))
            toy.said = {"/server_info": info, "/v1/models": models}
            router.in_loop(router.context.health.look(backend))
            for path, headers in (("/v1/models", {}), ("/v1/models", {"anthropic-version": "2023-06-01"}), ("/v1/models/m", {}), ("/metrics", {})):
                status, answer, _ = router.call("GET", path, **headers)
                assert status < 500, (path, json.dumps(toy.said), answer)
        toy.said = {}
        wait_until(lambda: backend.is_ready)
        assert router.call("POST", "/v1/completions", BODY)[0] == 200


class Guarded(Toy):
    """A server whose key is sk-theirs."""

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer sk-theirs":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return await super()._models(request)


@pytest.mark.parametrize("key", ["", "sk-other"])
def test_a_router_without_its_servers_key_names_the_option_that_gives_it(key: str) -> None:
    with Guarded() as server, RouterHere(server.url, ready=0, backend_api_key=key) as router:
        (backend,) = router.context.fleet
        wait_until(backend.asked.is_set)
        assert backend.trouble == "its /v1/models says 401: give the key that it wants with --backend-api-key"


def test_a_router_with_its_servers_key_is_served() -> None:
    with Guarded() as server, RouterHere(server.url, backend_api_key="sk-theirs") as router:
        assert router.call("POST", "/v1/completions", BODY)[0] == 200
