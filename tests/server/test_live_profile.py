"""/start_profile and /stop_profile of a server that answers: each kernel's call within the step of the log that it served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vnext.kernels.cpu import native

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import Server, serving  # noqa: E402  (needs the path above)

if not native.is_built():
    pytest.skip("the CPU kernels are not compiled", allow_module_level=True)

SERVE = "--dtype", "float32", "--threads", "1", "--max-model-len", "256"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("log"), "--show-log", *SERVE) as running:
        yield running


def post(server: Server, path: str, **body: object) -> tuple[int, dict]:
    found = httpx.post(f"{server.url}{path}", json=body or None, timeout=120)
    return found.status_code, found.json()


def ask(server: Server, tokens: int) -> None:
    assert post(server, "/v1/completions", prompt="The log", max_tokens=tokens, ignore_eos=True, temperature=0)[0] == 200


def test_each_call_lies_in_the_step_of_the_log_that_it_served(server: Server) -> None:
    ask(server, 20)
    assert post(server, "/start_profile") == (200, {"room": 1 << 17})
    ask(server, 24)
    status, found = post(server, "/stop_profile")
    assert status == 200 and found["left_out"] == 0 and found["ranks"] == 1
    ask(server, 5)
    assert 24 <= found["steps"] <= 28 and found["first_step"] >= 18
    out = Path(found["timeline"])
    assert out.parent == Path(server.log_dir) and out.stat().st_mode & 0o077 == 0
    events = json.loads(out.read_text())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    kernels = [each for each in slices if each["pid"] == 3]
    steps = [each for each in slices if each["pid"] == 1 and each["name"].startswith("step ")]
    assert len(kernels) == found["calls"] and len(steps) <= found["steps"] + 5, "the rest of the log is left out"
    heads = [each for each in kernels if each["name"] == "attention"]
    spans = [(step["ts"], step["ts"] + step["dur"]) for step in steps]
    inside = [head for head in heads if any(begin <= head["ts"] and head["ts"] + head["dur"] <= end for begin, end in spans)]
    assert len(inside) > 0.9 * len(heads) >= 20
    assert {each["name"] for each in found["operations"]} >= {"attention", "norm"} and found["total_ms"] > 0


def test_a_profile_that_runs_or_does_not_has_one_sentence(server: Server) -> None:
    status, found = post(server, "/stop_profile")
    assert status == 400 and "No profile runs" in found["error"]["message"]
    assert post(server, "/start_profile")[0] == 200
    status, found = post(server, "/start_profile")
    assert status == 400 and "a profile runs: stop it first" in found["error"]["message"].lower()
    status, found = post(server, "/stop_profile")
    assert status == 400 and "no step was computed while the profile ran" in found["error"]["message"]
    ask(server, 3)


def test_only_viewers_of_the_log_may(tmp_path: Path) -> None:
    with serving(tmp_path, *SERVE) as hidden:
        for path in ("/start_profile", "/stop_profile"):
            status, found = post(hidden, path)
            assert status == 403 and found["error"]["code"] == "log_hidden"
