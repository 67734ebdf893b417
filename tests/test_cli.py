"""The command line's programs: version, curl line, doctor, and a talk with a server."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from vnext.chat.talker import TalkFailed
from vnext.chat.terminal import chat, show, talk, talker
from vnext.cli import main
from vnext.doctor import warnings
from vnext.machine import machine
from vnext.options import ChatCommand, parse
from vnext.serve import curl_line, usual_names
from vnext.server.settings import ServerSettings
from vnext.version import __version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vnext {__version__}\n"


def test_help_and_version_load_no_torch(root: Path) -> None:
    code = "import sys; import vnext.cli; assert not {'torch', 'zmq', 'aiohttp'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_doctor_names_machine_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["vnext"] == __version__
    assert report["machine"]["cores_usable"] >= 1
    assert report["machine"]["memory_bytes"] > report["machine"]["memory_available_bytes"] > 0
    assert {"operation", "device_type", "implementation", "summary"} == set(report["kernels"][0])
    assert report["log"] in ("compiled", "plain") and report["tails"] in ("compiled", "plain")
    assert report["strides"] in ("compiled", "none")
    assert {"device", "kernels", "graphs"} <= set(report["cuda"])
    assert set(report["batch_invariant"]) == {"float32", "bfloat16", "float16"}
    assert main(["doctor"]) == 0
    assert report["machine"]["cpu_model"].split()[0] in capsys.readouterr().out


def test_doctor_warns_of_what_will_go_wrong() -> None:
    well = msgspec.structs.replace(
        machine(), load=(0.0, 0.0, 0.0), shm_available_bytes=2**34, memory_available_bytes=2**34
    )
    assert warnings(well, gpu_count=0) == []
    (shm,) = warnings(msgspec.structs.replace(well, shm_available_bytes=64 * 2**20), gpu_count=0)
    assert "64 MiB free" in shm and "--shm-size" in shm
    (memory,) = warnings(msgspec.structs.replace(well, memory_available_bytes=2**30), gpu_count=0)
    assert "1.0 GiB of memory" in memory
    (gpu,) = warnings(well, gpu_count=1)
    assert "--device cuda" in gpu


@pytest.mark.parametrize(("has_template", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_curl_line_is_a_shell_command(has_template: bool, path: str) -> None:
    words = shlex.split(curl_line(ServerSettings(host="0.0.0.0", port=8123), has_template))
    assert words[:3] == ["curl", "-s", f"http://127.0.0.1:8123{path}"]
    assert json.loads(words[words.index("-d") + 1])["max_tokens"] > 0
    assert "Authorization" not in " ".join(words)


def test_curl_line_never_shows_the_key() -> None:
    line = curl_line(ServerSettings(api_key="secret"), True)
    assert "secret" not in line
    assert "$VNEXT_API_KEY" in line


@pytest.mark.parametrize(
    ("model", "folder", "names"),
    [
        ("", "/site/vnext/demo_model", ("demo_model",)),
        ("models/tiny", "models/tiny", ("tiny", "models/tiny")),
        ("/models/tiny/", "/models/tiny", ("tiny", "/models/tiny/")),
        ("owner/name", "/cache/snapshots/5f0b02c7", ("owner/name",)),
    ],
)
def test_requests_may_call_a_model_as_it_was_given(model: str, folder: str, names: tuple[str, ...]) -> None:
    assert usual_names(model, Path(folder)) == names


def test_the_working_folder_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert usual_names(".", Path(".")) == (tmp_path.name, ".")


def test_a_server_goes_on_when_nobody_reads_what_it_says(root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from vnext.server.say import say; say('one'); say('two'); print('alive', file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "alive\n")


# ---- chat --------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Enough of a chat server: repeats the last message word by word, refuses "refuse", fails halfway at "break"."""

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "echo"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        words = body["messages"][-1]["content"].split()
        if words == ["refuse"]:
            self._answer(400, b'{"error": {"message": "No such thing."}}')
            return
        chunks = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
        if words == ["break"]:
            chunks.append({"error": {"message": "The engine stopped."}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def echo_server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def chat_command(server: ThreadingHTTPServer, *more: str) -> ChatCommand:
    return parse(["chat", "--url", f"http://127.0.0.1:{server.server_port}", *more], {})


def talk_of(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, *lines: str) -> str:
    """What the terminal shows of a talk in which the user says these lines."""
    console, typed = Console(file=io.StringIO(), width=200), iter(lines)
    monkeypatch.setattr(console, "input", lambda prompt: next(typed))
    with talker(chat_command(server, "--temperature", "0", "--max-tokens", "5")) as other:
        talk(other, "be brief", console)
    return console.file.getvalue()


def test_a_talk_carries_its_history(echo_server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = talk_of(echo_server, monkeypatch, "hello [bold]there", "again", "/new", "third", "")
    assert "hello [bold]there" in shown, "what a model says is no markup"
    first, second, third = echo_server.bodies
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "hello [bold]there "
    assert [message["content"] for message in third["messages"]] == ["be brief", "third"]
    assert (first["model"], first["temperature"], first["max_tokens"], first["stream"]) == ("echo", 0.0, 5, True)


@pytest.mark.parametrize(("words", "sentence"), [("refuse", "No such thing."), ("break", "The engine stopped.")])
def test_a_failed_answer_leaves_the_talk_going(
    echo_server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    assert sentence in talk_of(echo_server, monkeypatch, words, "next", "")
    assert [message["content"] for message in echo_server.bodies[-1]["messages"]] == ["be brief", "next"]


def test_ctrl_c_cuts_an_answer_short_and_keeps_what_came() -> None:
    def pieces() -> Iterator[str]:
        yield "one "
        raise KeyboardInterrupt

    assert show(pieces(), Console(file=io.StringIO())) == "one "


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["chat", "--url", "http://127.0.0.1:1"], {})
    with pytest.raises(TalkFailed, match="is a server running there"):
        talker(command)
    assert chat(command) == 2
    assert capsys.readouterr().err.startswith("vnext chat: http://127.0.0.1:1 cannot be reached")


def test_end_of_input_ends_a_talk_with_an_own_engine(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vnext.cli", "chat", "--executor", "inproc", "--threads", "1", "--max-tokens", "4"]
    ran = subprocess.run(
        [*command, "--log-dir", str(tmp_path)], cwd=root, input="What is Python?\n", capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "the demo model" in ran.stdout
