"""The event stream over HTTP: byte for byte what the engine core sends, to those who may have it, while somebody follows."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from edge_server import EdgeServer
from fake_engine import CONFIG, wait_until

from vnext.log.stream import EventStreams
from vnext.routing.view import View
from vnext.runtime.protocol.messages import EngineDied, Events, Subscribe
from vnext.server.views import log_view
from vnext.state.digest import digest
from vnext.state.events import EngineStarted, PrefixCacheReset
from vnext.state.reduce import reduce, start

STARTED = EngineStarted(config=CONFIG, model="toy", model_digest="", world_size=1, environment={}, started_ns=0)


@contextmanager
def following(server: EdgeServer, query: str = "", **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/events{query}", headers=headers)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def asked(server: EdgeServer) -> list[bool]:
    return [message.is_on for message in server.engine.of_kind(Subscribe)]


def test_a_router_has_the_engines_state_over_http_and_again_after_a_gap() -> None:
    streams, state, view = EventStreams(STARTED, "0"), start(STARTED), View()
    with EdgeServer(show_events=True) as server, following(server) as answer:
        assert answer.status == 200 and answer.getheader("Content-Type") == "application/octet-stream"
        server.engine.wait_for(lambda: asked(server) == [True])
        server.engine.say(Events(data=streams.begin("edge", state)))
        while not view.is_exact:
            view.feed(answer.read1())
        for _ in range(3):
            state = reduce(state, PrefixCacheReset())
            [(_, frame)] = streams.frames([PrefixCacheReset()], state, digest(state))
            server.engine.say(Events(data=frame))
            while view.state is None or view.state.sequence < state.sequence:
                view.feed(answer.read1())
        server.engine.say(Events(data=b""))
        server.engine.wait_for(lambda: asked(server) == [True, True])
        server.engine.say(Events(data=streams.begin("edge", state)))
        while view.snapshots < 2:
            view.feed(answer.read1())
        assert view.mismatches == 0 and view.state is not None and digest(view.state) == digest(state)
        with following(server) as second:  # begins with a snapshot of its own, which all get
            server.engine.wait_for(lambda: asked(server) == [True] * 3)
            server.engine.say(Events(data=b"x" * 100_000))
            assert second.read(100) == answer.read(100) == b"x" * 100
        answer.close()
    assert len(server.context.client.followers._takes) == 0


def test_nobody_follows_when_all_have_left() -> None:
    with EdgeServer(show_events=True) as server:
        with following(server):
            server.engine.wait_for(lambda: asked(server) == [True])
        server.engine.wait_for(lambda: asked(server) == [True, False])
        assert not server.app[log_view.FOLLOWERS]


def test_only_those_who_may_have_the_texts() -> None:
    with EdgeServer(log_dir="somewhere") as server:
        status, answer, _ = server.get("/events")
        assert status == 403 and answer["error"]["message"].startswith("This server does not stream its events: start it with --show-events")
    with EdgeServer(show_events=True) as server:
        status, answer, _ = server.get("/events", Host="evil.example")
        assert status == 403 and "--api-key" in answer["error"]["message"]
    with EdgeServer(show_events=True, api_keys=("secret",)) as server:
        assert server.get("/events")[0] == 401
        with following(server, Host="elsewhere.example", Authorization="Bearer secret") as answer:
            assert answer.status == 200
    assert asked(server) in ([True], [True, False])


def test_a_server_that_stops_waits_for_no_stream() -> None:
    with EdgeServer(show_events=True) as server, following(server) as answer:
        server.engine.wait_for(lambda: asked(server) == [True])
        server.in_loop(server.runner.shutdown())
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        wait_until(lambda: not server.app[log_view.FOLLOWERS])


def test_a_stream_ends_with_its_engine() -> None:
    with EdgeServer(show_events=True) as server, following(server) as answer:
        server.engine.wait_for(lambda: asked(server) == [True])
        server.engine.say(EngineDied(message="It ended."))
        assert answer.read() == b""
        assert server.get("/events")[0] == 503


def test_each_of_several_engines_has_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with EdgeServer(show_events=True) as server:
        monkeypatch.setattr(type(server.context.client), "engines", property(lambda client: (client, client)))
        for path, given in (("/events", "''"), ("/events?engine=2", "'2'"), ("/events?engine=x", "'x'")):
            status, answer, _ = server.get(path)
            assert status == 400 and answer["error"]["message"] == f"engine is {given}: this server has 2, so name one from 0 to 1."
        with following(server, "?engine=1") as answer:
            assert answer.status == 200 and answer.getheader("X-Vnext-Engines") == "2"
            server.engine.wait_for(lambda: asked(server) == [True])


def test_routers_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_view, "FOLLOWERS_MAX", 1)
    with EdgeServer(show_events=True) as server, following(server):
        server.engine.wait_for(lambda: asked(server) == [True])
        assert server.get("/events")[0] == 429
