"""A load that takes long, of real processes: /health says its share while it grows, a request waits and is then answered."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

import pytest
from serving import ROOT, complete_all, eventually, in_background, serving

from tests.run.ports import held_port

SLOWLY = """
import time
from pathlib import Path
from vnext.runtime.rank.load_progress import LoadProgress

def slowly(self, done_bytes, total_bytes, noted=LoadProgress.__call__):
    noted(self, done_bytes, total_bytes)
    for hundredths in (30, 60):
        while hundredths * total_bytes <= 100 * done_bytes < 90 * total_bytes and not Path(FOLDER, str(hundredths)).exists():
            time.sleep(0.01)

LoadProgress.__call__ = slowly
"""
"""Python imports it in every process: the weights come as far as a file lets them."""


def health(port: int) -> tuple[int, float]:
    """The status, and the share that is loaded; (0, 0) while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body)["loaded"] if answer.status == 503 else 1.0
    except OSError:
        return 0, 0.0
    finally:
        connection.close()


@pytest.mark.parametrize("engines", [1, 2])
def test_health_shows_how_far_a_slow_load_is(tmp_path: Path, engines: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{SLOWLY}")
    port, shares = held_port(), list[float]()
    asked = {"model": "demo", "prompt": "def f(", "max_tokens": 3}

    def watch() -> list[dict]:
        try:
            assert eventually(lambda: 0.3 <= health(port)[1] < 0.6)
            shares.append(health(port)[1])
            waiting, answers = in_background(lambda: complete_all(f"http://127.0.0.1:{port}", [asked], 1))
            (tmp_path / "30").touch()
            assert eventually(lambda: 0.6 <= health(port)[1] < 0.9)
            shares.append(health(port)[1])
            time.sleep(0.1)
            assert waiting.is_alive() and health(port)[0] == 503
        finally:  # the load goes on whatever was found
            for name in ("30", "60"):
                (tmp_path / name).touch()
        assert eventually(lambda: health(port)[0] == 200)
        waiting.join(60)
        return answers[0]

    thread, found = in_background(watch)
    options = ("--port", str(port), "--served-model-name", "demo", "--threads", "1", "--data-parallel-size", str(engines))
    with serving(tmp_path / "log", *options, more={"PYTHONPATH": f"{tmp_path}:{ROOT}"}):
        thread.join(60)
    assert not isinstance(found[0], AssertionError), "its share is not shown"
    assert [answer["usage"]["completion_tokens"] for answer in found[0]] == [3]
    assert shares[0] < shares[1]
