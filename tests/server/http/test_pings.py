"""Signs of life: a stream that waits for its first token, or pauses, shows that it lives, and changes in nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from edge_server import EdgeServer
from toy_tokenizers import byte_level

from vnext.gateway.continuing import SHOWN
from vnext.server.http.streaming import NDJSON, SSE, Form, Pings

INTERVAL_S = 0.1
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "say:abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:abc"}]},
    "/v1/responses": {"input": "say:abc"},
    "/v1/messages": {"messages": [{"role": "user", "content": "say:abc"}], "max_tokens": 9},
}


@pytest.fixture
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level("{% for message in messages %}{{ message.content }}{% endfor %}"), sse_ping_interval_s=INTERVAL_S) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_for_its_first_token_shows_its_head_and_lives(server: EdgeServer, path: str) -> None:
    server.engine.running.clear()
    ping = b": keep-alive\n\n"
    with httpx.stream("POST", f"{server.url}{path}", json=BODIES[path] | {"model": "toy", "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        pieces = answer.iter_raw()
        waited = b"".join(next(pieces) for _ in range(3))
        assert waited == 3 * ping
        server.engine.running.set()
        rest = b"".join(pieces)
    undisturbed = httpx.post(f"{server.url}{path}", json=BODIES[path] | {"model": "toy", "stream": True}, timeout=60)
    assert rest.replace(ping, b"").count(b"\n\n") == undisturbed.content.count(b"\n\n")


def test_a_refusal_that_comes_soon_keeps_its_status_and_a_late_one_is_an_event(server: EdgeServer) -> None:
    body = {"prompt": "refuse me", "stream": True}
    assert server.post("/v1/completions", body)[0] == 400
    server.engine.running.clear()
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "say:a", "stream": True}, timeout=60) as answer:
        pieces = answer.iter_raw()
        assert next(pieces).startswith(b": keep-alive")
        server.engine.close()
        last = b"".join(pieces).rpartition(b"data: ")[2]
    assert "error" in json.loads(last)


def test_anthropics_package_reads_over_them(server: EdgeServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    server.engine.running.clear()
    with client.messages.stream(model="toy", **BODIES["/v1/messages"]) as stream:
        time.sleep(3 * INTERVAL_S)
        server.engine.running.set()
        assert stream.get_final_text() == "abc"


class Events:
    def __init__(self, is_quiet: bool = True, form: Form = SSE) -> None:
        self.is_quiet, self.form, self.looks, self.sent = is_quiet, form, 0, 0

    def send(self, ping: bytes) -> None:
        self.looks, self.sent = 0, self.sent + 1


def look(pings: Pings) -> None:
    """As if half of the interval had passed."""
    pings._timer.cancel()
    pings._look()


def test_silence_alone_is_broken() -> None:
    """What is written puts the next sign off, what waits to be read makes it needless, and 0 and the end leave none."""

    async def run() -> None:
        pings, none = Pings(600), Pings(0)
        busy, slow, off, over, lines = watched = Events(), Events(is_quiet=False), Events(), Events(), Events(form=NDJSON)
        for each in watched:
            (none if each is off else pings).add(each)
        pings.streams.discard(over)
        assert pings._timer is not None and none._timer is None
        for _ in range(5):
            busy.looks = 0
            look(pings)
        assert not busy.sent
        look(pings)
        assert busy.sent == 1 and not (slow.sent or off.sent or over.sent or lines.sent), "JSON lines know no comments"
        for each in watched:
            pings.streams.discard(each)
        look(pings)
        assert pings._timer is None, "without streams nothing is looked at"

    asyncio.run(run())


@pytest.mark.parametrize("path", SHOWN)
def test_a_router_passes_them_on_behind_a_change_of_servers(path: str) -> None:
    shown, ping = SHOWN[path](), b": keep-alive\n\n"
    assert [shown.take(ping) for _ in range(3)] == [ping] * 3
    shown.begin_again()
    assert shown.take(ping) == ping
