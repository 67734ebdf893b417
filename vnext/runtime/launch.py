"""Launch: from settings to a running engine core process, and its end.

Owns the choice of the model folder, the run directory with its sockets, and the log directory of this start. The engine
core is always a process of its own; what runs inside it is the executor's business.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import zmq

from vnext.models.errors import ModelError
from vnext.models.hub import resolve
from vnext.runtime.children import Child, start_child
from vnext.runtime.core_main import CoreSettings
from vnext.runtime.messages import EngineDied, EngineReady, Goodbye, Hello, encoder, engine_decoder
from vnext.runtime.settings import EngineSettings, SettingsError

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"
POLL_MS = 100
STOP_GRACE_S = 10.0
GOODBYE_LINGER_MS = 200


class StartFailed(Exception):
    """The engine could not start: one sentence with the value and the remedy."""


class RunningEngine:
    """An engine core process that is ready. `address` is for EngineClient.connect; `log_dir` is "" when the log is off."""

    def __init__(self, child: Child, address: str, run_dir: Path, model_path: Path, ready: EngineReady) -> None:
        self.child = child
        self.address = address
        self.model_path = model_path
        self.ready = ready
        self.log_dir = ready.log_dir
        self._run_dir = run_dir

    def check_alive(self) -> None:
        """Raise ChildDied when the engine core has ended."""
        self.child.check_alive()

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Ask the engine core to end, wait, then kill; returns its return code. Idempotent."""
        returncode = self.child.terminate(grace_s)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        return returncode


def launch_engine(settings: EngineSettings) -> RunningEngine:
    """Start an engine and wait until it is ready. Raises StartFailed."""
    try:
        check_settings(settings)
        model_path = resolve(settings.model) if settings.model else DEMO_MODEL
    except (SettingsError, ModelError) as error:
        raise StartFailed(str(error)) from error
    run_dir = Path(tempfile.mkdtemp(prefix="vnext-"))
    core = CoreSettings(
        engine=settings,
        model_path=str(model_path),
        device="cpu",
        address=f"ipc://{run_dir}/engine",
        run_dir=str(run_dir),
        log_dir="" if settings.log == "off" else str(log_directory(settings)),
    )
    child = start_child("engine core", "vnext.runtime.core_main")
    try:
        child.send_config(encoder.encode(core))
        ready = await_ready(child, core.address)
    except BaseException:
        child.terminate(STOP_GRACE_S)
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return RunningEngine(child, core.address, run_dir, model_path, ready)


def check_settings(settings: EngineSettings) -> None:
    """Refuse what no model could make right. Raises SettingsError."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "digest_interval"):
        if getattr(settings, name) < 1:
            raise SettingsError(f"{option_of(name)} is {getattr(settings, name)}: it must be at least 1")
    for name in ("max_model_len", "num_blocks_override", "kv_cache_memory", "threads"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise SettingsError(f"{option_of(name)} is {value}: it must be at least 1")
    if settings.long_prefill_token_threshold < 0:
        raise SettingsError(
            f"--long-prefill-token-threshold is {settings.long_prefill_token_threshold}: it must be 0 (off) or more"
        )
    if settings.executor == "inproc" and settings.tensor_parallel_size > 1:
        raise SettingsError(
            f"--tensor-parallel-size is {settings.tensor_parallel_size} and the inproc executor runs one rank: "
            "use --executor mp"
        )


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def log_directory(settings: EngineSettings) -> Path:
    """This start's own folder below the parent that the settings name."""
    parent = Path(settings.log_dir).expanduser() if settings.log_dir else Path.home() / ".local/state/vnext/logs"
    return (parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.time_ns() % 10**6:06d}").absolute()


def await_ready(child: Child, address: str) -> EngineReady:
    """Say hello until the engine core answers. Raises StartFailed with its sentence."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, GOODBYE_LINGER_MS)
        socket.connect(address)
        socket.send(encoder.encode(Hello()))
        while not socket.poll(POLL_MS):
            child.check_alive()
        message = engine_decoder.decode(socket.recv())
        socket.send(encoder.encode(Goodbye()))
    if isinstance(message, EngineDied):
        raise StartFailed(message.message)
    assert isinstance(message, EngineReady), "an engine core answers a hello with one of two"
    return message
