"""A server's life from outside: drain on SIGTERM, SIGKILL of every process, a port in use, bad starts."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import ROOT, complete_all, eventually, held, in_background, serving

from tests.run.ports import held_port
from vnext.replay.cli.main import main as replay
from vnext.runtime.processes.inherited import FILES_MAX

COMMON = ["--dtype", "float32", "--threads", "1", "--digest-interval", "1"]
END_TIMEOUT_S = 60
LENGTH = 400


def long_request(index: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": f"def f{index}(", "max_tokens": LENGTH, "ignore_eos": True, "seed": index}


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    with serving(tmp_path, *COMMON, "--served-model-name", "demo") as server:
        with held(server):
            thread, found = in_background(lambda: complete_all(server.url, [long_request(index) for index in range(3)], 3))
            assert eventually(lambda: server.metric("vnext_num_requests_running") + server.metric("vnext_num_requests_waiting") == 3)
            server.process.send_signal(signal.SIGTERM)
        server.process.stdout.read()
        assert server.process.wait(END_TIMEOUT_S) == 0
        thread.join(END_TIMEOUT_S)
    assert [answer["usage"]["completion_tokens"] for answer in found[0]] == [LENGTH] * 3
    assert replay(["verify", "--laws", str(server.log_dir)]) == 0


@pytest.mark.parametrize(("seed", "form"), [(3, "full, durable"), (4, "shape, ring"), (6, "full, one process")])
def test_a_server_killed_under_load_leaves_a_log_that_verifies_and_holds_what_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, form: str
) -> None:
    """Three of the kills of scripts/kill_under_load.py, which perf/records has by the hundred."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from kill_under_load import kill

    killed = kill(seed, form)
    assert killed.wrong == "" and killed.steps > 0 and killed.reported > 0 and killed.frames_lost == 0
    assert killed.processes == (3 if form == "full, one process" else 4)


