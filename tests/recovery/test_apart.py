"""Prefill and decode apart: the texts of one engine, over shared memory and TCP, whichever engine is killed meanwhile."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import httpx
import psutil
import pytest
from msgspec.structs import replace
from serving import Server, complete_all, eventually, serving
from test_fuzzed_routes import BODIES, body_of, value_of

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.handed_over import HandedOver, handed_over_by
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.run_dir import shared_twin
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.sched import handover
from vnext.server.context.identity import TICKET_HEADER
from vnext.state.events import BlocksReceived

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from router_here import RouterHere  # noqa: E402  (needs the path above)

TEXTS = [f"{place}. " + "The quick brown fox jumps over the lazy dog. " * (4 + 3 * place) for place in range(6)] + ["Hi"]
PARAMS = [SamplingParams(temperature=0.8 * (place % 2), seed=place, max_tokens=24, ignore_eos=True) for place in range(7)]
RANK = "vnext.runtime.rank.main"
Tokens = list[list[int]]


def answered(llm: LLM, texts: list[str] = TEXTS) -> Tokens:
    return [found.outputs[0].token_ids for found in llm.generate(texts, PARAMS[: len(texts)], False)]


@cache
def alone(dtype: str) -> Tokens:
    """What one engine answers."""
    with LLM(dtype=dtype, threads=1, log="off") as llm:
        return answered(llm)


def apart(tmp_path: Path, **settings: object) -> LLM:
    """Engine 0 computes prompts for engine 1."""
    usual = {"data_parallel_size": 2, "prefill_engines": 1, "threads": 1, "log": "full", "check_laws": True, "digest_interval": 1}
    return LLM(**(usual | {"log_dir": str(tmp_path / "logs"), "dtype": "float32"} | settings))


def verified(llm: LLM) -> HandedOver:
    """What came, once both logs are good, of engines that have ended."""
    prefill, decode = llm.log_dirs
    assert replay(["verify", "--laws", prefill]) == 0
    assert replay(["verify", "--laws", "--prefill", prefill, decode]) == 0
    return handed_over_by([open_log(Path(prefill))], open_log(Path(decode)))


@pytest.mark.parametrize(
    ("dtype", "ranks", "transport"), [("float32", 1, "shm"), ("bfloat16", 2, "tcp")], ids=["shared memory", "tcp, two ranks each"]
)
def test_streams_are_those_of_one_engine(tmp_path: Path, dtype: str, ranks: int, transport: str) -> None:
    (tmp_path / "secret").write_text("a secret of both engines")
    over_tcp = {"handover_address": "127.0.0.2:0", "cluster_secret_file": str(tmp_path / "secret")} if transport == "tcp" else {}
    shards = {"deterministic": True} if ranks > 1 else {}
    with apart(tmp_path, dtype=dtype, tensor_parallel_size=ranks, handover_transport=transport, **over_tcp, **shards) as llm:
        assert answered(llm) == alone(dtype)
    came = verified(llm)
    assert (came.requests, came.difference) == (6, "") and came.blocks >= 60, "all but the prompt of less than a block"


def test_a_log_with_other_blocks_than_the_other_engine_handed_over_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with apart(tmp_path) as llm:
        answered(llm, TEXTS[:1])
    prefill, decode = llm.log_dirs
    real = handover.coming

    def planted(before: object, event: BlocksReceived) -> object:
        found = real(before, event)
        return found and replace(found, names=(*found.names[:-1], bytes(16)))

    monkeypatch.setattr("vnext.replay.reading.handed_over.coming", planted)
    assert replay(["verify", "--prefill", prefill, decode]) == 1
    monkeypatch.setattr("vnext.replay.reading.handed_over.coming", real)
    assert replay(["verify", "--prefill", decode, decode]) == 1, "an engine that has handed nothing over"


@pytest.mark.parametrize("engine", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("process", ["engine core", "rank"])
def test_a_process_that_is_killed_in_a_hand_over_costs_no_text(tmp_path: Path, engine: int, process: str) -> None:
    with apart(tmp_path) as llm:
        pid = llm._engine.engines[engine].child.pid
        if process == "rank":
            [pid] = [each.pid for each in psutil.Process(pid).children(recursive=True) if RANK in each.cmdline()]
        killer = threading.Thread(target=kill_when_blocks_leave, args=(shared_twin(llm._engine.run_dir), pid))
        killer.start()
        assert answered(llm) == alone("float32")
        killer.join()
        assert answered(llm) == alone("float32")


def kill_when_blocks_leave(folder: Path, pid: int) -> None:
    """Kill a process as soon as there is a block for the other engine."""
    end_s = time.monotonic() + 60
    while not any(len(path.name) == 32 for path in folder.glob("*/??/*")):
        assert time.monotonic() < end_s, "no block has left"
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


def test_blocks_that_are_gone_are_computed(tmp_path: Path) -> None:
    with apart(tmp_path, log="shape") as llm:
        folder = shared_twin(llm._engine.run_dir)
        assert answered(llm, TEXTS[:1]) == alone("float32")[:1] and folder.is_dir()
        shutil.rmtree(folder)
        assert answered(llm) == alone("float32")
    assert not folder.exists()
    assert [replay(["verify", "--laws", each]) for each in llm.log_dirs] == [0, 0], "logs without texts have other names"


def test_servers_with_roles_behind_a_router(tmp_path: Path) -> None:
    """The prompt's blocks come from one server to the other over TCP, and either may end."""
    (tmp_path / "secret").write_text("a secret of both servers")
    usual = ("--threads", "1", "--dtype", "float32", "--log", "full", "--cluster-secret-file", str(tmp_path / "secret"))
    body = {"prompt": TEXTS[5], "max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    with ExitStack() as stack:
        roles = {"prefill": ("--handover-address", "127.0.0.2:0", "--handover-transport", "tcp"), "decode": ()}
        servers = {role: stack.enter_context(serving(tmp_path / role, *usual, "--role", role, *more)) for role, more in roles.items()}
        router = stack.enter_context(RouterHere(*(server.url for server in servers.values())))
        asked = partial(router.call, "POST", "/v1/completions", body)
        status, answer, _ = asked()
        assert status == 200
        [undisturbed] = complete_all(servers["prefill"].url, [body], 1)
        assert answer["choices"][0]["text"] == undisturbed["choices"][0]["text"]
        assert eventually(lambda: servers["decode"].metric("vnext_kv_handover_received_total") > 10)
        forged = {TICKET_HEADER: '{"addresses":["127.0.0.1:1"],"seal":"x"}', "Content-Type": "application/json"}
        request = urllib.request.Request(f"{servers['decode'].url}/v1/completions", json.dumps(body).encode(), forged)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.loads(response.read())["choices"][0]["text"] == answer["choices"][0]["text"]
        _try_at_random(servers["prefill"], servers["decode"], request)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.loads(response.read())["choices"][0]["text"] == answer["choices"][0]["text"]
        for process in servers["decode"].processes:
            process.kill()
        assert asked()[1]["choices"][0]["text"] == answer["choices"][0]["text"], "a server for prompts answers while there is no other"


def _try_at_random(prefill: Server, decode: Server, right: urllib.request.Request) -> None:
    """Bodies of /handover and tickets of clients, none of which ends a rank or costs more than one sentence."""
    rng, ranks = random.Random(6), [process_ids(each) for each in (prefill, decode)]
    with httpx.Client(timeout=60) as client:
        for _ in range(40):
            tokens = json.dumps({"tokens": [rng.randrange(300)] * rng.randrange(1, 60), "cache_salt": value_of(rng)}).encode()
            data = rng.choice((tokens, body_of(BODIES["/handover"], rng)))
            answer = client.post(f"{prefill.url}/handover", content=data, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200 or answer.status_code < 500 and answer.json()["error"]["message"], (data, answer.text)
        for _ in range(40):
            ticket = {"folder": value_of(rng), "addresses": value_of(rng), "seal": value_of(rng)}
            text = rng.choice((json.dumps(ticket), json.dumps(value_of(rng)), "x" * 5_000, '{"seal":"\\ud800"}', "[" * 3_000))
            answer = client.post(f"{decode.url}/v1/completions", content=right.data, headers={TICKET_HEADER: text, "Content-Type": "application/json"})
            assert answer.status_code == 200, (text, answer.text)
    assert [process_ids(each) for each in (prefill, decode)] == ranks, "none was started again"


def process_ids(server: Server) -> list[int]:
    return sorted(each.pid for each in server.processes)
