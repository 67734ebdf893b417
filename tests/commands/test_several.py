"""`vnext serve A B` as a process: each model answers by its name, one at a time here, and all processes end with the first."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from vnext.commands.bench.load.answers import RequestFailed
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.restart import Running, listed
from vnext.commands.several import names_of, serve_several, url_when_ready
from vnext.options.reader import parse
from vnext.runtime.processes.launch import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "e2e"))

from serving import fill  # noqa: E402

SMALL = ("--threads", "1", "--num-blocks-override", "64", "--max-num-seqs", "4", "--port", "0")
ASKED = {"prompt": "What is Python?", "max_tokens": 4, "temperature": 0}
COMMAND = (sys.executable, "-m", "vnext.commands.cli")


def test_two_models_take_turns(tmp_path: Path) -> None:
    for name in ("other", "gone"):
        shutil.copytree(DEMO_MODEL, tmp_path / name)
    options = (*SMALL, "--max-loaded-models", "1", "--log-dir", str(tmp_path / "logs"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    models = (str(DEMO_MODEL), str(tmp_path / "other"), str(tmp_path / "gone"))
    process = subprocess.Popen([*COMMAND, "serve", *models, *options], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        client = BlockingClient(re.search(r"http://[\d.:]+", next(line for line in process.stdout if ": serving" in line))[0])
        shutil.rmtree(tmp_path / "gone")
        first = client.ask("/v1/completions", ASKED, dict)
        assert client.ask("/v1/completions", ASKED | {"model": "other"}, dict)["choices"][0]["text"] == first["choices"][0]["text"]
        assert client.ask("/health", None, dict)["models"] == {"demo_model": "unloaded", "other": "loaded", "gone": "unloaded"}
        assert b'vnext_router_model_loaded{model="other"} 1.0' in client.read("/metrics")
        listed = subprocess.run([*COMMAND, "list"], capture_output=True, text=True, env=environment, check=True).stdout
        assert "loaded: other, " in listed and "in the server of several models" in listed
        removal = (*COMMAND, "rm", "other", "--models-dir", str(tmp_path))
        refused = subprocess.run(removal, capture_output=True, text=True, env=environment, check=False)
        assert refused.returncode == 2 and "vnext rm: other is served by process " in refused.stderr and (tmp_path / "other").is_dir()
        (behind,) = psutil.Process(process.pid).children()
        behind.kill()  # and its engine ends with it: the next request has another one
        while client.ask("/health", None, dict)["models"]["other"] == "loaded":
            time.sleep(0.05)
        client.ask("/v1/completions", ASKED | {"model": models[1]}, dict)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(list((tmp_path / "logs").glob("*.key"))) == 3 and len(family) > 2
        with pytest.raises(RequestFailed, match="gone' cannot be loaded: there is no folder"):
            client.ask("/v1/completions", ASKED | {"model": models[2]}, dict)
        fill(process, 1)  # nobody reads that models are loaded, unloaded and gone
        assert client.ask("/v1/completions", ASKED, dict)["choices"][0]["text"] == first["choices"][0]["text"]
        family += psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert [each for each in family if each.is_running()] == []


def test_a_model_that_cannot_be_served_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for models, words in {
        (str(DEMO_MODEL), str(tmp_path / "gone")): f"there is no folder {str(tmp_path / 'gone')!r}",
        (str(tmp_path / "empty"), str(DEMO_MODEL)): "empty has no config.json",
        (str(DEMO_MODEL), "http://a/b"): "is a URL",
        ("owner/name", "owner/name"): "owner/name names two of the models: name it once, or give each its own with --served-model-name.",
    }.items():
        assert serve_several(parse(["serve", *models, "--models-dir", str(tmp_path)], {})) == 2
        assert words in capsys.readouterr().err


def test_a_server_whose_model_loads_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    statuses = iter([503, 503, 200])

    async def health(_: web.Request) -> web.Response:
        return web.json_response({}, status=next(statuses))

    async def story() -> None:
        app = web.Application()
        app.router.add_get("/health", health)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            assert await url_when_ready(os.getpid(), session) == ""  # its address is not known so far
            with listed(Running(os.getpid(), url := str(server.make_url("")).rstrip("/"), str(tmp_path))):
                assert [await url_when_ready(os.getpid(), session) for _ in range(3)] == ["", "", url]
                await server.close()
                assert await url_when_ready(os.getpid(), session) == ""

    asyncio.run(story())


def test_names_and_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").touch()
    command = parse(["serve", "smollm2", str(tmp_path / "m.gguf"), "--keep-alive", "-1", "--other-model", "c"], {})
    assert (command.engine.model, command.server.keep_alive_s, command.server.other_models) == ("smollm2", -1, (str(tmp_path / "m.gguf"), "c"))
    command = parse(["serve", "smollm2", str(tmp_path / "m.gguf")], {})
    assert names_of(("smollm2", *command.server.other_models), ()) == [("smollm2",), ("m", str(tmp_path / "m.gguf"))]
    for words, sentence in {
        ("a", "b", "--served-model-name", "x"): "--served-model-name has 1 names for 2 models",
        ("a", "b", "--batch-dir", "x"): "--batch-dir is about one model, and this server has 2",
        ("a", "b", "--api-key", "x", "--api-key", "y"): "--shared-prefix-cache is off",
        ("--other-model", "b"): "there is no first one",
        ("a", "b", "--max-loaded-models", "0"): "--max-loaded-models",
    }.items():
        with pytest.raises(SystemExit):
            parse(["serve", *words], {})
        assert sentence in capsys.readouterr().err
