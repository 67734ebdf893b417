"""The commands: `vnext serve`, `vnext chat`, `vnext doctor` and the others, and `vnext-bench`, on top of all rooms.

Nothing imports them but Ray's deployments, which start what a command starts.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands`.
"""

from __future__ import annotations

import sys
from importlib import import_module

from vnext.base.exits import INTERRUPTED


def vnext() -> int:
    """The command `vnext`; returns the exit status."""
    return _loaded("vnext", "vnext.commands.cli", "main")


def vnext_bench() -> int:
    """The command `vnext-bench`; returns the exit status."""
    return _loaded("vnext-bench", "vnext.commands.bench.cli", "main")


def vnext_replay() -> int:
    """The command `vnext-replay`; returns the exit status."""
    return _loaded("vnext-replay", "vnext.replay.cli.main", "process")


def _loaded(word: str, module: str, function: str) -> int:
    """Load a command and run it. Ctrl-C while it is loaded is one line, as later."""
    try:
        return int(getattr(import_module(module), function)())
    except KeyboardInterrupt:
        print(f"{word}: interrupted", file=sys.stderr)
        return INTERRUPTED
