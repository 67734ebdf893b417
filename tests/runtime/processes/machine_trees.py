"""Recorded machines: the files of /sys and /proc that say where a process may compute, as each kind of machine has them.

A machine is a file of `machines/`: lines "PATH = TEXT", where [0-3] in a path stands for each number, {n} in the text for that number
and {n+4} for a sum. "\\n" ends a line of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

MACHINES = Path(__file__).parent / "machines"
NUMBERS, SUM = re.compile(r"\[(\d+)-(\d+)\]"), re.compile(r"\{n(?:([+-])(\d+))?\}")


def machine_tree(name: str, folder: Path, **changes: str) -> Path:
    """A folder with the machine's files. `changes`: paths, with "__" for "/", and what they hold instead."""
    lines = [line for line in (MACHINES / f"{name}.txt").read_text().splitlines() if line and not line.startswith("#")]
    for line in lines + [f"{path.replace('__', '/')} = {text}" for path, text in changes.items()]:
        for path, text in each_file(line.partition(" =")[0], line.partition(" =")[2].removeprefix(" ")):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.replace("\\n", "\n") + "\n")
    return folder


def each_file(path: str, text: str) -> Iterator[tuple[str, str]]:
    found = NUMBERS.search(path)
    if found is None:
        yield path, text
        return
    for n in range(int(found[1]), int(found[2]) + 1):
        filled = SUM.sub(lambda match, n=n: str(n + int(f"{match[1] or '+'}{match[2] or 0}")), text)
        yield path.replace(found[0], str(n)), filled
