"""`vnext serve`: starts an engine and its API server, waits, and ends them in the right order.

Owns the lifetime of the two processes and the signals of this one. An API server that has answered once and then ends is started
again, as the engine's supervisor starts an engine core. On the first SIGINT or SIGTERM the API server refuses new
requests and finishes the live ones within its drain time; on the second it stops at once. Then the engine ends with a
complete log.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from vnext.exits import DONE, FAILED, REFUSED
from vnext.generation_config import sampling_defaults
from vnext.lora_request import adapter_files, module_of
from vnext.options.reader import ServeCommand
from vnext.options.settings_check import gpu_settings_given
from vnext.options.table import flags_of
from vnext.restart import SIGNAL, Replacements, listed
from vnext.runtime.log_lines import begin
from vnext.runtime.processes.launch import RunningEngine, StartFailed, StartRefused, find_model, start_engine
from vnext.runtime.processes.subprocesses import Child, ChildDied, start_child
from vnext.runtime.processes.supervisor import WELL_S, Restarts
from vnext.runtime.settings import EngineSettings, reads_generation_config
from vnext.sampling_params import InvalidRequest
from vnext.server.address import AddressUnusable, bind
from vnext.server.console import write_error, write_line
from vnext.server.example import curl_line
from vnext.server.settings import ServerSettings
from vnext.server.tls import TlsUnusable, tls_context, unverified_context
from vnext.state.config import SchedulerConfig
from vnext.text.files import CheckpointUnreadable, chat_template
from vnext.version import __version__

POLL_S = 0.5
STARTING_POLL_S = 0.01
HEALTH_TIMEOUT_S = 5.0
EDGE_GRACE_S = 5.0  # beyond the drain time: closing sockets and saying goodbye
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to listen on -> one to call


def serve(command: ServeCommand) -> int:
    """Serve until a signal comes; returns the exit status (exits.py). For every status but 0, it prints one sentence on stderr."""
    begin("launcher", command.engine.log_format, "warning", "%(levelname)s %(name)s: %(message)s")
    write_line(f"vnext {__version__}: starting {command.engine.model or 'the demo model'} ...")
    try:
        with _terminate_as_interrupt():
            engine, edge, settings = start(command)
    except (StartFailed, ChildDied) as error:
        return fail(error)
    except KeyboardInterrupt:
        write_line("vnext: stopped")
        return DONE
    try:
        say_unused(command.engine, engine.ready.environment)
        served = ApiServer(edge, settings, command.engine.max_restarts)
        return _serve_engine(engine, served, Replacements(engine, command.engine))
    finally:
        engine.stop()
        write_line("vnext: stopped")


def start(command: ServeCommand) -> tuple[RunningEngine, Child, ServerSettings]:
    """Start both processes; returns them with the API server's settings. The API server gets ready while the model loads.

    Raises StartFailed, ChildDied or KeyboardInterrupt, and then leaves no process behind.
    """
    port = _usable_port(command.server)
    _check_certificate(command.server)
    model_path = find_model(command.engine)
    names = command.server.served_model_names or usual_names(command.engine.model, model_path)
    _check_adapters(command, names)
    defaults = sampling_defaults(model_path, reads_generation_config(command.engine))
    starting = start_engine(command.engine, model_path)
    edge = None
    try:
        edge = start_child("API server", "vnext.server")
        settings = msgspec.structs.replace(
            command.server,
            port=port,
            served_model_names=names,
            engine_address=starting.address,
            model_path=str(model_path),
            max_lora_rank=command.engine.max_lora_rank,
            log_format=command.engine.log_format,
            log_dir=starting.log_dir if command.server.show_log else "",
            sampling_defaults=defaults,
            connect_timeout_s=None,
        )
        edge.send_config(msgspec.json.encode(settings))
        importlib.import_module("http.client")  # for the calls that follow, while the processes do their own imports
        return starting.wait(beside=edge), edge, settings
    except BaseException:
        starting.abandon()
        if edge is not None:
            edge.terminate(EDGE_GRACE_S)
        raise


def usual_names(model: str, folder: Path) -> tuple[str, ...]:
    """The names by which requests may call `model`, found in `folder`: for a folder its name and `model` itself, for a hub id
    `model` alone."""
    name = os.path.basename(os.path.abspath(folder))
    if not model or Path(model).expanduser() == folder or Path(model).is_dir():
        return (name, model) if model not in ("", name) else (name,)
    return (model,)  # its folder in the hub's cache has an internal name


class ApiServer:
    """The API server's process. Mutable: another one follows the one that ends."""

    def __init__(self, child: Child, settings: ServerSettings, max_restarts: int) -> None:
        self.child = child
        self.settings = settings
        self._restarts = Restarts(max_restarts)
        self._began_s = time.monotonic()

    def wait_s(self) -> float | None:
        """None while it runs. When it has ended: how long to wait for `start_again`. Raises ChildDied if that has no point."""
        try:
            self.child.check_alive()
        except ChildDied as error:
            wait_s = self._restarts.wait_s(time.monotonic() - self._began_s > WELL_S)
            if wait_s is None or error.returncode == REFUSED:
                raise
            return wait_s
        return None

    def start_again(self) -> None:
        write_line(f"vnext: the {self.child.end_in_words} and is started again; its requests are lost")
        self.child.terminate(0.0)
        self.child, self._began_s = start_edge(self.settings), time.monotonic()


