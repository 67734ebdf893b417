"""Launch: from settings to a running engine core process, and its end.

Owns the choice of the model folder, the run directory with its sockets, and the log directory of this start. The engine core is
always a separate process; the executor decides what runs inside it. Modules that talk to the core are imported after it has
been started, so the start does not wait for them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vnext.base import compiled
from vnext.base.spelling import reason
from vnext.models.config.folder import require_checkpoint
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import gguf_in
from vnext.models.loading.hub import resolve
from vnext.models.loading.overlay import Overrides, gguf_folder, hold, lacks_tokenizer, overlay
from vnext.models.outside import use_file
from vnext.models.registry import IMPLEMENTATION
from vnext.runtime.processes.rank_processes import start_core
from vnext.runtime.processes.run_dir import RunDir, shared_twin, state_dir
from vnext.runtime.processes.subprocesses import Child, check_alive, signals_held
from vnext.runtime.processes.supervisor import Supervisor
from vnext.runtime.processes.thread_plan import why_not
from vnext.runtime.protocol.settings import OFF, CoreSettings, EngineSettings
from vnext.runtime.protocol.speculation import speculation_of

if TYPE_CHECKING:
    from vnext.runtime.protocol.messages import EngineReady

log = logging.getLogger(__name__)
OVERLAYS = "~/.local/state/vnext/checkpoints"
GGUF_FOLDERS = "~/.local/state/vnext/gguf"
MODELS = "~/.local/share/vnext/models"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model"
LOGS = "~/.local/state/vnext/logs"
POLL_MS = 100
STOP_GRACE_S = 10.0
GOODBYE_LINGER_MS = 200


class StartFailed(Exception):
    """The engine could not start: one sentence with the value and the remedy."""


class StartRefused(StartFailed):
    """The engine could not start because of its input (a model, a setting, a folder); nothing else has failed."""


class RunningEngine:
    """An engine that is ready; an engine core that ends is followed by another one (supervisor.py). `address` is for
    EngineClient.connect. `end_fd` becomes readable when no engine core follows any more. `ready` is what the first one reported."""

    def __init__(self, child: Child, core: CoreSettings, run_dir: RunDir, ready: EngineReady) -> None:
        self.address = core.address
        self.model_path = Path(core.model_path)
        self.ready = ready
        self._run_dir = run_dir
        pages = msgspec.structs.replace(core.engine, num_blocks_override=ready.config.page_count)
        later = msgspec.structs.replace(core, engine=pages)  # as much room as the requests were promised
        self._supervisor = Supervisor(child, later, lambda: _own_folder(_log_parent(core.engine, core.replica)))
        self.end_fd = self._supervisor.end_fd

    @property
    def child(self) -> Child:
        """The engine core's process, at present."""
        return self._supervisor.child

    @property
    def log_dir(self) -> str:
        """The folder of the present engine core's log, "" when the log is off."""
        return self._supervisor.core.log_dir

    def check_alive(self) -> None:
        """Raise ChildDied when the engine core has ended and none follows."""
        if self._supervisor.end is not None:
            raise self._supervisor.end

    @property
    def run_dir(self) -> Path:
        return self._run_dir.path

    @property
    def is_ready(self) -> bool:
        """Whether the present engine core is ready."""
        return self._supervisor.is_ready

    @property
    def refusal(self) -> str:
        """Why the last `replace` was undone, "" if it was not."""
        return self._supervisor.refusal

    def replace(self, settings: EngineSettings, model_path: Path) -> None:
        """Have an engine core with other settings take over, which `is_ready` and `refusal` tell of. Raises StartRefused."""
        draft_path = find_draft_model(settings)
        core = msgspec.structs.replace(self._supervisor.core, engine=settings, model_path=str(model_path), draft_path=draft_path)
        self._supervisor.replace(of_role(core))

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Ask the engine core to end, wait, then kill; returns its return code. Idempotent."""
        returncode = self._supervisor.stop(grace_s)
        self._run_dir.remove()
        return returncode


class StartingEngine:
    """An engine core process that is starting: `wait` for it once, or `abandon` it. `address` and `log_dir` are final."""

    def __init__(self, child: Child, core: CoreSettings, run_dir: RunDir) -> None:
        self._child = child
        self._core = core
        self._run_dir = run_dir
        self.address = core.address
        self.log_dir = core.log_dir
        self.run_dir, self.inputs_dir = run_dir.path, core.inputs_dir

    def send_config(self) -> None:
        """Hand over the settings. Raises ChildDied."""
        self._child.send_config(msgspec.msgpack.encode(self._core))

    def wait(self, beside: Sequence[Child] = ()) -> RunningEngine:
        """The engine once it is ready. Raises StartFailed or ChildDied, also when a child `beside` it dies; then nothing of
        the engine is left behind."""
        try:
            ready = await_ready([self._child, *beside], self._core.address)
        except BaseException:
            self.abandon()
            raise
        return RunningEngine(self._child, self._core, self._run_dir, ready)

    def abandon(self) -> None:
        """End all that has been started."""
        self._child.terminate(STOP_GRACE_S)
        self._run_dir.remove()


def of_role(core: CoreSettings) -> CoreSettings:
    """The settings of an engine core of its role: one that encodes inputs for others has nothing that only answers need, and no
    hits, which compute nothing."""
    if core.role != "encode":
        return core
    unused = dict.fromkeys(("enable_lora", "enable_guidance", "enable_return_routed_experts", "enable_expert_load"), False)
    none = {"speculative_config": "", "sampler": "", "packed_weights_dir": OFF, "enable_prefix_caching": False, "input_tokens": 0}
    return msgspec.structs.replace(core, engine=msgspec.structs.replace(core.engine, **none, **unused), draft_path="")


def start_engine(
    settings: EngineSettings, model_path: Path, replica: int = 0, inputs_dir: str = "", child: Child | None = None
) -> StartingEngine:
    """Start an engine of the model that `find_model` found, the one of this number among `data_parallel_size`, `inputs_dir` as in
    CoreSettings. `child`: its core, of `start_cores`. Returns at once, so that the caller can do other work meanwhile.

    Raises StartRefused if no log can be written, there is no such draft model, or the machine has too few processors or no such
    node, StaleModule if the engine's processes would raise it.
    """
    if settings.node_rank:
        raise StartRefused(f"node_rank is {settings.node_rank}: an engine runs on host 0; on the others run `vnext serve`")
    if reason := why_not(settings.threads, settings.data_parallel_size * settings.local_world_size, settings.numa):
        raise StartRefused(reason)
    if settings.executor == "ray" and find_spec("ray") is None:
        raise StartRefused("executor is ray, and the package ray is not installed: run pip install 'vnext[ray]'")
    draft_path = find_draft_model(settings)
    log_dir = log_directory(settings, replica)
    run_dir = RunDir()
    core = of_role(CoreSettings(
        engine=settings,
        model_path=str(model_path),
        address=f"ipc://{run_dir.path}/engine",
        run_dir=str(run_dir.path),
        log_dir=log_dir,
        draft_path=draft_path,
        replica=replica,
        inputs_dir=inputs_dir or (str(shared_twin(run_dir.path)) if settings.encode_engines or settings.role != "both" else ""),
    ))  # fmt: skip
    starting = StartingEngine(child or start_core(core.name, core.engine), core, run_dir)
    try:
        compiled.check()
        if compiled.absent and replica == 0:
            log.warning("%s", compiled.lacking())
        starting.send_config()
    except BaseException:
        starting.abandon()
        raise
    return starting


def find_model(settings: EngineSettings) -> Path:
    """The folder of the settings' model, downloaded if necessary and checked as strictly as a rank would check it.

    Raises StartRefused for a folder without a model, before any process loads it.
    """
    try:
        if settings.family:
            use_file(Path(settings.family).absolute())
        has_weights = settings.load_format != "dummy"
        own = model_folder(settings.model, settings.revision, settings.models_dir, has_weights, settings.mmproj)
        folder = overlay(own, overrides_of(settings), _own_folders(OVERLAYS))
        require_checkpoint(folder)
    except ModelError as error:
        raise StartRefused(str(error)) from error
    if not settings.tokenizer and settings.load_format != "dummy" and lacks_tokenizer(own):
        log.warning("%s has no tokenizer: send token ids; the text of an answer is its token ids in decimal.", own)
    if folder != own:
        hold(folder)
    return folder


def _own_folders(usual: str) -> Path:
    """Where folders stand that are made of checkpoints. Raises ModelError where no such place can be had."""
    try:
        return state_dir(usual).path
    except OSError as error:
        raise ModelError(f"the folder {error.filename} for checkpoints cannot be used ({error.strerror}); remove it") from error


def find_draft_model(settings: EngineSettings) -> str:
    """The folder of the draft model or head, downloaded if necessary; "" without one. Raises StartRefused."""
    speculation = speculation_of(settings.speculative_config)
    if speculation is None or not speculation.model:
        return ""
    try:
        folder = model_folder(speculation.model, models_dir=settings.models_dir)
        require_checkpoint(folder, is_head=speculation.method == "eagle3")
    except ModelError as error:
        raise StartRefused(f"speculative_config: {error}") from error
    return str(folder)


def model_folder(model: str, revision: str = "", models_dir: str = "", with_weights: bool = True, mmproj: str = "") -> Path:
    """The folder of the model that a user names, "" for the demo model. `mmproj`: the tower of a GGUF file, "" for that beside it.
    Raises ModelError."""
    found = resolve(model, revision, with_weights, named_models(models_dir)) if model else DEMO_MODEL
    file = gguf_in(found) if found.is_dir() else found
    if file is None:
        if mmproj:
            raise ModelError(f"{found} is no GGUF model, and has its tower among its own weights: leave --mmproj out")
        return found
    hold(made := gguf_folder(file, _own_folders(GGUF_FOLDERS), Path(mmproj).expanduser().absolute() if mmproj else None))
    return made


def named_models(models_dir: str) -> Path:
    """The folder of models by name that the settings name. Raises ModelError."""
    return Path(models_dir).expanduser().absolute() if models_dir else _own_folders(MODELS)


def overrides_of(settings: EngineSettings) -> Overrides:
    """What the settings replace in a checkpoint. Raises ModelError."""
    config, generation = (json.loads(text or "{}") for text in (settings.hf_overrides, settings.override_generation_config))
    if settings.model_impl != "auto":
        config |= {IMPLEMENTATION: settings.model_impl}
    tokenizer = model_folder(settings.tokenizer, "", settings.models_dir, with_weights=False) if settings.tokenizer else None
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise ModelError(f"{tokenizer} has no tokenizer.json; give --tokenizer a folder or a hub id that has one")
    return Overrides(config, generation, settings.generation_config == "auto", tokenizer, settings.load_format == "dummy")


def log_directory(settings: EngineSettings, replica: int = 0) -> str:
    """The path of this start's own folder, which the engine core makes; its parent, named by the settings and, if there are
    several, by the replica, is made now. "" when the log is off. Raises StartRefused if that is impossible, so that no model is
    loaded in vain."""
    if settings.log == OFF:
        return ""
    parent, elsewhere = Path(settings.log_dir or LOGS), ""
    try:
        parent, elsewhere = _log_place(settings, replica)
        parent.mkdir(parents=True, exist_ok=True)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, RuntimeError) as error:
        raise StartRefused(
            f"the log directory {parent} cannot be written ({reason(error)}): choose another one with --log-dir, or switch the log "
            "off with --log off"
        ) from error
    if elsewhere and replica == 0:
        log.warning("The log is kept in %s: %s. Name a folder for it with --log-dir.", parent, elsewhere)
    return _own_folder(parent)


def _log_parent(settings: EngineSettings, replica: int) -> Path | None:
    """The folder in which starts have folders of their own; None when the log is off."""
    return None if settings.log == OFF else _log_place(settings, replica)[0]


def _log_place(settings: EngineSettings, replica: int) -> tuple[Path, str]:
    """The folder in which starts have folders of their own, and why it is not the usual one. Where the log is required it stays
    where it is looked for. Raises RuntimeError for a user without a home, OSError where there is no other place."""
    if settings.log_dir or settings.log_required:
        parent, elsewhere = Path(settings.log_dir or LOGS).expanduser(), ""
    else:
        parent, elsewhere = state_dir(LOGS)
    return parent / f"engine-{replica}" if settings.data_parallel_size > 1 else parent, elsewhere


def _own_folder(parent: Path | None) -> str:
    """A start's own folder, "" when the log is off; names sort by time. Whether it can be made is for the engine core to see."""
    if parent is None:
        return ""
    seconds, ns = divmod(time.time_ns(), 10**9)
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{ns // 1000:06d}-{os.getpid()}"
    return str((parent / name).absolute())


def await_ready(children: Sequence[Child], address: str) -> EngineReady:
    """Say hello until the engine core answers. Raises StartFailed with its sentence, ChildDied for one of `children`."""
    import zmq

    from vnext.runtime.protocol.engine_messages import engine_decoder
    from vnext.runtime.protocol.messages import EngineDied, EngineReady, Goodbye, Hello, encoder

    with zmq.Context() as context:  # closes its sockets, and would wait for ever for a half-made one
        with signals_held():
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, GOODBYE_LINGER_MS)
            socket.connect(address)
            socket.send(encoder.encode(Hello()))
        while not socket.poll(POLL_MS):
            check_alive(children)
        message = engine_decoder.decode(socket.recv())
        socket.send(encoder.encode(Goodbye()))
    if isinstance(message, EngineDied):
        raise (StartRefused if message.refused else StartFailed)(message.message)
    assert isinstance(message, EngineReady), "an engine core answers a hello with one of two"
    return message
