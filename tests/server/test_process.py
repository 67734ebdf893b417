"""The API process itself: as a child it serves, drains on SIGTERM, and says in one sentence why it cannot start."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec
from edge_server import echo_answer
from fake_engine import FakeEngine, wait_until
from toy_tokenizers import CHAT_TEMPLATE, byte_level_backend

from tests.run.ports import held_port
from vnext.runtime.processes.subprocesses import Child, start_child
from vnext.runtime.protocol.messages import Hello, SubmitRequest
from vnext.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]


def checkpoint(path: Path) -> str:
    byte_level_backend().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return str(path)


def start_by_hand(settings: ServerSettings) -> tuple[int, str]:
    """Exit code and stderr of a server that cannot start."""
    code = (
        "import sys, msgspec; from vnext.server.run import run_server, ServerSettings;"
        "settings = msgspec.json.decode(sys.argv[1], type=ServerSettings);"
        "sys.exit(run_server(settings, settings.engine_address, settings.model_path))"
    )
    command = [sys.executable, "-c", code, msgspec.json.encode(settings).decode()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    return ended.returncode, ended.stderr


@contextmanager
def server_process(engine: FakeEngine, path: Path) -> Iterator[tuple[Child, int]]:
    settings = ServerSettings(
        port=held_port(), model_path=checkpoint(path), engine_address=engine.address, drain_s=60.0
    )
    child = start_child("API server", "vnext.server")
    child.send_config(msgspec.json.encode(settings))
    try:
        yield child, settings.port
    finally:
        child.terminate(grace_s=5)


def ask(connection: http.client.HTTPConnection, engine: FakeEngine, model: str) -> None:
    """A completion that waits at the engine core, which is held."""
    engine.running.clear()
    body = json.dumps({"model": model, "prompt": "say:bye"})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    engine.wait_for(lambda: len(engine.of_kind(SubmitRequest)) == 1)


def test_many_may_wait_to_be_accepted(tmp_path: Path) -> None:
    """More than are accepted in one turn of the event loop: here none is, for a while."""
    with FakeEngine(echo_answer) as engine, server_process(engine, tmp_path) as (child, port), ExitStack() as stack:
        stack.enter_context(closing(connect(port, child)))
        os.kill(child.pid, signal.SIGSTOP)
        try:
            for _ in range(300):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        finally:
            os.kill(child.pid, signal.SIGCONT)


def test_it_serves_and_drains_on_sigterm(tmp_path: Path) -> None:
    with FakeEngine(echo_answer) as engine, server_process(engine, tmp_path) as (child, port):
        connection = connect(port, child)
        ask(connection, engine, tmp_path.name)
        child.process.terminate()
        wait_until(lambda: refused(port))
        engine.running.set()
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["text"] == "bye"
        assert child.wait(60) == 0


def test_a_second_sigterm_aborts_what_is_live(tmp_path: Path) -> None:
    with FakeEngine(echo_answer) as engine, server_process(engine, tmp_path) as (child, port):
        connection = connect(port, child)
        ask(connection, engine, tmp_path.name)
        child.process.terminate()
        wait_until(lambda: refused(port))
        child.process.terminate()
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "aborted")
        assert child.wait(60) == 0
        assert len(engine.wait_aborts("shutdown")) == 1


def test_requests_wait_while_the_model_loads(tmp_path: Path) -> None:
    """The engine comes when the server has listened for a while; the request that came before it gets its answer."""
    address, settings = f"tcp://127.0.0.1:{held_port()}", ServerSettings(port=held_port(), model_path=checkpoint(tmp_path))
    child = start_child("API server", "vnext.server")
    child.send_config(msgspec.json.encode(msgspec.structs.replace(settings, engine_address=address)))
    try:
        wait_until(lambda: not refused(settings.port))
        with closing(http.client.HTTPConnection("127.0.0.1", settings.port, timeout=60)) as early:
            body = json.dumps({"model": tmp_path.name, "prompt": "say:bye"})
            early.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            with closing(http.client.HTTPConnection("127.0.0.1", settings.port, timeout=60)) as probe:
                probe.request("GET", "/health")
                response = probe.getresponse()
                assert (response.status, json.loads(response.read())) == (503, {"status": "loading", "loaded": 0.0})
            with FakeEngine(echo_answer, address=address):
                assert json.loads(early.getresponse().read())["choices"][0]["text"] == "bye"
    finally:
        child.terminate(grace_s=5)


def test_sigterm_before_the_engine_is_ready(tmp_path: Path) -> None:
    with FakeEngine(echo_answer, silent=True) as engine, server_process(engine, tmp_path) as (child, _):
        engine.wait_for(lambda: len(engine.of_kind(Hello)) == 1)
        child.process.terminate()
        assert child.wait(60) == 0


def test_sigterm_reaches_a_server_that_has_begun_to_wait(tmp_path: Path) -> None:
    """It interrupts another thread here, so nothing but the loop's own descriptor wakes the main one: as when it comes between
    a look at the signals and the wait."""
    code = (
        "import signal, sys, threading, msgspec; from vnext.server.run import run_server, ServerSettings;"
        "settings = msgspec.json.decode(sys.argv[1], type=ServerSettings);"
        "threading.Thread(target=threading.Event().wait, daemon=True).start();"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM});"
        "sys.exit(run_server(settings, settings.engine_address, settings.model_path))"
    )
    with FakeEngine(echo_answer, silent=True) as engine:
        settings = ServerSettings(port=held_port(), model_path=checkpoint(tmp_path), engine_address=engine.address)
        process = subprocess.Popen([sys.executable, "-c", code, msgspec.json.encode(settings).decode()], cwd=ROOT)
        try:
            engine.wait_for(lambda: len(engine.of_kind(Hello)) == 1)
            time.sleep(0.2)  # until it waits for the answer
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def refused(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def connect(port: int, child: Child) -> http.client.HTTPConnection:
    """A connection to the server, once it listens."""
    while True:
        child.check_alive()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with suppress(ConnectionRefusedError):
            connection.request("GET", "/health")
            if connection.getresponse().read() == b'{"status": "ok"}':
                return connection
        child.wait(0.05)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, words = start_by_hand(ServerSettings(port=port, engine_address="tcp://127.0.0.1:9"))
    assert code == 2 and words.count("\n") == 1
    assert f"port {port} of 127.0.0.1 is in use" in words and "--port" in words


def test_other_reasons_not_to_start(tmp_path: Path) -> None:
    code, words = start_by_hand(ServerSettings(port=0, host="no.such.host.invalid", model_path=str(tmp_path)))
    assert code == 2 and "no.such.host.invalid" in words and "--host" in words and words.count("\n") == 1
    code, words = start_by_hand(ServerSettings(port=0, model_path=str(tmp_path)))
    assert code == 2 and "tokenizer.json" in words and words.count("\n") == 1
    settings = ServerSettings(port=0, model_path=checkpoint(tmp_path), chat_template_path="no/such.jinja")
    code, words = start_by_hand(settings)  # no engine is waited for
    assert code == 2 and "no/such.jinja cannot be read" in words and words.count("\n") == 1
    settings = ServerSettings(
        port=0, model_path=checkpoint(tmp_path), engine_address=f"tcp://127.0.0.1:{held_port()}", connect_timeout_s=0.2
    )
    code, words = start_by_hand(settings)
    assert code == 1 and "did not answer within 0.2 s" in words and words.count("\n") == 1
