"""House: the measures of the tree, each with its goal: `python scripts/house.py [--served | --list]`.

Reads the sources alone, in seconds. With --served a server also answers one warm streamed completion, and the functions that its
processes run are counted (half a minute); --list names each, with its calls. Reports and never fails: tests/test_tidy.py holds the
bounds, with what is defined here.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from called import NOTE, WRITE, called, folder_that_notes, set_mark  # noqa: E402  (needs the path above)

LINES, FILES, SHORT_FILES, ATTRIBUTES, PARAMETERS, ANYS = 79_000, 590, 35, 15, 8, 0
SHORT_LINES = 40
EVENT, EVENT_FILES = "StepPlanned", 20
CALLED_FUNCTIONS, CALLED_FILES = 400, 90
DOCS_BYTES, BY_HAND_BYTES, PAGE_BYTES, README_LINES, CHANGELOG_BYTES = 240_000, 150_000, 16_000, 110, 4_500
MADE = re.compile(
    r"(?<=^<!-- generated: ).*?(?=^<!-- end -->$)|(?<=^```console\n).*?(?=^```$)|(?<=^<!-- table -->\n).*", re.MULTILINE | re.DOTALL
)
"""What a script or a test writes of a page: generated parts, what commands print, the table of fields."""
NAMED = 5
"""How many of those over a goal a line names."""
WAIT_S = 20
TAIL_S = 0.03
"""For what a server does behind an answer's last byte: it counts it, and sends statistics. In more time it does what the clock asks
for, too."""


class Measure(NamedTuple):
    what: str
    value: int
    goal: int
    notes: str = ""

    def __str__(self) -> str:
        mark = " " if self.value <= self.goal else ">"
        return f"{self.what:44} {self.value:8,} {mark} {self.goal:7,}{self.notes and f'   {self.notes}'}"


# ---- what the sources say ----------------------------------------------------------------------------------------


def product_files() -> list[Path]:
    return sorted((ROOT / "vnext").rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, which many measures look at."""
    return tuple(ast.walk(parsed(path)))


def attribute_counts() -> dict[str, int]:
    """Class -> how many attributes its methods assign or its body declares, for the classes whose methods assign any; the most, of
    several classes of one name. A struct, which only declares its fields, is as wide as what it describes."""
    found: dict[str, int] = {}
    for node in chain.from_iterable(map(nodes, product_files())):
        if isinstance(node, ast.ClassDef) and (assigned := set(_assigned(node))):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            declared = {field.id for field in fields if isinstance(field, ast.Name)}
            found[node.name] = max(len(assigned | declared), found.get(node.name, 0))
    return found


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for each in ast.walk(method):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name):
                if each.value.id == "self":
                    yield each.attr


def parameter_counts() -> dict[str, int]:
    """Function or Class.method -> how many parameters it has, `self` among them; the most, of several of one name."""
    found: dict[str, int] = {}
    for path in product_files():
        for name, node in _functions(parsed(path), ""):
            given = node.args
            count = len(given.posonlyargs + given.args + given.kwonlyargs) + bool(given.vararg) + bool(given.kwarg)
            found[name] = max(count, found.get(name, 0))
    return found


def _functions(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{owner}{child.name}", child
        yield from _functions(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)


def any_count() -> int:
    """How many times `Any` is said, imports apart."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for path in product_files() for node in nodes(path))


def short_files() -> list[str]:
    """The files under SHORT_LINES lines, without the `__init__.py`, which say what lives in a folder."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in product_files()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SHORT_LINES
    ]


def wrong_arrows() -> list[str]:
    """Imports of a room by one before it, which is also where a circle of rooms closes."""
    import test_tidy  # holds the order of the rooms, and imports this file

    return test_tidy.upward_arrows()


