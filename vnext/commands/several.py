"""`vnext serve A B`: several models behind one port, each in a server of its own, started when a request names the model.

In front stands the router of `vnext router` with a shelf (gateway/shelf.py). Behind it each model has what a server with one model
has: API servers, engine, log folder and recovery. Owns these servers' processes and the options that they get.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from vnext.base.exits import REFUSED
from vnext.commands.models import of_hub, weights_in
from vnext.commands.restart import servers
from vnext.gateway.context import RouterContext
from vnext.gateway.run import run_router
from vnext.gateway.settings import RouterSettings
from vnext.gateway.shelf import Bounds, Loaded, LoadFailed, Shelf
from vnext.models.config.folder import require_checkpoint
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import gguf_in, plain_name
from vnext.models.loading.hub import found_here
from vnext.models.loading.named import MODELS, here, name_of
from vnext.options.reader import ServeCommand
from vnext.runtime.processes.cpu_limits import read
from vnext.runtime.processes.launch import named_models
from vnext.runtime.processes.proc import available_memory_bytes, usual_cache_bytes
from vnext.runtime.processes.subprocesses import Child, ChildDied, start_child
from vnext.runtime.protocol.settings import EngineSettings
from vnext.server.console import write_error, write_line
from vnext.server.settings import ServerSettings

ADDRESS = "127.0.0.1"
POLL_S = 0.1
HEALTH_S = 5.0
GRACE_S = 10.0
"""Beyond the drain time: an engine's end."""
MEMORY_SHARE = 0.9
"""Of the memory that is free at the start: for models."""
PROCESSES_BYTES = 600 * 2**20
"""Of one server, without weights and cache."""
OF_THE_FRONT = (
    "host", "port", "api_keys", "api_key_file", "key_requests_per_minute", "key_tokens_per_minute", "key_answers_max", "root_path",
    "allowed_origins", "allow_credentials", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "other_models",
)  # fmt: skip
"""Options of the server in front, which those behind it have as usual."""


def serve_several(command: ServeCommand) -> int:
    """Serve until a signal comes; returns the exit status (exits.py)."""
    models = (command.engine.model, *command.server.other_models)
    names = names_of(models, command.server.served_model_names)
    if repeated := sorted({name for each in names for name in each if sum(name in other for other in names) > 1}):
        remedy = "give each its own with --served-model-name"
        remedy = f"name it once, or {remedy}" if len({*models}) < len(models) else remedy
        write_error(f"vnext serve: {repeated[0]} names two of the models: {remedy}.")
        return REFUSED
    try:
        for model in models:
            require_folder(model, command.engine)
    except ModelError as error:
        write_error(f"vnext serve: {error}.")
        return REFUSED
    key = secrets.token_hex(16)
    settings = RouterSettings(backends=(), backend_api_key=key, http=command.server)
    usual = msgspec.structs.asdict(ServerSettings())
    own = {name: usual[name] for name in OF_THE_FRONT} | {"host": ADDRESS, "port": 0, "api_keys": (key,)}
    behind = msgspec.structs.replace(command.server, **own)
    commands = {
        each[0]: ServeCommand(
            engine=msgspec.structs.replace(command.engine, model=model),
            server=msgspec.structs.replace(behind, served_model_names=each),
            is_behind=True,
        )
        for model, each in zip(models, names)
    }
    return run_router(settings, "serve", partial(_shelf, commands, names))


def require_folder(model: str, engine: EngineSettings) -> None:
    """Raise ModelError for a model that cannot be served, as far as its name and the files of its folder say so."""
    local = found_here(model, engine.revision, named_models(engine.models_dir))
    if local is not None and local.is_dir() and gguf_in(local) is None and not engine.hf_overrides:
        require_checkpoint(local)


