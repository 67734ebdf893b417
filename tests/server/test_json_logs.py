"""`vnext serve --log-format json`: every line of every process parses, and a request's lines have its id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 60
FIELDS = {"timestamp", "level", "logger", "process", "pid", "message"}
BODY = json.dumps({"prompt": "Once", "max_tokens": 4}).encode()


def asked(url: str, request_id: str) -> int:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id, "Authorization": "Bearer sk-secret"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", BODY, headers), timeout=60) as response:
        response.read()
        return response.status


def confuse(folder: Path) -> None:
    """Have the engine core write a line: it cannot read this client's message."""
    [address] = folder.glob("vnext-*/engine")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{address}")
        socket.send(b"no message")


def lines_of(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(each.keys() >= FIELDS for each in found)
    return found


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", "--port", "0", "--log-dir", str(tmp_path / "log"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_every_line_parses_and_names_its_request(tmp_path: Path) -> None:
    options = ("--log-format", "json", "--log-level", "info", "--api-key", "sk-secret", "--trust-remote-code")
    with started(tmp_path, *options) as process:
        out = []
        try:
            for line in process.stdout:
                out.append(line)
                if '"Ctrl-C stops"' in line:
                    break
            url = next(each["message"].split()[-1] for each in lines_of("".join(out)) if each["message"].startswith("serving "))
            assert asked(url, "one-of-mine") == 200
            try:
                urllib.request.urlopen(f"{url}/nothing", timeout=60)
            except urllib.error.HTTPError as error:
                assert error.code == 404
            confuse(tmp_path)
            assert asked(url, "another") == 200
        finally:
            process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=END_TIMEOUT_S)
    found = lines_of("".join(out) + rest) + lines_of(errors)
    assert {each["process"] for each in found} >= {"launcher", "API server", "engine core"}
    [access] = [each for each in found if each.get("request_id") == "one-of-mine"]
    assert access.items() >= {"method": "POST", "path": "/v1/completions", "status_code": 200, "client_addr": "127.0.0.1"}.items()
    assert any("could not be read and was dropped" in each["message"] for each in found if each["process"] == "engine core")
    assert any("--trust-remote-code" in each["message"] for each in found)
    assert "sk-secret" not in "".join(out) + rest + errors


def test_a_start_that_fails_says_so_in_json(tmp_path: Path) -> None:
    with started(tmp_path, "--log-format", "json", "--chat-template", str(tmp_path / "absent")) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and any("chat template" in each["message"] for each in lines_of(errors)) and lines_of(out)
