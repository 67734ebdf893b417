"""vnext-replay: the commands on a log.

Owns exit codes and errors, and which module declares which command: 0 all is well, 1 a difference was found, 2 the input
cannot be used, 130 Ctrl-C. Every command has --json. Only the module of the command that is asked for is imported, and all
of them for --help. Imports no torch, but for exec and bisect when they run: a log is opened on any machine.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from vnext.replay.commands import INTERRUPTED, UNUSABLE, command, terminal
from vnext.replay.source import UnusableLog
from vnext.version import __version__

MODULES = {
    "cli_log": ("info", "verify", "show", "state", "req"),
    "cli_compare": ("stat", "slow", "cache", "diff", "ranks"),
    "cli_exec": ("exec", "bisect"),
    "cli_files": ("redact", "cut", "merge", "convert"),
    "cli_ui": ("ui",),
    "shrinking": ("shrink",),
    "to_test": ("to-test",),
    "trace": ("trace",),
    "fork": ("fork",),
    "what_if": ("what-if",),
    "watch": ("watch",),
}
"""What declares each command, in the order of --help."""


def process() -> int:
    """`main` as a process of its own: what was imported lives as long as it, so no collector looks at that again, and nobody
    takes it apart at the end."""
    gc.freeze()
    code = main()
    gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse exits with 2 by itself on wrong arguments."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parser(next(iter(given), "")).parse_args(given)
    try:
        return arguments.run(arguments, terminal())
    except UnusableLog as error:
        terminal(stderr=True).print(f"vnext-replay: {error}", soft_wrap=True)
        return UNUSABLE
    except KeyboardInterrupt:
        terminal(stderr=True).print("vnext-replay: interrupted")
        return INTERRUPTED
    except MemoryError:
        terminal(stderr=True).print("vnext-replay: there is not enough memory for this log", soft_wrap=True)
        return UNUSABLE


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence; the page of usage only when asked for."""

    def error(self, message: str) -> NoReturn:
        self.exit(UNUSABLE, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def parser(asked: str = "") -> argparse.ArgumentParser:
    """The command line, with the command that is `asked` for and its neighbours, or with all if that is none."""
    top = Parser(
        prog="vnext-replay",
        description="Read, verify and explain the log of an engine.",
        epilog="Exit codes: 0 all is well, 1 the log differs or is damaged, 2 there is nothing to work with.",
    )
    top.add_argument("--version", action="version", version=f"vnext-replay {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in [name for name, declared in MODULES.items() if asked in declared] or MODULES:
        found = import_module(f"vnext.replay.{module}")
        if hasattr(found, "add"):
            found.add(commands)
        else:
            found.add_command(partial(command, commands))
    return top
