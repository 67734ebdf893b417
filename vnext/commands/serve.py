"""`vnext serve`: starts engines and API servers, waits, and ends them in the right order.

Owns the lifetime of engines and API servers and the signals of this process. An API server that ends after the start is started
again (api_servers.py), as the engine's supervisor starts an engine core. On the first SIGINT or SIGTERM the API server refuses new
requests and finishes the live ones within its drain time; on the second it stops at once. Then the engine ends with a
complete log.
"""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vnext.api.generation_config import sampling_defaults
from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.base.version import __version__
from vnext.commands.api_servers import ApiServers
from vnext.commands.ready_lines import print_ready, say_unused, url_of
from vnext.commands.restart import SIGNAL, Replacements, Running, listed
from vnext.options.reader import ServeCommand
from vnext.runtime.processes.launch import StartFailed, StartRefused, find_model
from vnext.runtime.processes.readable import readable
from vnext.runtime.processes.replicas import RunningEngines, start_engines
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.runtime.protocol.adapter_files import adapter_files, module_of
from vnext.runtime.protocol.log_lines import begin
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import reads_generation_config
from vnext.server.console import say_who_comes_in, write_error, write_line
from vnext.server.settings import ServerSettings
from vnext.server.tls import AddressUnusable, TlsUnusable, bind, tls_context

POLL_S = 0.5
STARTING_POLL_S = 0.01


def serve(command: ServeCommand) -> int:
    """Serve until a signal comes; returns the exit status (exits.py). For every status but 0, it prints one sentence on stderr."""
    begin("launcher", command.engine.log_format, "warning", "%(levelname)s %(name)s: %(message)s")
    if command.engine.node_rank > 0:
        return int(importlib.import_module("vnext.commands.node").serve_node(command.engine))
    write_line(f"vnext {__version__}: starting {command.engine.model or 'the demo model'} ...")
    say_who_comes_in(command.server)
    try:
        with _terminate_as_interrupt():
            engines, edges = start(command)
    except (StartFailed, ChildDied) as error:
        return fail(error)
    except KeyboardInterrupt:
        write_line("vnext: stopped")
        return DONE
    try:
        say_unused(command.engine, engines.ready.environment)
        return _serve_engines(engines, edges, Replacements(engines, command.engine), command)
    finally:
        engines.stop()
        write_line("vnext: stopped")


def start(command: ServeCommand) -> tuple[RunningEngines, ApiServers]:
    """Start all processes. The API servers get ready while the model loads.

    Raises StartFailed, ChildDied or KeyboardInterrupt, and then leaves no process behind.
    """
    listener = _listener(command.server)
    edges = ApiServers(listener, command.server.api_server_count, command.engine.max_restarts)
    starting = None
    try:
        _check_certificate(command.server)
        model_path = find_model(command.engine)
        names = command.server.served_model_names or usual_names(command.engine.model, model_path)
        _check_adapters(command, names)
        defaults = sampling_defaults(model_path, reads_generation_config(command.engine))
        starting = start_engines(command.engine, model_path)
        edges.begin()
        settings = msgspec.structs.replace(
            command.server,
            port=listener.getsockname()[1],
            served_model_names=names,
            client_secret=secrets.token_hex(16),
            engine_address=starting.addresses[0], other_engines=starting.addresses[1:],
            data_parallel_policy=command.engine.data_parallel_policy,
            roles=command.engine.roles, role=command.engine.role,
            takes_tickets=command.engine.role in ("prefill", "decode") and bool(command.engine.cluster_secret_file),
            model_path=str(model_path),
            max_lora_rank=command.engine.max_lora_rank,
            log_format=command.engine.log_format,
            log_dir=starting.log_dirs[0] if command.server.show_log else "",
            sampling_defaults=defaults,
            shared_dir=str(starting.run_dir),
            connect_timeout_s=None,
        )  # fmt: skip
        edges.configure(settings)
        return starting.wait(beside=edges.children), edges
    except BaseException:
        if starting is not None:
            starting.abandon()
        edges.end()
        raise


def usual_names(model: str, folder: Path) -> tuple[str, ...]:
    """The names by which requests may call `model`, found in `folder`: for a folder its name and `model` itself, for a hub id
    `model` alone."""
    name = os.path.basename(os.path.abspath(folder))
    if not model or Path(model).expanduser() == folder or Path(model).is_dir():
        return (name, model) if model not in ("", name) else (name,)
    return (model,)  # its folder in the hub's cache has an internal name


def _serve_engines(engines: RunningEngines, edges: ApiServers, replacements: Replacements, command: ServeCommand) -> int:
    names, url, model = edges.settings.served_model_names, url_of(edges.settings), command.engine.model
    model = os.path.abspath(found) if model and (found := Path(model).expanduser()).exists() else model
    server = Running(os.getpid(), url, str(engines.run_dir), names, command.is_behind, model)
    with _wake_on_signals() as wake, _asked_by_signals(replacements), listed(server):
        try:
            if _wait_until_healthy(engines, edges, wake):
                print_ready(engines, edges.settings, command.is_behind)
                while not _wait(engines, edges, wake, edges.wait_s(POLL_S)):
                    replacements.look()
                    edges.look()
            return DONE
        except ChildDied as error:
            return fail(error, engines.log_dir)
        finally:
            edges.drain(wake)


def _wait_until_healthy(engines: RunningEngines, edges: ApiServers, wake: int) -> bool:
    """Wait until the API servers answer (True) or a signal comes first (False). Raises ChildDied."""
    while not edges.is_healthy():
        if _wait(engines, edges, wake, STARTING_POLL_S):
            return False
        edges.check_alive()
    return True


def _wait(engines: RunningEngines, edges: ApiServers, wake: int, timeout_s: float) -> bool:
    """Wait for a signal (True), or for the timeout or the end of an API server or an engine (False). Raises ChildDied when the
    last engine has ended."""
    if wake in readable((wake, *edges.exit_fds, *engines.end_fds), timeout_s):
        os.read(wake, 1)
        return True
    engines.check_alive()
    return False


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


def _listener(settings: ServerSettings) -> socket.socket:
    """A socket at the wanted port, or at a free one for 0. Raises StartRefused early, before a model loads."""
    try:
        return bind(settings.host, settings.port)
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
