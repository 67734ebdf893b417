"""What the server says and does while its engine is silent or stalled, and when it goes on."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.runtime.protocol.messages import EngineStats

BODY = {"prompt": "say:ok", "max_tokens": 10}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EdgeServer]:
    for name, seconds in {"silence.INTERVAL_S": 0.02, "silence.SILENT_S": 0.2}.items():
        monkeypatch.setattr(f"vnext.runtime.client.{name}", seconds)
    with EdgeServer() as running:
        yield running


def stalled(server: EdgeServer) -> float:
    return float(re.search(r"^vnext_engine_stalled{.*} (\S+)$", server.get("/metrics")[1], re.MULTILINE)[1])


def is_well(server: EdgeServer) -> bool:
    return server.get("/health")[0] == 200


def test_a_silent_engine_makes_the_server_say_so_until_it_answers(server: EdgeServer) -> None:
    """A request that was taken before is answered in full afterwards; new ones are not taken."""
    assert is_well(server) and stalled(server) == 0
    server.engine.running.clear()
    answers: list[tuple] = []
    asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", BODY)))
    asking.start()
    wait_until(lambda: server.context.client.live_count == 1)
    server.engine.frozen.set()
    wait_until(lambda: not is_well(server))
    for status, answer, _ in (server.get("/health"), server.post("/v1/completions", BODY)):
        error = answer["error"]
        assert status == 503 and error["code"] == "engine_stalled" and "has not answered for" in error["message"]
    assert stalled(server) == 1 and server.context.client.live_count == 1
    server.engine.frozen.clear()
    server.engine.running.set()
    wait_until(lambda: is_well(server))
    asking.join()
    assert answers[0][0] == 200 and answers[0][1]["choices"][0]["text"] == "ok"
    assert stalled(server) == 0 and server.post("/v1/completions", BODY)[0] == 200


def test_a_step_that_is_late_is_told_as_the_engine_core_tells_it(server: EdgeServer) -> None:
    numbers = {name: 0 for name in EngineStats.__struct_fields__ if name not in ("stalled", "adapters", "tier", "pins", "states", "experts", "recovering", "residence", "lost")}
    sentence = "The engine is stalled: step 7 has had no result for 12 s: rank 1 (process 9) is stopped by a signal."
    server.engine.say(EngineStats(**numbers | {"step_silent_seconds": 12.0}, stalled=sentence))
    wait_until(lambda: not is_well(server))
    assert server.get("/health")[1]["error"]["message"] == sentence and stalled(server) == 1
    assert re.search(r"^vnext_step_silent_seconds{.*} 12.0$", server.get("/metrics")[1], re.MULTILINE)
    server.engine.say(EngineStats(**numbers | {"log_frames_lost": 3}))
    wait_until(lambda: is_well(server))
    words = "The log lacks 3 frames, which could not be written: make room in its folder, or mend its disk."
    assert server.get("/health")[1] == {"status": "ok", "log": words}
    server.engine.say(EngineStats(**numbers))
    wait_until(lambda: server.get("/health")[1] == {"status": "ok"})
