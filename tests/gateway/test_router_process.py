"""`vnext router` as a process over real `vnext serve`s: a server is killed within a stream, then the router; and the drain."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "e2e"))

from router_here import Toy  # noqa: E402  (needs the path above)
from serving import ROOT, Server, eventually, fill, serving  # noqa: E402

from vnext.server.settings import ServerSettings  # noqa: E402
from vnext.server.tls import tls_context  # noqa: E402

SMALL = ("--show-events", "--threads", "1", "--num-blocks-override", "128", "--max-num-seqs", "8", "--log", "off")
CHAT: dict[str, Any] = {
    "model": "demo_model", "messages": [{"role": "user", "content": "What is Python?"}], "max_tokens": 400, "temperature": 0.8,
    "seed": 11, "extra_body": {"ignore_eos": True},
}  # fmt: skip
KEY = "an admin's key"
PEM = str(TESTS / "server" / "localhost.pem")


class RouterProcess:
    """A router that has said where it listens."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "vnext.commands.cli", "router", "--admin-key", KEY, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            if "routing by" in line:
                break
        else:
            raise AssertionError(f"the router did not start: {self.said} {self.process.stderr.read()}")
        self.url = re.search(r"http://[\d.:]+", self.said[-1])[0]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def backends(self) -> list[dict[str, Any]]:
        request = urllib.request.Request(f"{self.url}/router/backends", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())


@contextmanager
def routing(*arguments: str) -> Iterator[RouterProcess]:
    router = RouterProcess(*arguments)
    try:
        yield router
    finally:
        router.process.kill()
        router.process.wait()
        router.process.stdout.close()
        router.process.stderr.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(tmp_path_factory.mktemp("log"), *SMALL)) for _ in range(2)]


def conversation(subject: str) -> dict[str, Any]:
    return {"model": "demo_model", "messages": [{"role": "user", "content": f"Tell me of {subject}. " * 20}], "max_tokens": 2}


def test_a_router_knows_at_once_what_the_servers_have_cached(pair: list[Server]) -> None:
    """Its predecessor sent it; this one has it from their events, and its own texts say nothing."""
    backends = [word for each in pair for word in ("--backend", each.url)]
    homes: dict[str, str] = {}
    subjects = ["the sea", "the wind", "the sun", "the stars"]
    for order in (subjects, subjects[::-1]):  # so that equally good servers, which take turns, would be others
        with routing("--port", "0", *backends) as router:
            assert eventually(lambda: {each["view"] for each in router.backends()} == {"exact"})
            for subject in order:
                before = {each.url: each.metric("vnext_prompt_tokens_total") for each in pair}
                router.openai.chat.completions.create(**conversation(subject))
                assert eventually(partial(prompted, pair, before))
                [home] = prompted(pair, before)
                assert homes.setdefault(subject, home) == home
            router.process.send_signal(signal.SIGKILL)
    assert set(homes.values()) == {each.url for each in pair}


def prompted(servers: list[Server], before: dict[str, float]) -> list[str]:
    """Those that have had a prompt since."""
    return [each.url for each in servers if each.metric("vnext_prompt_tokens_total") > before[each.url]]


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_server_behind_https_is_one_whose_certificate_the_machine_trusts(is_trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router reads the machine's certificates for such a server only: at its start, or when one is added."""
    monkeypatch.setenv("SSL_CERT_FILE", PEM if is_trusted else os.devnull)
    with Toy() as plain, Toy() as toy:
        site = web.TCPSite(toy.runner, "127.0.0.1", 0, ssl_context=tls_context(ServerSettings(ssl_certfile=PEM)))
        toy.in_loop(site.start())
        secure = f"https://localhost:{site.port}"
        with routing("--port", "0", "--backend", secure) as first, routing("--port", "0", "--backend", plain.url) as other:
            headers = {"Authorization": f"Bearer {KEY}"}
            added = urllib.request.Request(f"{other.url}/router/backends?backend={secure}", headers=headers, method="POST")
            urllib.request.urlopen(added, timeout=60).close()
            for router in (first, other):
                assert eventually(lambda router=router: "not answered" not in trouble_of(router))
                assert trouble_of(router).startswith("" if is_trusted else "it cannot be reached (its certificate is not trusted: ")
                assert bool(trouble_of(router)) != is_trusted


def trouble_of(router: RouterProcess) -> str:
    """Why its last server gets no requests, "" if it does."""
    return router.backends()[-1]["trouble"] or ""


def test_a_router_routes_though_nobody_reads_what_it_says() -> None:
    """That a server is ill and well again is said in the loop that passes requests on."""
    with Toy() as toy, routing("--port", "0", "--backend", toy.url) as router:
        fill(router.process, 1)
        for status in (500, 200, 500, 200):
            toy.health = status
            assert eventually(lambda status=status: bool(trouble_of(router)) == (status == 500), 30)
        with urllib.request.urlopen(f"{router.url}/v1/anything", timeout=60) as answer:
            assert json.loads(answer.read())["path"] == "/v1/anything"
        router.process.terminate()
        assert router.process.wait(60) == 0


def test_a_killed_server_a_killed_router_and_a_drain(pair: list[Server]) -> None:
    undisturbed = openai.OpenAI(base_url=f"{pair[0].url}/v1", api_key="none").chat.completions.create(**CHAT).choices[0].message.content
    backends = [word for each in pair for word in ("--backend", each.url)]
    with routing("--port", "0", *backends) as router:
        assert "2 of 2 servers are ready" in router.said[-1] and len([line for line in router.said if "is ready" in line]) == 2
        ids, text = set(), ""
        for chunk in router.openai.chat.completions.create(stream=True, **CHAT):
            ids.add(chunk.id)
            text += chunk.choices[0].delta.content or ""
            if text and (busy := [each for each in router.backends() if each["running"]]) and all(each.process.poll() is None for each in pair):
                [killed] = [each for each in pair if each.url == busy[0]["backend"]]
                for process in killed.processes:
                    process.kill()
        assert text == undisturbed and len(ids) == 1
        with urllib.request.urlopen(f"{router.url}/metrics", timeout=60) as response:
            assert b"vnext_router_streams_continued_total 1.0" in response.read()
        assert [each["ready"] for each in router.backends()].count(True) == 1
        router.process.send_signal(signal.SIGKILL)
        router.process.wait()
        with routing("--port", router.url.rpartition(":")[2], *backends) as another:
            assert "1 of 2 servers are ready" in another.said[-1] and another.url == router.url
            stream = another.openai.chat.completions.create(stream=True, **CHAT)
            text = next(stream).choices[0].delta.content
            another.process.send_signal(signal.SIGTERM)
            text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == undisturbed, "the drain lets a stream end"
            assert another.process.wait(60) == 0


def test_a_router_that_cannot_start_says_why() -> None:
    with routing("--port", "0", "--backend", "http://127.0.0.1:9") as router:
        assert "127.0.0.1:9 gets no requests: it cannot be reached (Connection refused)" in "".join(router.said)
        command = [sys.executable, "-m", "vnext.commands.cli", "router", "--port", router.url.rpartition(":")[2], "--backend", "x"]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
        assert ended.returncode == 2 and re.fullmatch(r"vnext router: port \d+ of 127.0.0.1 is in use: .*\n", ended.stderr)
