"""Where each planted bug showed itself when all seeds were scanned: the order of a search, never its result.

Owns seen_before.json. A search that begins with the seed of last time does in one scenario what a scan does in some; if that
seed no longer shows the bug, the scan follows. `--rewrite`, in one process, writes where each bug has shown itself now.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path

PATH = Path(__file__).with_name("seen_before.json")
KINDS = ("found", "story", "compiled", "crash")


class SeenBefore:
    """Seeds by kind of search and name of bug. Mutable while it is written anew."""

    def __init__(self, rewrites: bool) -> None:
        """Raises ValueError where several processes would write."""
        if rewrites and "PYTEST_XDIST_WORKER" in os.environ:
            raise ValueError("--rewrite of the seeds is for one process: name the files, or say -n 0")
        self.rewrites = rewrites
        self._seeds: dict[str, dict[str, list[int]]] = json.loads(PATH.read_text()) if PATH.is_file() else {}

    def last(self, kind: str, name: str) -> list[int]:
        """What was kept of this search, [] if nothing is or it is to be made anew."""
        return [] if self.rewrites else self._seeds.get(kind, {}).get(name, [])

    def seeds(self, kind: str, name: str) -> Iterator[int]:
        """The seed of last time, then all of them in order."""
        yield from self._seeds.get(kind, {}).get(name, [])[:1]
        yield from count()

    def keep(self, kind: str, name: str, *values: int) -> None:
        """For the next time. The file is written anew only if that is asked; else a warning says that its seed shows the fault no more."""
        if not self.rewrites and self._seeds.get(kind, {}).get(name, [])[:1] != list(values[:1]):
            warnings.warn(f"{name!r} is not where {PATH.name} says: run its test with --rewrite", stacklevel=2)
        if self.rewrites:
            self._seeds.setdefault(kind, {})[name] = list(values)
            lines = [f"  {json.dumps(kind)}: " + json.dumps(self._seeds.get(kind, {}), indent=4) for kind in KINDS]
            PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
