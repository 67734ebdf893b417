"""Changed: the test files that can notice what has changed since a commit, for `scripts/test.sh --changed`.

Owns the graph of the tree. An arrow goes from a Python file to each file that it imports, anywhere in it, and to each module that
a string of it names (`python -m vnext.commands.cli`, targets of monkeypatch). A test is chosen if it reaches a changed file, or if it or a
helper that it reaches names one. What a string is put together from is not seen: at landing the whole suite runs.

    python tests/run/changed.py [COMMIT]     one path a line, "tests" for all; COMMIT is `main` if none is given
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("vnext", "tests", "scripts", "examples", "perf")
LOOSE = ("tests", "scripts", "examples")
"""Folders whose files import each other by their bare names."""
ALWAYS = ("tests/test_tidy.py", "tests/state/test_pure_rooms.py", "tests/base/test_compiled.py")
"""Tests that read the whole tree."""
EVERYTHING = (
    "setup.py", "constraints.txt", "MANIFEST.in", "scripts/_setup.sh", "scripts/test.sh", "vnext/__init__.py", "vnext/base/version.py",
    "tests/conftest.py", "tests/run/changed.py",
)  # fmt: skip
"""Files on which every test rests."""
MODULE = re.compile(r"vnext(?:\.\w+)+")


class Tree:
    """The files of a checkout by their paths in it, and the arrows between them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
        self.texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        self._arrows: dict[str, set[str]] = {}

    @cached_property
    def tests(self) -> list[str]:
        return [name for name in self.texts if re.fullmatch(r"tests/(.*/)?test_\w+\.py", name)]

    @cached_property
    def _by_bare_name(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in self.texts:
            if name.startswith(LOOSE):
                found.setdefault(PurePosixPath(name).stem, set()).add(name)
        return found

    def arrows(self, name: str) -> set[str]:
        """What a file imports or names as a module, with the folders' conftest.py of a test."""
        if name not in self._arrows:
            tree = ast.parse(self.texts[name])
            found = {file for module in modules_of(tree) for file in self._files_of(module)}
            if name in self.tests:
                folders = PurePosixPath(name).parents
                found |= {each for folder in folders if (each := f"{folder}/conftest.py") in self.texts} - {*EVERYTHING}
            self._arrows[name] = found - {name}
        return self._arrows[name]

    def _files_of(self, module: str) -> set[str]:
        """The file of `a.b.c`, or of `a.b` where c is a thing in it. Files of the folders above it are run too."""
        parts = module.split(".")
        found = {file for end in range(1, len(parts)) if (file := "/".join(parts[:end]) + "/__init__.py") in self.texts}
        for end in range(len(parts), 0, -1):
            stem = "/".join(parts[:end])
            if exact := {f"{stem}.py", f"{stem}/__init__.py"} & self.texts.keys():
                return self._light(found) | exact
        return self._by_bare_name.get(parts[0], set())

    def _light(self, packages: set[str]) -> set[str]:
        """Without packages that import on demand: who uses that names the thing itself."""
        return {name for name in packages if "def __getattr__" not in self.texts[name]}

    def reached(self, name: str) -> set[str]:
        """A file and all that arrows lead to from it."""
        found, waiting = {name}, [name]
        while waiting:
            new = self.arrows(waiting.pop()) - found
            found |= new
            waiting += new
        return found

    def chosen(self, changed: Iterable[str]) -> list[str]:
        """The test files that may notice it, ["tests"] for all of them."""
        changed = set(changed)
        if changed & set(EVERYTHING):
            return ["tests"]
        moved = {python for name in changed for python in self._stands_for(name)}
        words = [re.compile(pattern) for name in sorted(changed) for pattern in words_of(name)]
        return [test for test in self.tests if test in ALWAYS or self._notices(test, moved, words)]

    def _notices(self, test: str, moved: set[str], words: list[re.Pattern[str]]) -> bool:
        reached = self.reached(test)
        if reached & moved:
            return True
        own = (name for name in reached if name.startswith("tests/"))
        return any(word.search(self.texts[name]) for name in own for word in words)

    def _stands_for(self, name: str) -> Iterator[str]:
        """Python files that change with a file: itself; of sources in C and of data, all in the nearest folder that has any."""
        yield name
        if not name.endswith(".py") and name.startswith(FOLDERS):
            for folder in list(PurePosixPath(name).parents)[:-1]:
                if beside := [each for each in self.texts if str(PurePosixPath(each).parent) == str(folder)]:
                    yield from beside
                    return


def modules_of(tree: ast.Module) -> Iterator[str]:
    """Of every import and every string, in dotted form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from MODULE.findall(node.value)


def words_of(name: str) -> Iterator[str]:
    """Patterns by which a text names a file: by its own name, and by its top folder where that is read as a whole."""
    path = PurePosixPath(name)
    if path.name not in ("__init__.py", "main.py", "conftest.py"):
        yield rf"(?<![\w.-]){re.escape(path.name)}(?![\w.-])"
    if path.suffix != ".py" and len(path.parts) > 1 and path.parts[0] in ("docs", "cuda", "examples", "perf", "scripts"):
        yield rf"""["'/]{path.parts[0]}["'/]|["']{path.parts[0]}/"""


def changed_since(root: Path, commit: str) -> set[str]:
    """Files that differ from where this branch left the commit's, committed or not, and files that git does not know yet."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()

    (base,) = git("merge-base", "HEAD", commit)
    return {*git("diff", "--name-only", "--no-renames", base), *git("ls-files", "--others", "--exclude-standard")}


def main(commit: str = "main") -> None:
    tree = Tree(ROOT)
    try:
        changed = changed_since(ROOT, commit)
    except subprocess.CalledProcessError as error:
        sys.exit(f"--changed={commit}: {error.stderr.strip()}")
    chosen = tree.chosen(changed)
    count = "all" if chosen == ["tests"] else len(chosen)
    print(f"{len(changed)} files differ from {commit}: {count} of {len(tree.tests)} test files", file=sys.stderr)
    print(*chosen, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
