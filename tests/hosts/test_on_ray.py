"""vnext on Ray: one cluster of two nodes, started and ended here, for an engine's hosts, Ray Serve and Ray Data.

The tokens are those of one process, whatever is lost. All nodes listen on loopback addresses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from test_two_hosts import PLAIN, tokens_of

from tests.run.ports import held_port
from tests.runtime.killed import in_turn, wait_until_gone
from vnext import LLM, SamplingParams
from vnext.base.exits import REFUSED
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.replay.cli.main import main as replay
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.processes.launch import StartRefused, find_model, start_engine
from vnext.runtime.protocol.settings import EngineSettings

HAS_RAY = find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="the extra vnext[ray] is not installed")
NODE = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}  # fmt: skip
"""On a busy machine Serve's proxy needs more than five seconds to begin; Serve would end it and begin again."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes; RAY_ADDRESS names them to every process that starts here."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:  # sockets want a short path
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("RAY_TMPDIR", folder)  # else it says in /tmp/ray, which may be somebody's or missing, that this is the cluster
        os.mkdir(os.path.join(folder, "ray"))
        import ray
        from ray.cluster_utils import Cluster

        before = os.listdir("/dev/shm")
        made = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": folder, "node_ip_address": "127.0.0.2"})
        try:
            made.add_node(**NODE, node_ip_address="127.0.0.3")
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
        wait_until_gone(before)


LONG = 300
"""Tokens of a stream that runs on while Ray removes a node."""


def engine(log_dir: Path, **others: Any) -> EngineSettings:
    return EngineSettings(**{**PLAIN, "log_dir": str(log_dir), "nnodes": 2, "executor": "ray", "master_addr": "127.0.0.2", **others})


def children_of(name: str) -> list[psutil.Process]:
    """The processes below those of Ray's actors of this class."""
    actors = [each for each in psutil.process_iter(["cmdline"]) if f"ray::{name}" in " ".join(each.info["cmdline"] or ())]
    return [child for actor in actors for child in actor.children(recursive=True)]


@needs_ray
def test_streams_outlive_a_rank_and_a_node(cluster: Any, tmp_path: Path) -> None:
    """A rank on the other node is killed, and then that node; another one takes its place."""
    with LLM(log="off", **{**PLAIN, "tensor_parallel_size": 1}) as one:
        expected = tokens_of(one._client, None, LONG)
    settings = engine(tmp_path)
    running = start_engine(settings, find_model(settings)).wait()
    other = next(iter(cluster.worker_nodes))

    def lose_rank() -> None:
        (rank,) = children_of("NodeAgent")
        rank.kill()

    def lose_node() -> None:
        cluster.remove_node(other, allow_graceful=False)
        cluster.add_node(**NODE, node_ip_address="127.0.0.4")

    try:
        with SyncEngineClient.connect(running.address) as client:
            assert tokens_of(client, None, LONG) == expected
            assert tokens_of(client, in_turn(client, {100: lose_rank, 300: lose_node}), LONG) == expected
            assert client.stats.recoveries >= 2
    finally:
        assert running.stop() == 0
    assert replay(["verify", "--laws", running.log_dir]) == 0
    assert children_of("NodeAgent") == []


@needs_ray
def test_streams_outlive_the_placer_and_the_engine_core(cluster: Any, tmp_path: Path) -> None:
    """With either, all that was placed ends, and is placed again."""
    settings = engine(tmp_path)
    running = start_engine(settings, find_model(settings)).wait()

    def lose_placer() -> None:
        (placer,) = (each for each in psutil.Process(running.child.pid).children() if "vnext.ray.placer" in each.cmdline())
        placer.kill()

    try:
        with SyncEngineClient.connect(running.address) as client:
            expected, core = tokens_of(client), running.child.pid
            assert tokens_of(client, {50: lose_placer, 250: lambda: os.kill(core, signal.SIGKILL)}) == expected
            assert running.child.pid != core
    finally:
        assert running.stop() == 0
    assert children_of("NodeAgent") == []


@needs_ray
def test_too_few_nodes_are_refused(cluster: Any, tmp_path: Path) -> None:
    settings = engine(tmp_path, nnodes=3, tensor_parallel_size=3)
    with pytest.raises(StartRefused) as refused:
        start_engine(settings, find_model(settings)).wait()
    assert str(refused.value).startswith(
        "--nnodes 3 needs as many nodes with 1 CPU(s) for the ranks' threads, and the Ray cluster has 2 such nodes among "
    )


