"""`vnext-bench`: reads the command line, and imports what measures only then (running.py): --help and what is misspelt need none of
it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vnext.base.exits import INTERRUPTED
from vnext.commands.bench.options import make_parser
from vnext.options.reader import command_line, environment
from vnext.runtime.processes.inherited import begin_process


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once; returns the exit status (exits.py). `argv` is without the program's name, None for the process's own."""
    begin_process()
    argv = command_line() if argv is None else list(argv)
    given = make_parser().given(argv, environment())
    try:
        from vnext.commands.bench.running import run
    except KeyboardInterrupt:
        print("vnext-bench: interrupted, nothing was measured", file=sys.stderr)
        return INTERRUPTED
    return run(given, argv)


if __name__ == "__main__":
    sys.exit(main())
