"""The command `vnext`: parses the options and calls the program of the subcommand, which returns the exit status.

Imports a program only when its subcommand runs, so that `vnext --help` needs no torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import assert_never

from vnext.base.exits import INTERRUPTED
from vnext.base.quick_tuples import quick_tuples
from vnext.options.reader import (
    BatchCommand,
    ChatCommand,
    Command,
    DoctorCommand,
    ModelsCommand,
    ProgramCommand,
    QuantizeCommand,
    RestartCommand,
    RouterCommand,
    ServeCommand,
    command_line,
    parse,
)
from vnext.runtime.processes.inherited import begin_process
from vnext.server.console import reporting
from vnext.server.tls import without_certificates


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `argv` is without the program's name, None for the process's own."""
    begin_process()
    try:
        return run(parse(command_line() if argv is None else argv))
    except KeyboardInterrupt:  # in a program, or while it is loaded, that has nothing to say of it
        print("vnext: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(command: Command) -> int:
    """Import a command's program and run it."""
    match command:
        case ServeCommand():
            return _serve(command)
        case ChatCommand():
            from vnext.commands.chat.terminal import chat

            return reporting(f"vnext {command.word}")(chat)(command)
        case BatchCommand():
            from vnext.commands.batch import batch

            return batch(command)
        case ModelsCommand():
            from vnext.commands.models import models

            return reporting(f"vnext {command.word}")(models)(command)
        case QuantizeCommand():
            return _quantize(command)
        case RestartCommand():
            from vnext.commands.restart import restart

            return restart(command)
        case RouterCommand():
            return _route(command)
        case DoctorCommand(production=True):
            from vnext.commands.production import production

            return production(command)
        case DoctorCommand():
            from vnext.commands.doctor import doctor

            return reporting("vnext doctor")(doctor)(command)
        case ProgramCommand():
            return int(import_module(command.module).main(list(command.argv)))
        case _:
            assert_never(command)


def _serve(command: ServeCommand) -> int:
    if command.server.other_models:
        from vnext.commands.several import serve_several

        return serve_several(command)
    with quick_tuples():
        from vnext.commands.serve import serve

    return serve(command)


def _quantize(command: QuantizeCommand) -> int:
    from vnext.commands.quantize import quantize

    return reporting("vnext quantize")(quantize)(command)


def _route(command: RouterCommand) -> int:
    gc.disable()  # imported objects stay alive: collecting garbage among them takes a sixth of the import time
    with without_certificates():
        from vnext.gateway.run import run_router

    gc.freeze()
    gc.enable()
    return run_router(command.settings)


if __name__ == "__main__":
    sys.exit(main())
