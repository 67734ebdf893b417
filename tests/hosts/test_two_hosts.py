"""Two "hosts" of one machine, each with its own address: the tokens are those of two ranks on one host, whatever is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.serving import eventually
from tests.run.ports import held_port
from tests.runtime.killed import heard_of, wait_until_gone
from vnext.replay.cli.main import main as replay
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.processes.launch import find_model, start_engine
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.protocol.settings import EngineSettings
from vnext.state.events import pack_tokens
from vnext.state.params import Sampling

SECRET = "a secret of both hosts"
PIPELINE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
PLAIN = {"dtype": "bfloat16", "tensor_parallel_size": 2, "threads": 1, "digest_interval": 4}


@contextmanager
def agent(secret: Path, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The second host's own command. Its address is 127.0.0.1, the first host's 127.0.0.2."""
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", "--nnodes", "2", "--node-rank", "1", "-tp", "2", *options]
    command += ["--master-addr", "127.0.0.2", "--master-port", str(port), "--cluster-secret-file", str(secret)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return path


def wishes(tokens: int) -> list[SubmitRequest]:
    return [
        SubmitRequest(
            name=f"r{at}", prompt=pack_tokens([10 + at, 11, 12] * (1 + 3 * at)),
            sampling=Sampling(seed=at, max_tokens=tokens, temperature=0.9 * (at % 2), ignore_eos=True),
        )
        for at in range(12)
    ]  # fmt: skip


def tokens_of(client: SyncEngineClient, at: dict[int, Callable[[], None]] | None = None, tokens: int = 60) -> dict[str, bytes]:
    """Generates `tokens` tokens for each request; `at[n]` is called once n tokens have come in all."""
    heard = heard_of(client.run(wishes(tokens)), at)
    assert not any(output.error for outputs in heard.values() for output in outputs)
    return {name: b"".join(output.tokens for output in outputs) for name, outputs in heard.items()}


@pytest.mark.parametrize(("alone", "shape"), [({}, {}), ({"tensor_parallel_size": 1}, PIPELINE)], ids=["tensors", "stages"])
def test_streams_outlive_a_lost_host(tmp_path: Path, secret: Path, alone: dict[str, int], shape: dict[str, int]) -> None:
    """The second host is killed while both compute, and another one comes in its place. Two stages have the bits of one process."""
    one = start_engine(settings := EngineSettings(log="off", **PLAIN | alone), find_model(settings)).wait()
    with SyncEngineClient.connect(one.address) as client:
        expected = tokens_of(client)
    one.stop()
    port, files = held_port("127.0.0.2"), os.listdir("/dev/shm")
    settings = EngineSettings(
        log_dir=str(tmp_path), nnodes=2, master_addr="127.0.0.2", master_port=port, cluster_secret_file=str(secret), **PLAIN | shape
    )
    sizes = [word for name, size in shape.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    starting = start_engine(settings, find_model(settings))
    with agent(secret, port, *sizes) as first:
        engine = starting.wait()
        again: list[object] = []

        def lose() -> None:
            first.kill()
            threading.Thread(target=lambda: again.append(agent(secret, port, *sizes)) or again[0].__enter__()).start()

        try:
            with SyncEngineClient.connect(engine.address) as client:
                assert tokens_of(client) == expected
                assert tokens_of(client, {100: lose}) == expected
                assert eventually(lambda: bool(tokens_of(client, tokens=1)) and client.stats.recoveries >= 1), "an idle engine, too"
        finally:
            assert engine.stop() == 0
            again[0].__exit__(None, None, None)
    assert replay(["verify", "--laws", engine.log_dir]) == 0
    wait_until_gone(files)
