"""Programs on top of an engine whose engine core is killed: they give what they would have given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from serving import END_TIMEOUT_S, ROOT, Server, eventually, held, serving

CORE = "vnext.runtime.engine.main"
ENGINE = ("--dtype", "float32", "--threads", "1")
LENGTH = 400


def started(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


def kill_core_below(pid: int) -> None:
    """Kill the engine core of this process, which has one."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if CORE in process.cmdline():
                process.kill()


@pytest.fixture
def server(tmp_path: Path) -> object:
    with serving(tmp_path, *ENGINE, "--served-model-name", "demo") as running:
        yield running


def kill_when_running(server: Server) -> None:
    assert eventually(lambda: server.metric("vnext_num_requests_running") > 0)
    os.kill(server.process_of(CORE).pid, signal.SIGKILL)


def batch(folder: Path, target: Path, *more: str) -> subprocess.Popen[str]:
    """`vnext batch` of six requests, the first of which is short."""
    lengths = [4] + [LENGTH] * 5
    bodies = [{"prompt": [5 + at, 6], "max_tokens": length, "seed": at, "ignore_eos": True} for at, length in enumerate(lengths)]
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body} for at, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return started("vnext.commands.cli", "batch", str(folder / "in.jsonl"), "-o", str(target), "--log", "off", *ENGINE, *more)


def kill_when_answered(program: subprocess.Popen[str], target: Path) -> None:
    """Kill the engine core of a batch when the first answer is there; all requests have been sent by then."""
    end_s = time.monotonic() + END_TIMEOUT_S
    while not (target.exists() and target.read_text()):
        assert program.poll() is None and time.monotonic() < end_s
    kill_core_below(program.pid)


def test_vnext_batch(tmp_path: Path) -> None:
    found = []
    for target in (tmp_path / "undisturbed", tmp_path / "killed"):
        program = batch(tmp_path, target)
        if target.name == "killed":
            kill_when_answered(program, target)
        said = program.communicate(timeout=4 * END_TIMEOUT_S)[1]
        assert program.returncode == 0, said
        assert ("is started again" in said) is (target.name == "killed")
        answers = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_text().splitlines())}
        assert all(each["status_code"] == 200 for each in answers.values())
        found.append({name: each["body"]["choices"][0]["text"] for name, each in answers.items()})
    assert found[0] == found[1] and len(found[0]) == 6


def test_vnext_batch_ends_when_no_engine_core_follows(tmp_path: Path) -> None:
    program = batch(tmp_path, tmp_path / "out", "--max-restarts", "0")
    kill_when_answered(program, tmp_path / "out")
    assert "was killed by SIGKILL" in program.communicate(timeout=END_TIMEOUT_S)[1] and program.returncode == 1


def test_vnext_chat(server: Server) -> None:
    """One question, while whose answer the engine core is killed, and one after it."""
    program = started("vnext.commands.cli", "chat", "--url", server.url)
    with held(server):
        program.stdin.write(f"/set max_tokens={LENGTH} min_tokens={LENGTH}\n/speed\nOnce upon a time\n")
        program.stdin.flush()
        kill_when_running(server)
    said, errors = program.communicate("And then?\n", timeout=4 * END_TIMEOUT_S)
    assert (program.returncode, errors) == (0, "") and said.count(f"{LENGTH} tokens in") == 2
    assert server.metric("vnext_recoveries_total") == 1 and server.metric("vnext_request_success_total") == 2


def test_vnext_bench(server: Server) -> None:
    """All requests are answered in full, and none counts as failed."""
    load = ("--num-prompts", "8", "--input-len", "8", "--output-len", str(LENGTH))
    with held(server):
        program = started("vnext.commands.bench.cli", "throughput", "--url", server.url, *load)
        kill_when_running(server)
    said, errors = program.communicate(timeout=4 * END_TIMEOUT_S)
    assert program.returncode == 0, errors
    assert server.metric("vnext_recoveries_total") == 1 and server.metric("vnext_request_success_total") == 8
    assert re.search(r"failed\W+0\b", said) or "failed" not in said
