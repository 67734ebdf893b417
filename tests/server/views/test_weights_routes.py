"""The routes for trainers on a server that does not open them."""

from __future__ import annotations

import pytest
from edge_server import EdgeServer

GETS = "/is_paused", "/is_sleeping"
POSTS = (
    "/update_weights", "/start_weight_update", "/finish_weight_update", "/pause", "/resume", "/sleep", "/wake_up",
    "/reset_prefix_cache", "/collective_rpc",
)  # fmt: skip


def test_every_route_is_refused_by_name() -> None:
    with EdgeServer() as server:
        for path in (*GETS, *POSTS):
            status, answer, _ = server.get(path) if path in GETS else server.post(path, {"method": "process_id", "path": "/x"})
            assert (status, answer["error"]["code"]) == (403, "routes_closed")
            assert answer["error"]["message"] == f"This server does not open {path} to its clients: start it with --enable-rl-routes."


def test_an_open_server_says_that_it_is_awake() -> None:
    with EdgeServer(enable_rl_routes=True) as server:
        assert server.get("/is_sleeping")[1]["is_sleeping"] is False
        assert server.get("/is_paused")[1]["is_paused"] is False


@pytest.mark.parametrize("path", POSTS)
def test_they_want_the_key(path: str) -> None:
    with EdgeServer(enable_rl_routes=True, api_keys=("secret",)) as server:
        assert server.post(path, {})[0] == 401


@pytest.mark.parametrize("path", POSTS)
def test_browsers_of_other_pages_may_not_use_them(path: str) -> None:
    with EdgeServer(enable_rl_routes=True) as server:
        assert server.post(path, {}, Origin="https://evil.example")[0] == 403