@needs_ray
def test_a_cluster_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from vnext.ray import placer; placer.JOIN_TIMEOUT_S = 1; "
        "placer.join(Path(sys.argv[1]))"
    )
    environment = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": f"127.0.0.2:{held_port('127.0.0.2')}"}
    command = [sys.executable, "-c", program, tmp_path / "refusal"]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == REFUSED
    assert (tmp_path / "refusal").read_text() == (
        "executor is ray, and the Ray cluster has not answered for 1 s: see `ray status`, and whether RAY_ADDRESS names it"
    )


@needs_ray
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConnectionError("None.\nSee"), "there is no Ray cluster that this machine belongs to: run `ray start`, or set RAY_ADDRESS"),
        (RuntimeError("Version mismatch: 1 and 2.\nSee"), "the Ray cluster cannot be joined: Version mismatch: 1 and 2$"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    from vnext.ray import placer

    def init(**options: Any) -> None:
        raise error

    monkeypatch.setattr(placer.ray, "init", init)
    with pytest.raises(placer.Refused, match=f"^executor is ray, and {sentence}"):
        placer.join(tmp_path / "refusal")


@needs_ray
def test_a_node_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vnext.ray import placer

    monkeypatch.setattr(placer, "get_node_ip_address", lambda: "10.0.0.7")
    agent = placer.NodeAgent(1, b"", ("127.0.0.1", 1), b"", "0.0.9")
    ours = placer.__version__
    assert agent.refusal() == (
        f"node 10.0.0.7 of the Ray cluster has vnext {ours} and the engine's node 0.0.9: install one version on all nodes"
    )


def test_without_ray_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.runtime.processes.launch.find_spec", lambda name: None)
    settings = engine(tmp_path)
    with pytest.raises(StartRefused, match=r"the package ray is not installed: run pip install 'vnext\[ray\]'"):
        start_engine(settings, find_model(settings))


def test_the_core_imports_no_ray() -> None:
    program = "import sys, vnext, vnext.commands.serve, vnext.commands.cli, vnext.runtime.engine.process; assert 'ray' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ---- Ray Serve and Ray Data ----------------------------------------------------------------------------------------


PROMPTS = ["The module", "def main(", "Return a list of", "An exception is raised when", "import"]
SEEDED = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]
"""Each prompt's parameters, in turn."""


