"""The command `vnext`: hands what the options say to the program that does it, which returns the exit status.

Imports each program only when it is asked for, so that `vnext --help` needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import assert_never

from vnext.exits import INTERRUPTED
from vnext.options import ChatCommand, Command, DoctorCommand, ServeCommand, command_line, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `argv` is without the program's name, None for the process's own."""
    try:
        return run(parse(command_line() if argv is None else argv))
    except KeyboardInterrupt:  # before a program was there that says what it means
        return INTERRUPTED


def run(command: Command) -> int:
    """The program of a command, imported now."""
    match command:
        case ServeCommand():
            from vnext.serve import serve

            return serve(command)
        case ChatCommand():
            from vnext.chat.terminal import chat

            return chat(command)
        case DoctorCommand():
            from vnext.doctor import doctor

            return doctor(command)
        case _:
            assert_never(command)


if __name__ == "__main__":
    sys.exit(main())