def start_edge(settings: ServerSettings) -> Child:
    """Start an API server."""
    child = start_child("API server", "vnext.server")
    with suppress(ChildDied):  # whoever watches it finds out
        child.send_config(msgspec.json.encode(settings))
    return child


def _serve_engine(engine: RunningEngine, edge: ApiServer, replacements: Replacements) -> int:
    with _wake_on_signals() as wake, _asked_by_signals(replacements), listed(_url(edge.settings), engine.run_dir):
        try:
            if _wait_until_healthy(engine, edge, wake):
                _print_ready(engine, edge.settings)
                while not _wait(engine, edge, wake, POLL_S):
                    replacements.look()
                    if (wait_s := edge.wait_s()) is None:
                        continue
                    if _is_woken(wake, wait_s):
                        break
                    edge.start_again()
            return DONE
        except ChildDied as error:
            return fail(error, engine.log_dir)
        finally:
            _end_edge(edge.child, wake, edge.settings.drain_s + EDGE_GRACE_S)


def _wait_until_healthy(engine: RunningEngine, edge: ApiServer, wake: int) -> bool:
    """Wait until the API server answers (True) or a signal comes first (False). Raises ChildDied."""
    while not is_healthy(edge.settings):
        if _wait(engine, edge, wake, STARTING_POLL_S):
            return False
        edge.child.check_alive()
    return True


def _wait(engine: RunningEngine, edge: ApiServer, wake: int, timeout_s: float | None) -> bool:
    """Wait for a signal (True), or for the timeout (None: no limit) or the API server's end (False). Raises ChildDied when the
    engine has ended."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    watched = [fd for fd in (wake, edge.child.exit_fd, engine.end_fd) if fd is not None]
    while True:
        left_s = POLL_S if deadline_s is None else min(POLL_S, max(0.0, deadline_s - time.monotonic()))
        if wake in select.select(watched, (), (), left_s)[0]:
            os.read(wake, 1)
            return True
        engine.check_alive()
        if edge.child.process.poll() is not None or (deadline_s is not None and time.monotonic() >= deadline_s):
            return False


def _is_woken(wake: int, wait_s: float) -> bool:
    """Whether a signal comes within this time."""
    return bool(select.select((wake,), (), (), wait_s)[0])


def _end_edge(edge: Child, wake: int, grace_s: float) -> None:
    """Let the API server drain; another signal ends it at once."""
    edge.process.terminate()
    if edge.wait(POLL_S) is None:
        write_line("vnext: finishing running requests; once more stops at once")
        deadline_s = time.monotonic() + grace_s
        while edge.wait(0) is None and time.monotonic() < deadline_s:
            watched = [fd for fd in (wake, edge.exit_fd) if fd is not None]
            if wake in select.select(watched, (), (), POLL_S)[0]:
                break
    edge.terminate(EDGE_GRACE_S)


# ---- signals -----------------------------------------------------------------------------------------------------


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a start as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _wake_on_signals() -> Iterator[int]:
    """A descriptor that yields one byte per SIGINT or SIGTERM; the signals have no other effect."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {
        number: signal.signal(number, lambda number, frame: os.write(writer, b"!"))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextmanager
def _asked_by_signals(replacements: Replacements) -> Iterator[None]:
    """SIGUSR1 asks for another engine, and so does SIGHUP, unless it may mean that the terminal was closed."""
    numbers = [SIGNAL] if _has_terminal() else [SIGNAL, signal.SIGHUP]
    before = {number: signal.signal(number, lambda number, frame: replacements.ask()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


# ---- what is said ------------------------------------------------------------------------------------------------


def _print_ready(engine: RunningEngine, settings: ServerSettings) -> None:
    config, environment = engine.ready.config, engine.ready.environment
    write_line(
        f"vnext: model    {engine.ready.model}: {environment['dtype']} on {_device(environment)}, "
        f"{config.max_model_len} tokens a request, {config.page_count} cache blocks of {config.block_size} tokens\n"
        f"vnext: batch    {invariance_line(environment)}\n"
        f"{_drafts_line(config)}{_adapters_line(config, settings)}"
        f"vnext: log      {engine.log_dir or 'off'}\n"
        f"{_live_line(settings)}"
        f"vnext: try      {curl_line(_url(settings), chat=_has_template(engine, settings), has_key=settings.needs_key)}\n"
        "vnext: Ctrl-C stops"
    )


def _device(environment: Mapping[str, str]) -> str:
    name = environment.get("device", "cpu")
    if name != "cpu":
        return name
    return (
        f"the CPU ({environment['kernels'].lower()}, threads: {environment['threads']} on {environment['cores']}; "
        f"{int(environment['token_bytes']) / 1e6:,.1f} MB of weights a token)"
    )


def say_unused(engine: EngineSettings, environment: Mapping[str, str]) -> None:
    """Print a line for each GPU option where --device auto chose the CPU."""
    if environment.get("device") == "cpu":
        for name in gpu_settings_given(engine):
            write_line(f"vnext: ignored: {flags_of(name)[0]} (the model is computed on the CPU, see --device)")


def invariance_line(environment: Mapping[str, str]) -> str:
    """A line on whether tokens depend on the batch, as the first rank reported."""
    holds, _, why = environment.get("batch_invariant", "no: unknown").partition(": ")
    return f"a request's tokens {'do not' if holds == 'yes' else 'may'} depend on its batch ({why})"


def _drafts_line(config: SchedulerConfig) -> str:
    drafts = config.speculation
    if drafts is None:
        return ""
    return f"vnext: drafts   {drafts.method}, up to {drafts.num_speculative_tokens} tokens of a request in a step\n"


def _adapters_line(config: SchedulerConfig, settings: ServerSettings) -> str:
    if not config.max_loras:
        return ""
    return f"vnext: adapters {len(settings.lora_modules)} named, {config.max_loras} in memory at a time\n"


def _live_line(settings: ServerSettings) -> str:
    """A line on how to watch the engine live, where the settings allow it."""
    return f"vnext: live     vnext-replay ui --live {_url(settings)}\n" if settings.show_log else ""


def _has_template(engine: RunningEngine, settings: ServerSettings) -> bool:
    try:
        return bool(settings.chat_template_path) or chat_template(engine.model_path) is not None
    except CheckpointUnreadable:
        return False


def fail(error: StartFailed | ChildDied, log_dir: str = "") -> int:
    """Print one sentence; returns the exit status. Prints nothing for a child that refused its input: its own sentence has
    already passed through to stderr."""
    if isinstance(error, ChildDied) and error.returncode == REFUSED:
        return REFUSED
    sentence = str(error).partition("; its last lines")[0].rstrip(".")
    where = f" The log is in {log_dir}." if log_dir else ""
    write_error(f"vnext serve: {sentence}.{where}")
    return REFUSED if isinstance(error, StartRefused) else FAILED


# ---- the edge's address ------------------------------------------------------------------------------------------


def _usable_port(settings: ServerSettings) -> int:
    """The port to serve on: the wanted one, or a free one for 0. Raises StartRefused early, before a model loads."""
    try:
        with bind(settings.host, settings.port) as probe:
            return probe.getsockname()[1]
    except AddressUnusable as error:
        raise StartRefused(str(error)) from error


def _check_certificate(settings: ServerSettings) -> None:
    """Raise StartRefused for files that are no certificate and key, before a model loads."""
    try:
        tls_context(settings)
    except TlsUnusable as error:
        raise StartRefused(str(error)) from error


def _check_adapters(command: ServeCommand, names: Sequence[str]) -> None:
    """Raise StartRefused for adapters that cannot be served under `names` beside the model's, before a model loads."""
    server, engine, taken = command.server, command.engine, [*names]
    if (server.lora_modules or server.lora_root) and not engine.enable_lora:
        raise StartRefused("--lora-modules and --lora-root need --enable-lora: add it, or leave them out")
    try:
        for module in map(module_of, server.lora_modules):
            if module.lora_name in taken:
                raise StartRefused(f"--lora-modules has {module.lora_name!r}, which is another model's name: choose another")
            taken.append(module.lora_name)
            adapter_files(module, engine.max_lora_rank, None)
    except InvalidRequest as error:
        raise StartRefused(error.message.rstrip(".")) from error


def _url(settings: ServerSettings) -> str:
    host = EVERYWHERE.get(settings.host, settings.host)
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}{settings.root_path}"


def is_healthy(settings: ServerSettings) -> bool:
    import http.client  # already imported, while the child processes started

    address = EVERYWHERE.get(settings.host, settings.host), settings.port
    if settings.ssl_certfile:  # whose it is does not matter here: the server is this program's own
        connection = http.client.HTTPSConnection(*address, timeout=HEALTH_TIMEOUT_S, context=unverified_context())
    else:
        connection = http.client.HTTPConnection(*address, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ssl.SSLError:  # it asks for a certificate, so it listens, which it does only once the engine is ready
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