def measures() -> Iterator[Measure]:
    texts = [path.read_text() for path in product_files()]
    yield Measure("lines of Python in vnext/", sum(text.count("\n") for text in texts), LINES)
    yield Measure("files of Python in vnext/", len(texts), FILES)
    yield Measure(f"files under {SHORT_LINES} lines", len(short_files()), SHORT_FILES)
    yield widest("attributes of a class, at most", attribute_counts(), ATTRIBUTES)
    yield widest("parameters of a function, at most", parameter_counts(), PARAMETERS)
    yield Measure(f"files that name {EVENT}", sum(EVENT in text for text in texts), EVENT_FILES)
    arrows = wrong_arrows()
    yield Measure("imports of a room by one before it", len(arrows), 0, "; ".join(arrows[:NAMED]))
    yield Measure("times `Any` is said", any_count(), ANYS)
    yield Measure("files that mypy does not judge", len(unjudged_files()), 0)
    pages = [*(ROOT / "docs").glob("*.md")]
    yield Measure("bytes of docs/", sum(page.stat().st_size for page in pages), DOCS_BYTES)
    yield Measure("bytes of docs/ by hand", sum(len(by_hand(page).encode()) for page in pages), BY_HAND_BYTES)
    yield Measure("lines of README.md", (ROOT / "README.md").read_text().count("\n"), README_LINES)
    yield Measure("bytes of CHANGELOG.md", (ROOT / "CHANGELOG.md").stat().st_size, CHANGELOG_BYTES)


def by_hand(page: Path) -> str:
    """A page without what a script or a test writes of it."""
    return MADE.sub("", page.read_text())


def widest(what: str, counts: dict[str, int], goal: int) -> Measure:
    over = sorted((name for name, count in counts.items() if count > goal), key=lambda name: (-counts[name], name))
    named = ", ".join(f"{name} {counts[name]}" for name in over[:NAMED])
    return Measure(what, max(counts.values()), goal, f"{len(over)} over it: {named}" if over else "")


def unjudged_files() -> list[Path]:
    """Those in no folder of mypy.ini, and those that it leaves out."""
    config = ConfigParser()
    config.read(ROOT / "mypy.ini")
    judged = [ROOT / folder.strip() for folder in config["mypy"]["files"].split(",")]
    left_out = re.compile(config["mypy"].get("exclude", "(?!)"))
    return [
        path
        for path in product_files()
        if not any(path.is_relative_to(folder) for folder in judged) or left_out.search(path.relative_to(ROOT).as_posix())
    ]


# ---- what a server runs ------------------------------------------------------------------------------------------


def served_measures(is_listed: bool) -> Iterable[Measure]:
    with tempfile.TemporaryDirectory() as name:
        notes = Path(name, "notes")
        folder_that_notes(notes)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(notes), str(ROOT)))}
        command = [sys.executable, "-P", "-m", "vnext.commands.cli", "serve", "--port", "0", "--log-dir", str(Path(name, "log"))]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            ready = next(line for line in server.stdout if line.startswith("vnext: try"))
            url = re.search(r"http://[\d.:]+", ready)[0]
            stream(url, "warm up")
            time.sleep(TAIL_S)
            set_mark(notes, NOTE)
            stream(url, "once more")
            time.sleep(TAIL_S)
            set_mark(notes, WRITE)
            found = _written(notes)
        finally:
            server.terminate()
            server.wait(WAIT_S)
    if is_listed:
        print(*(f"{count:6} {file}: {function}" for (file, function), count in sorted(found.items())), sep="\n")
    return (
        Measure("functions of one warm streamed completion", len(found), CALLED_FUNCTIONS),
        Measure("files of one warm streamed completion", len({file for file, _ in found}), CALLED_FILES),
    )


def stream(url: str, prompt: str) -> None:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def _written(notes: Path) -> Counter[tuple[str, str]]:
    """What all processes noted, when none has written for a second."""
    deadline_s, seen = time.monotonic() + WAIT_S, -1
    while seen != (seen := len(list(notes.glob("*.json")))) or seen == 0:
        assert time.monotonic() < deadline_s, "no process wrote what it ran"
        time.sleep(1)
    return called(notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--served", action="store_true", help="also count the functions of one warm streamed completion")
    parser.add_argument("--list", action="store_true", help="list these functions, each with its calls")
    given = parser.parse_args()
    print(f"house: {'measure':37} {'today':>8}   {'goal':>7}")
    for measure in (*measures(), *(served_measures(given.list) if given.served or given.list else ())):
        print(measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
