"""A server behind that of `vnext serve A B`: `python -m vnext.commands.one_model`, a child that first receives its ServeCommand."""

from __future__ import annotations

import sys

import msgspec

from vnext.commands.serve import serve
from vnext.options.reader import ServeCommand
from vnext.runtime.processes.subprocesses import enter_child


def main() -> int:
    """Returns the exit status."""
    return serve(msgspec.json.decode(enter_child(), type=ServeCommand))


if __name__ == "__main__":
    sys.exit(main())