def params_of(place: int) -> dict[str, Any]:
    return {**SEEDED[place % 2], "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers of one engine without Ray."""
    with LLM(threads=1, log="off") as llm:
        params = [SamplingParams(**params_of(place)) for place in range(len(PROMPTS))]
        return [each.outputs[0].text for each in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def driver(cluster: Any) -> Any:
    """This process as a driver of the cluster."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    return ray


@needs_ray
def test_a_cluster_without_room_is_refused(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    from vnext.ray import placer
    from vnext.runtime.hosts.placer import PlacerSettings

    monkeypatch.setattr(placer, "ROOM_TIMEOUT_S", 0.5)
    other = placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
    assert other.wait(60)
    settings = PlacerSettings(engine=engine(tmp_path), address="", port=1, secret=b"", refusal="")
    with pytest.raises(placer.Refused, match="^the Ray cluster has had no room for 0.5 s: --nnodes 2 needs as many nodes with 1 CPU"):
        with placer.placed(settings):
            pass
    remove_placement_group(other)


def completion(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})


def post(url: str, body: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(completion(url, body), timeout=300) as response:
        return response.read()


def text_of(stream: bytes) -> str:
    """The text of a stream of several events."""
    events = [each.removeprefix("data: ") for each in stream.decode().split("\n\n") if each.startswith("data: {")]
    assert len(events) > 5
    return "".join(json.loads(each)["choices"][0]["text"] for each in events)


def turns_that_hit(url: str, salt: int) -> list[bool]:
    """Seven conversations of two turns: whether the second turn finds the first one's blocks."""
    first = [f"conversation {salt} {place} " + f"{place} and {salt} are numbers. " * 12 for place in range(7)]
    plain = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    answers = [json.loads(post(url, {"prompt": text, **plain}))["choices"][0]["text"] for text in first]
    second = [json.loads(post(url, {"prompt": text + answer, **plain})) for text, answer in zip(first, answers)]
    return [each["usage"]["prompt_tokens_details"]["cached_tokens"] >= each["usage"]["prompt_tokens"] // 2 for each in second]


@pytest.fixture(scope="module")
def served(driver: Any) -> Iterator[str]:
    """The address of two replicas behind Ray Serve."""
    from ray import serve
    from ray.serve._private import api

    from vnext.ray import app

    port = held_port("127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "HTTP_PROXY_TIMEOUT", 300)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app(replicas=2, threads=1, log="off"), route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


@needs_ray
def test_ray_serve_streams_the_same_texts_and_routes_by_caches(served: str, expected: list[str]) -> None:
    texts = [json.loads(post(served, {"prompt": each, **params_of(at)}))["choices"][0]["text"] for at, each in enumerate(PROMPTS)]
    assert texts == expected
    assert text_of(post(served, {"prompt": PROMPTS[1], "stream": True, **params_of(1)})) == expected[1]
    drawn = {"prompt": PROMPTS[1], "stream": True, "temperature": 0.9, "max_tokens": 24, "ignore_eos": True}
    with urllib.request.urlopen(completion(served, drawn), timeout=300) as response:
        text, seed = text_of(response.read()), int(response.headers["X-Vnext-Seed"])
    assert text_of(post(served, drawn | {"seed": seed})) == text
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(served, {"prompt": "a", "max_tokens": -1})
    assert any(all(turns_that_hit(served, salt)) for salt in range(20)), "no router has views of both replicas"


STREAMS = [{"prompt": f"{text} {at}", **params_of(at), "max_tokens": 200, "stream": True} for at, text in enumerate((PROMPTS * 2)[:8])]
"""Answers that take long enough for a kill."""
BEGUN = 5
"""Events of a stream that is under way."""


def replicas() -> list[psutil.Process]:
    """The processes of the replicas of LLMServer."""
    words = "ray::ServeReplica:default:LLMServer"
    return [each for each in psutil.process_iter(["cmdline"]) if words in " ".join(each.info["cmdline"] or ())]


def running_replicas() -> int:
    """How many of them are ready, in Serve's words."""
    from ray import serve

    return serve.status().applications["default"].deployments["LLMServer"].replica_states.get("RUNNING", 0)


def streamed(url: str, body: dict[str, Any], begun: threading.Semaphore) -> str:
    """The text of a stream, which releases `begun` once it is under way. It ends as it should, under one id."""
    pieces, ids = [], set()
    for chunk in BlockingClient(url).stream("/v1/completions", body):
        ids.add(chunk.id)
        pieces.append(chunk.text)
        if len(pieces) == BEGUN:
            begun.release()
    assert len(ids) == 1
    return "".join(pieces)


def all_streamed(url: str, disturb: Callable[[], None] = lambda: None) -> list[str]:
    """The texts of all streams at once; `disturb` is called when all are under way."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        streams = [pool.submit(streamed, url, each, begun) for each in STREAMS]
        assert all(begun.acquire(timeout=120) for _ in STREAMS)
        disturb()
        return [each.result() for each in streams]


@pytest.fixture(scope="module")
def undisturbed(served: str) -> list[str]:
    return all_streamed(served)


def wait_for(fulfilled: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not fulfilled():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


@needs_ray
@pytest.mark.parametrize("count", [1, 2], ids=["the process of one", "all processes of both"])
def test_streams_outlive_replicas(served: str, undisturbed: list[str], count: int) -> None:
    """They are killed under eight streams, whose texts are the undisturbed ones, and Serve starts others: where none is left, streams
    wait for these."""
    lost = replicas()[:count]
    families = [[each, *each.children(recursive=True)] for each in lost]
    assert [len(each) for each in families] == [4] * count, "each replica, its engine core, rank and API server"
    members = [member for family in families for member in family]

    def kill() -> None:
        for each in lost if count == 1 else members:
            each.kill()

    assert all_streamed(served, kill) == undisturbed
    wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in members), "processes are left")
    wait_for(lambda: len(replicas()) == 2 and running_replicas() == 2, "Serve has not started others")


@needs_ray
def test_ray_data_answers_every_row(driver: Any, expected: list[str]) -> None:
    from vnext.ray import Answers

    driver.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"place": place, "prompt": prompt, "sampling_params": params_of(place)} for place, prompt in enumerate(PROMPTS)]
    answered = driver.data.from_items(rows).map_batches(
        Answers, fn_constructor_kwargs={"threads": 1, "log": "off"}, concurrency=1, num_cpus=1, batch_size=2
    )
    found = sorted(answered.take_all(), key=lambda row: row["place"])
    assert [row["generated_text"] for row in found] == expected
    assert {row["finish_reason"] for row in found} == {"length"} and all(len(row["generated_tokens"]) == 24 for row in found)


def test_a_stage_answers_a_batch_without_ray(expected: list[str]) -> None:
    from vnext.ray import Answers

    answers = Answers(threads=1, log="off", sampling_params={"max_tokens": 24, "ignore_eos": True})
    own = np.array([dict(SEEDED[place % 2]) for place in range(len(PROMPTS))], dtype=object)
    found = answers({"prompt": np.array(PROMPTS, dtype=object), "sampling_params": own})
    assert found["generated_text"].tolist() == expected
    with pytest.raises(ValueError, match="the dataset has the columns text: give it prompt, prompt_token_ids or messages"):
        answers({"text": np.array(["a"], dtype=object)})
