"""Called: which of vnext's functions the processes of a server run while it answers, for scripts/house.py.

`folder_that_notes` makes a folder for PYTHONPATH. Each Python process that starts with it notes the functions of vnext/ that
it runs while the mark in the folder says so, and writes them into the folder when the mark says that all is over.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = f"{ROOT / 'vnext'}{os.sep}"
OFF, NOTE, WRITE = b"-", b"n", b"w"
POLL_S = 0.05


def folder_that_notes(folder: Path) -> None:
    folder.mkdir()
    (folder / "mark").write_bytes(OFF)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(ROOT / 'scripts')!r})\nfrom called import note\nnote({str(folder)!r})\n"
    )


def set_mark(folder: Path, mark: bytes) -> None:
    with (folder / "mark").open("r+b") as file:
        file.write(mark)


def called(folder: Path) -> Counter[tuple[str, str]]:
    """(file in vnext/, function) of every process -> its calls; comprehensions and lambdas belong to the function around them; a
    coroutine that goes on counts again."""
    found: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*.json"):
        for file, function, count in json.loads(path.read_text()):
            found[file, function] += count
    return found


def note(folder: str) -> None:
    """Begin to note in this process, in all of its threads, and in its forks."""
    with open(os.path.join(folder, "mark"), "rb") as file:
        mark = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    calls: Counter[CodeType] = Counter()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if mark[0] == NOTE[0] and event == "call":
            calls[frame.f_code] += 1

    def write_at_end() -> None:
        while mark[:] != WRITE:
            time.sleep(POLL_S)
        counts = [
            (code.co_filename.removeprefix(PRODUCT), code.co_qualname, count)
            for code, count in list(calls.items())
            if code.co_filename.startswith(PRODUCT) and not code.co_name.startswith("<")
        ]
        part = os.path.join(folder, f"{os.getpid()}.part")
        with open(part, "w") as file:
            json.dump(counts, file)
        os.replace(part, part.removesuffix("part") + "json")

    def begin() -> None:
        threading.Thread(target=write_at_end, daemon=True).start()

    begin()
    os.register_at_fork(after_in_child=begin)
    threading.setprofile(hook)
    sys.setprofile(hook)
