"""`vnext restart`: has a running server replace its engine while its clients wait: other options, another model, newer code.

Owns the list of running servers, the exchange with one of them, and what may not change. The command leaves its wish in the
server's run directory and sends a signal; the server answers there. Requests go on with the tokens they have.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.base.spelling import reason
from vnext.base.tokenizer_files import tokenizer_json
from vnext.options.reader import RestartCommand, ServeCommand, command_line, parse, state_folder
from vnext.options.settings_check import engine_settings
from vnext.runtime.processes.launch import StartRefused, find_model
from vnext.runtime.processes.replicas import RunningEngines
from vnext.runtime.processes.run_dir import state_dir
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.server.console import write_line
from vnext.text.files import CheckpointUnreadable, chat_templates

WISH, ANSWER = "restart.wish", "restart.answer"
SIGNAL = signal.SIGUSR1
POLL_S, TIMEOUT_S = 0.05, 600.0
FIXED = (
    "max_model_len", "enable_lora", "max_lora_rank", "max_restarts", "log", "data_parallel_size", "role", "prefill_engines",
    "encode_engines",
)  # fmt: skip
"""Options of the engine on which the API server and the promises to its clients depend."""


class Running(msgspec.Struct, frozen=True):
    """A server: its process, its address, its run directory, its model's names, and the model as it was given. `is_behind`: clients
    know the one in front."""

    pid: int
    url: str
    folder: str
    models: tuple[str, ...] = ()
    is_behind: bool = False
    model: str = ""


# ---- the command ---------------------------------------------------------------------------------------------------


def restart(command: RestartCommand) -> int:
    """Ask the server and wait for its answer; returns the exit status. Prints one sentence."""
    found = [each for each in servers() if command.port in (0, int(each.url.rpartition(":")[2].partition("/")[0]))]
    if len(found) != 1:
        which = ", ".join(each.url for each in found) or "none"
        print(f"vnext restart: which server? Running are {which}: name one with --port.", file=sys.stderr)
        return REFUSED
    server, folder = found[0], Path(found[0].folder)
    (folder / ANSWER).unlink(missing_ok=True)
    _write(folder / WISH, msgspec.json.encode(command.changes))
    os.kill(server.pid, SIGNAL)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (folder / ANSWER).exists():
        if time.monotonic() > deadline_s or not _is_alive(server):
            print(f"vnext restart: the server at {server.url} has not answered.", file=sys.stderr)
            return FAILED
        time.sleep(POLL_S)
    if why_not := (folder / ANSWER).read_text():
        print(f"vnext restart: {why_not.rstrip('.')}. The server goes on as before.", file=sys.stderr)
        return REFUSED
    write_line(f"vnext: the engine of {server.url} is replaced")
    return DONE


def servers() -> list[Running]:
    """The running servers of this user."""
    found, files = [], []
    with suppress(OSError):
        files = sorted(_folder().glob("*.json"))
    for file in files:
        with suppress(OSError, msgspec.MsgspecError):
            server = msgspec.json.decode(file.read_bytes(), type=Running)
            if _is_alive(server):
                found.append(server)
            else:
                file.unlink()
    return found


# ---- the server ----------------------------------------------------------------------------------------------------


@contextmanager
def listed(server: Running) -> Iterator[None]:
    """This process's server is found by `servers` until the block ends. A folder that cannot be written is no reason to fail."""
    with suppress(OSError):
        file = _folder() / f"{server.pid}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, msgspec.json.encode(server))
    try:
        yield
    finally:
        with suppress(OSError):
            (_folder() / f"{server.pid}.json").unlink(missing_ok=True)


