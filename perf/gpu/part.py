"""One part in a process of its own: `python -m perf.gpu.part NAME RESULT.json [--dry-run]`.

Owns the names of the parts and that whatever happens in one is told in its result: a part that dies without a result was
killed or crashed, and the check says so.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from perf.gpu.report import FAILED, Report, write

NAMES = ("build", "kernels", "numba", "engine", "ipc", "sanitize", "bench")


def part(name: str) -> Callable[[bool, Path], Report]:
    """A part's function, imported when it is asked for."""
    if name == "build":
        from perf.gpu.build import run
    elif name == "bench":
        from perf.gpu.bench import run
    else:
        from perf.gpu import checks

        return getattr(checks, name)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("result", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vnext-gpu-") as folder:
        try:
            report = part(options.name)(options.dry_run, Path(folder))
        except Exception as error:  # the boundary: the next part must be told of this one, whatever it was
            traceback.print_exc()
            said = str(error).splitlines() or [""]
            report = Report(FAILED, f"{type(error).__name__}: {said[0]}")
        write(report, options.result)


if __name__ == "__main__":
    main()