def test_no_process_runs_a_file_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("queue", "msgspec", "torch", "numpy", "vnext", "zmq", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')\nraise SystemExit(3)\n")
    own = "from vnext.sched.policies import Candidate\ndef last(candidate: Candidate): return (-candidate.id,)\n"
    (tmp_path / "own.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "logs", *COMMON, "--scheduling-policy", "own:last") as server:
        asked = {"model": "demo_model", "prompt": "one", "max_tokens": 2}
        assert complete_all(server.url, [asked], 1)[0]["choices"]
        assert server.stop() == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", ["vnext.runtime.rank.main", "vnext.runtime.engine.main", "vnext.server"])
def test_without_restarts_any_dead_process_ends_the_server_with_a_sentence_and_nothing_left_running(
    tmp_path: Path, module: str
) -> None:
    with serving(tmp_path, *COMMON, "--max-restarts", "0") as server:
        family = server.processes
        os.kill(server.process_of(module).pid, signal.SIGKILL)
        server.process.stdout.read()
        assert server.process.wait(END_TIMEOUT_S) == 1
        said = server.process.stderr.read()
        _, alive = psutil.wait_procs(family[1:], timeout=END_TIMEOUT_S)
    assert not alive and "SIGKILL" in said


def test_a_signal_ends_a_start(tmp_path: Path) -> None:
    """While the rank imports and loads: nothing is served yet, nothing is left running, and nobody complains."""
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", "--port", "0", "--log-dir", str(tmp_path), *COMMON]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    family: list[psutil.Process] = []
    while not any("vnext.runtime.rank.main" in process.cmdline() for process in family):
        assert server.poll() is None
        family = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(signal.SIGTERM)
    server.wait(END_TIMEOUT_S)
    alive = [process for process in family if process.is_running()]  # at once: a rank that still imports torch is ended too
    said, complaints = server.communicate(timeout=END_TIMEOUT_S)
    assert (server.returncode, complaints, alive) == (0, "", []) and "try" not in said


def start_and_fail(*arguments: str) -> str:
    """What `vnext serve` says when it cannot start."""
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = start_and_fail("--port", str(port), "--log-dir", str(tmp_path), *COMMON)
    assert str(port) in said and "in use" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/model"], "no/such/model"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--dtype", "float99"], "float99"),
        (["--kv-cache-memory", "1"], "one block"),
        (["--num-blocks-override", "1", "--max-model-len", "100"], "100"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_bad_start_says_the_value(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in start_and_fail(*arguments, "--log-dir", str(tmp_path))


# ---- what a starter leaves it: closed or full streams, signals blocked or ignored -----------------------------------

BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(
    "by", [("bash", "-c", 'exec "$@" <&-', "bash"), ("bash", "-c", 'exec "$@" 0</dev/full', "bash"), (sys.executable, "-c", BLOCKED)],
    ids=["stdin closed", "stdin odd", "signals blocked and ignored"],
)  # fmt: skip
def test_a_server_serves_and_ends_whatever_its_starter_left_it(tmp_path: Path, by: tuple[str, ...]) -> None:
    with serving(tmp_path, *COMMON, by=by) as server:
        assert complete_all(server.url, [{"model": "demo_model", "prompt": "one", "max_tokens": 2}], 1)[0]["choices"]
        family = server.processes
        assert server.stop() == 0
        assert psutil.wait_procs(family, timeout=END_TIMEOUT_S)[1] == []


def test_a_server_with_more_descriptors_than_select_takes_recovers_and_ends(tmp_path: Path) -> None:
    """It was left 1,100 of them, and a limit of a few more: each of its processes raises that."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    left = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
        "; [os.set_inheritable(os.dup(0), True) for _ in range(1100)]; os.execv(sys.argv[1], sys.argv[1:])"
    )
    with serving(tmp_path, *COMMON, "--served-model-name", "demo", by=(sys.executable, "-c", left)) as server:
        assert len(server.processes) >= 4
        assert {process.rlimit(psutil.RLIMIT_NOFILE)[0] for process in server.processes} == {most}
        before = server.process_of("vnext.runtime.engine.main").pid
        os.kill(before, signal.SIGKILL)
        assert complete_all(server.url, [long_request(0)], 1)[0]["usage"]["completion_tokens"] == LENGTH
        assert server.process_of("vnext.runtime.engine.main").pid != before
        assert server.stop() == 0


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>/dev/full"])
def test_a_server_serves_where_it_cannot_say_so(tmp_path: Path, streams: str) -> None:
    port = held_port()
    command = [sys.executable, "-P", "-m", "vnext.commands.cli", "serve", "--port", str(port), "--log", "off", *COMMON]
    by, environment = ["bash", "-c", f'exec "$@" {streams}', "bash"], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*by, *command], env=environment) as process:
        try:
            assert eventually(lambda: process.poll() is not None or answers(port), END_TIMEOUT_S)
            asked = {"model": "demo_model", "prompt": "one", "max_tokens": 2}
            assert complete_all(f"http://127.0.0.1:{port}", [asked], 1)[0]["choices"]
        finally:
            process.terminate()
        assert process.wait(END_TIMEOUT_S) == 0


def answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("from vnext.commands.cli import main; sys.exit(main(['doctor', '--json']))", "vnext doctor: the output cannot be written (No space left on"),
        ("from vnext.commands.cli import main; sys.exit(main(['doctor']))", "vnext doctor: the output cannot be written"),
        ("from vnext.replay.cli.main import process; sys.exit(process())", "vnext-replay: the output cannot be written"),
        ("from vnext.server.console import reporting\nwith reporting('vnext-bench'): print('1 token')", "vnext-bench: the output cannot"),
    ],
    ids=["json", "tables", "replay", "bench"],
)  # fmt: skip
def test_a_report_that_cannot_be_written_is_one_sentence(program: str, words: str, root: Path) -> None:
    log = str(root / "tests/golden/logs")
    command = [sys.executable, "-c", f"import sys; {program}" if "\n" not in program else program]
    if "replay" in program:
        command += ["info", f"{log}/digest-2"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ran.returncode in (1, 2) and ran.stderr.startswith(words) and len(ran.stderr.splitlines()) == 1


def test_a_reader_who_has_seen_enough_gets_no_sentence() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from vnext.server.console import reporting\nwith reporting('x'): print('a report')"
    ran = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")