def names_of(models: tuple[str, ...], given: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The names of each model: the one that is given for it, or the file's or folder's and the model as it was written."""
    if given:
        return [(name,) for name in given]
    written = [plain_name(Path(model)) if Path(model).expanduser().exists() else model for model in models]
    return [(name, model) if name != model else (name,) for name, model in zip(written, models)]


def _shelf(commands: dict[str, ServeCommand], names: list[tuple[str, ...]], context: RouterContext) -> Shelf:
    http = context.settings.http
    processes = Processes(commands, context.session)
    bounds = Bounds(http.keep_alive_s, http.max_loaded_models, processes.memory_bytes)
    shelf = Shelf(names, processes, bounds, context.fleet, context.health)
    shelf.bring(shelf.models[0]).add_done_callback(_report)
    return shelf


def _report(task: asyncio.Task[None]) -> None:
    """The first model is loaded for no request, which could say why it is not."""
    if not task.cancelled() and (error := task.exception()) is not None:
        write_error(f"vnext serve: {error}")


class Processes:
    """The servers, by the first name of their model. Mutable."""

    def __init__(self, commands: dict[str, ServeCommand], session: aiohttp.ClientSession) -> None:
        self._commands, self._session = commands, session
        self._children: dict[str, tuple[Child, asyncio.Future[None]]] = {}
        self._weights: dict[str, int] = {}
        self.memory_bytes = int(free_bytes() * MEMORY_SHARE)

    async def load(self, name: str) -> Loaded:
        """As Loader.load."""
        write_line(f"vnext: loading {name} ...")
        child = start_child(f"server of {name}", "vnext.commands.one_model")
        try:
            child.send_config(msgspec.json.encode(self._commands[name]))
            while not (url := await url_when_ready(child.pid, self._session)):
                child.check_alive()
                await asyncio.sleep(POLL_S)
        except ChildDied as error:
            sentences = [line for line in error.last_lines if line.startswith("vnext serve: ")]
            why = sentences[-1].removeprefix("vnext serve: ").rstrip(".") if sentences else error.how
            raise LoadFailed(f"The model {name!r} cannot be loaded: {why}.") from error
        except asyncio.CancelledError:
            await asyncio.to_thread(child.terminate, GRACE_S)
            raise
        ended = asyncio.get_running_loop().create_future()
        if child.exit_fd is not None:
            asyncio.get_running_loop().add_reader(child.exit_fd, self._end, child.exit_fd, ended)
        self._children[name] = child, ended
        return Loaded(url, ended)

    async def unload(self, name: str) -> None:
        """As Loader.unload."""
        child, ended = self._children.pop(name)
        self._end(child.exit_fd, ended)
        await asyncio.to_thread(child.terminate, self._commands[name].server.drain_s + GRACE_S)

    def needed_bytes(self, name: str) -> int:
        """As Loader.needed_bytes: processes, cache, and the weights' files as far as they are on this machine. A cache that is
        given as a number of blocks counts for nothing, since its model's sizes are not known."""
        engine = self._commands[name].engine
        cache = engine.kv_cache_memory
        if cache is None:
            cache = 0 if engine.num_blocks_override else usual_cache_bytes(self.memory_bytes)
        self._weights[name] = self._weights.get(name) or weights_bytes(engine)
        return PROCESSES_BYTES + cache + self._weights[name]

    @staticmethod
    def _end(exit_fd: int | None, ended: asyncio.Future[None]) -> None:
        if exit_fd is not None:
            asyncio.get_running_loop().remove_reader(exit_fd)
        if not ended.done():
            ended.set_result(None)


def free_bytes() -> int:
    """The memory that this machine, or the control group of a container, has left."""
    group = read(Path("/sys/fs/cgroup/memory.max"))
    free = available_memory_bytes()
    return min(free, int(group)) if group.isdecimal() else free


def weights_bytes(engine: EngineSettings) -> int:
    """The size of a model's files of weights, 0 where they are not here yet."""
    try:
        folder = named_models(engine.models_dir)
        place = found if (found := Path(engine.model).expanduser()).exists() else here(engine.model, folder)
        if place is not None:
            return sum(each.stat().st_size for each in weights_in(place))
        if named := MODELS.get(name_of(engine.model)):
            return named.wanted.size_bytes
        return sum(each.size_on_disk for each in of_hub() if each.repo_id == engine.model.partition(":")[0])
    except (ModelError, OSError):
        return 0  # the start says what is wrong


async def url_when_ready(pid: int, session: aiohttp.ClientSession) -> str:
    """The URL of a server whose engine is ready; "" before. A server listens sooner, while its model loads."""
    url = next((each.url for each in servers() if each.pid == pid), "")
    with suppress(aiohttp.ClientError, TimeoutError):
        if url:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as answer:
                return url if answer.ok else ""
    return ""
