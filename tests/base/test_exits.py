"""Tests of exit statuses: 2 and one sentence for unusable input, 1 for a failure after the start."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from vnext.base.exits import FAILED, INTERRUPTED, REFUSED
from vnext.commands import api_servers, cli, serve as serving, vnext, vnext_bench, vnext_replay
from vnext.commands.bench import cli as bench
from vnext.gateway import run as router
from vnext.replay.cli import main as replay
from vnext.runtime.processes import launch
from vnext.runtime.processes.launch import DEMO_MODEL, StartFailed, StartRefused
from vnext.server.tls import AddressUnusable

NOBODY = "http://127.0.0.1:1"
WRONG_BY_COMMAND = [
    (cli.main, ["serve", "--dtype", "fp8"], "--dtype is 'fp8'"),
    (cli.main, ["serve", "--max-num-seqs", "many"], "--max-num-seqs is 'many': it must be a whole number"),
    (cli.main, ["serve", "--ctx-size", "4096"], "there is no option --ctx-size: see --max-model-len"),
    (cli.main, ["serve", "no/such/folder"], "there is no folder 'no/such/folder'"),
    (cli.main, ["serve", "~nobody-here/model"], "'~nobody-here/model' cannot be opened"),
    (cli.main, ["serve", "--port", "0", "--log-dir", "/proc/none"], "the log directory /proc/none cannot be written"),
    (cli.main, ["serve", "--host", "no.such.host.invalid"], "the host 'no.such.host.invalid' is unknown"),
    (cli.main, ["serve", "--host", "203.0.113.1", "--port", "0"], "203.0.113.1 is no address of this machine"),
    (cli.main, ["chat", "--log-dir", "/proc/none"], "the log directory /proc/none cannot be written"),
    (cli.main, ["chat", "no/such/folder"], "there is no folder 'no/such/folder'"),
    (cli.main, ["chat", "--temperature", "-1"], "temperature is -1.0: it must lie between"),
    (cli.main, ["chat", "--url", NOBODY], f"{NOBODY} cannot be reached"),
    (cli.main, ["chat", "--url", "ftp://a/b"], "is no server's URL: write it as http://"),
    (cli.main, ["doctor", "--jsno"], "did you mean --json?"),
    (cli.main, [], "name a command first: serve, run, chat, pull, list, rm, quantize, batch, restart, router, doctor"),
    (cli.main, ["bench", "latency", "no/such/folder"], "vnext-bench: there is no folder 'no/such/folder'"),
    (cli.main, ["replay", "info", "no/such/log"], "there is no log at no/such/log"),
    (bench.main, ["simulate"], "name a model: a folder, a hub id, or a shape: "),
    (bench.main, ["size"], "name a model: a folder, a hub id, or a shape: "),
    (bench.main, [], "name a command first: serve, sweep, throughput, latency, startup, "),
    (bench.main, ["server"], "there is no command server: did you mean serve?"),
    (bench.main, ["latency", "no/such/folder"], "there is no folder 'no/such/folder'"),
    (bench.main, ["latency", "--block-size", "0"], "--block-size is 0"),
    (bench.main, ["latency", "--repeats", "0"], "--repeats is 0"),
    (bench.main, ["latency", "--repeat", "3"], "there is no option --repeat: did you mean --repeats?"),
    (bench.main, ["latency", "--json", "/proc/none/report.json"], "--json /proc/none/report.json cannot be written"),
    (bench.main, ["throughput", "--url", NOBODY], "is it running?"),
    (bench.main, ["throughput", "--base-url", NOBODY], "there is no option --base-url: see --url"),
    (replay.main, ["info", "no/such/log"], "there is no log at no/such/log"),
    (replay.main, ["info"], "LOG is missing.\nSee vnext-replay info --help."),
    (replay.main, ["info", "a", "--law"], "there is no option --law: did you mean --laws?\nSee vnext-replay info --help."),
    (replay.main, ["fork", "a", "b"], "STEP is 'b': it must be a whole number.\nSee vnext-replay fork --help."),
    (replay.main, ["info", "a", "b"], "nothing takes 'b'."),
    (replay.main, ["info", "a", "--json=1"], "--json takes no value."),
    (replay.main, ["ui", "--live", "127.0.0.1:8000"], "an address begins with http://"),
    (replay.main, ["no-such-command"], "no-such-command"),
]


def status(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """What the process would end with."""
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot work is said before a process is started for it."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "start_core", start)
    monkeypatch.setattr(api_servers, "start_child", start)


@pytest.mark.parametrize(("main", "argv", "words"), WRONG_BY_COMMAND, ids=lambda value: None if callable(value) else str(value)[:40])
def test_what_was_given_and_cannot_be_used(
    no_engine: None, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], argv: list[str], words: str
) -> None:
    assert status(main, argv) == REFUSED
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def rewrite(**fields: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def as_gguf(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "model-q4.gguf").write_text("")


def half(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("config.json"), "has no config.json; give a folder"),
        (as_gguf, "model-q4.gguf is no GGUF file that can be read"),
        (remove("model.safetensors"), "model.safetensors is missing"),
        (half, "model-00002-of-00002.safetensors is missing; vnext reads safetensors weights, download the whole model"),
        (cut, "model.safetensors is truncated or corrupt"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold a JSON object"),
        (rewrite(architectures=["T5Model"]), "architecture 'T5Model' is not supported"),
        (rewrite(architectures=[{}]), "config.json names no architecture"),
        (rewrite(quantization_config={"quant_method": "hqq"}), "quantised weights (hqq) are not supported"),
        (lambda folder: (folder / "generation_config.json").write_text('{"temperature": -1}'), "temperature is -1"),
    ],
    ids=lambda value: None if callable(value) else value,
)
def test_a_folder_that_holds_no_whole_model(
    no_engine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    spoil(folder)
    assert cli.main(["serve", str(folder), "--port", "0"]) == REFUSED
    said = capsys.readouterr().err
    assert said.startswith("vnext serve: ") and words in said and said.count("\n") == 1


def test_a_port_in_use_is_refused_before_anything_starts(no_engine: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == REFUSED
    assert "is in use" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(StartFailed, FAILED), (StartRefused, REFUSED)])
@pytest.mark.parametrize("command", [[cli.main, "serve", "--port", "0"], [cli.main, "chat"], [bench.main, "latency"]])
def test_an_engine_that_could_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list, error: type[Exception], code: int
) -> None:
    """Whether what was given is to blame the engine says itself."""

    def fail(*_: object) -> None:
        raise error("It is so.")

    monkeypatch.setattr(serving, "find_model", fail)
    monkeypatch.setattr(launch, "find_model", fail)
    assert status(command[0], command[1:]) == code
    assert "It is so." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "0.0.0.0", "--api-key", "secret"], False),
        (["--host", "127.0.0.2"], False),
        (["--host", "localhost"], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["serve", "one", "two"], ["router", "--backend", NOBODY]], ids=["server", "several", "router"])
def test_a_server_that_others_reach_without_a_key_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], arguments: list[str], is_said: bool
) -> None:
    def fail(*_: object) -> None:
        raise StartFailed("It is so.") if len(command) == 1 else AddressUnusable("It is so.")

    monkeypatch.setattr(serving, "start", fail)
    monkeypatch.setattr(router, "_serve", fail)
    assert cli.main([*command, *arguments]) == (FAILED if len(command) == 1 else REFUSED)
    assert ("may use this server, since it has no key: give it --api-key" in capsys.readouterr().out) == is_said


class _Broken(BaseHTTPRequestHandler):
    """Names a model and answers no request."""

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(500, b"no")

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def broken_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broken)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


def test_a_measurement_that_failed(broken_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The address is taken as clients of OpenAI write it, too."""
    argv = ["throughput", "--num-prompts", "2", "--input-len", "2", "--output-len", "1", "--url"]
    for url in (broken_server, f"http://{broken_server}/v1"):
        assert bench.main([*argv, url]) == FAILED
        assert "All 2 requests to" in capsys.readouterr().err


@pytest.mark.parametrize("begin", [vnext, vnext_bench, vnext_replay], ids=lambda begin: begin.__name__)
def test_ctrl_c_while_a_command_is_loaded(begin: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loaded: list[str] = []

    def interrupted(name: str) -> None:
        assert find_spec(name) is not None, "the entry point names a module that is there"
        loaded.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr("vnext.commands.import_module", interrupted)
    assert begin() == INTERRUPTED and len(loaded) == 1
    assert capsys.readouterr().err == f"{begin.__name__.replace('_', '-')}: interrupted\n"