class Replacements:
    """A server's part: `ask` in a signal handler, `look` now and then. `settings`: those of the present engines, which are replaced
    one after another, so that requests move to one that is ready."""

    def __init__(self, engines: RunningEngines, settings: EngineSettings) -> None:
        self._engines, self._settings = engines, settings
        self._wanted: tuple[EngineSettings, Path] | None = None
        self._left: list[int] = []  # the present one first
        self._is_asked = self._was_ready = False

    def ask(self) -> None:
        """A signal has come."""
        self._is_asked = True

    def look(self) -> None:
        """Begin what was asked for, and answer when it is done."""
        if self._wanted is not None:
            self._go_on(*self._wanted)
        elif self._is_asked:
            self._is_asked = False
            if why_not := self._begin():
                self._answer(why_not)

    def _begin(self) -> str:
        """Begin to replace the engines; returns why they cannot be replaced."""
        try:
            after = self._changed()
            model_path = find_model(after)
            if why_not := refusal(self._settings, after, self._engines.model_path, model_path):
                return why_not
            write_line(f"vnext: replacing {self._who}; its model is {after.model or 'the demo model'}")
            self._left = self._engines.living
            self._engines.engines[self._left[0]].replace(after, model_path)
        except (SettingsError, StartRefused) as error:
            return str(error)
        except SystemExit:
            return "the command line or its file cannot be used any more"
        self._wanted, self._was_ready = (after, model_path), False
        return ""

    @property
    def _who(self) -> str:
        count = len(self._engines.engines)
        return "the engine" if count == 1 else f"{count} engines, one after another"

    def _changed(self) -> EngineSettings:
        """The settings that are asked for: with the changes of a `vnext restart`, or else those of the command line, read again.
        Raises SettingsError, and SystemExit as a start would."""
        file = self._engines.run_dir / WISH
        try:
            changes: dict[str, Any] = msgspec.json.decode(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            command = parse(command_line())
            return command.engine if isinstance(command, ServeCommand) else self._settings
        file.unlink()
        return changed(self._settings, changes)

    def _go_on(self, wanted: EngineSettings, model_path: Path) -> None:
        """Replace the next engine once clients have had the time to notice that the one before is ready."""
        number = self._left[0]
        engine = self._engines.engines[number]
        if number in self._engines.living and not engine.is_ready:
            return
        if why_not := engine.refusal if number in self._engines.living else "its engine core has ended":
            self._wanted = None
            return self._answer(why_not if len(self._engines.engines) == 1 else f"engine {number} is not replaced: {why_not}")
        if len(self._left) > 1 and not self._was_ready:
            self._was_ready = True
            return None
        self._left.pop(0)
        if not self._left:
            self._wanted, self._settings = None, wanted
            return self._answer("")
        self._was_ready = False
        return self._engines.engines[self._left[0]].replace(wanted, model_path)

    def _answer(self, why_not: str) -> None:
        write_line(f"vnext: the engine is not replaced: {why_not}" if why_not else "vnext: the engine is replaced")
        with suppress(OSError):
            _write(self._engines.run_dir / ANSWER, why_not.encode())


def changed(before: EngineSettings, changes: dict[str, Any]) -> EngineSettings:
    """The settings with some changes. Raises SettingsError."""
    usual = msgspec.structs.asdict(EngineSettings())
    given = {name: value for name, value in msgspec.structs.asdict(before).items() if value != usual[name]}
    return engine_settings(**given | changes)


def refusal(before: EngineSettings, after: EngineSettings, old: Path, new: Path) -> str:
    """Why live requests could not go on with the settings `after` and the model in the folder `new`; "" if they can."""
    if not before.max_restarts:
        return "--max-restarts is 0, so clients do not keep their requests for another engine: stop the server and start it again"
    for name in FIXED:
        if getattr(before, name) != getattr(after, name):
            return f"{name} cannot change while clients are served: stop the server and start it again"
    try:
        if chat_templates(old) != chat_templates(new):
            return f"the model in {new} has another chat template: stop the server and start it again"
        if tokenizer_json(old) != tokenizer_json(new):
            return f"the model in {new} has another tokenizer: stop the server and start it again"
    except (CheckpointUnreadable, OSError, ValueError) as error:
        return reason(error, with_file=True)
    return ""


def _folder() -> Path:
    """Raises OSError where this user has none."""
    return state_dir(f"{state_folder()}/servers").path


def _write(path: Path, data: bytes) -> None:
    """Replace a file as a whole; its owner alone can read it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.touch(mode=0o600)
    part.write_bytes(data)
    part.replace(path)


def _is_alive(server: Running) -> bool:
    try:
        os.kill(server.pid, 0)
    except OSError:
        return False
    return Path(server.folder).is_dir()
