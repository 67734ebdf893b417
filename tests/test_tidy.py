"""The tree checks itself: import arrows, file and function sizes, headers, words, errors, environment, test names."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("vnext", "tests", "scripts", "docs", "perf", "cuda", ".ci", ".github")
TEXT_SUFFIXES = {".py", ".md", ".sh", ".txt", ".in", ".toml", ".cfg", ".ini", ".yml", ".yaml", ".cu", ".cuh", ".cpp", ".h", ""}
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
HEADER_LINES_MAX = 12
LINE_LENGTH_MAX = 132  # the house writes 120; the tree holds to a little more

ROOMS = ("state", "sched", "kernels", "models", "runtime", "server", "bench", "rerun", "replay", "chat")
# Which rooms a room may import; modules beside the rooms (the commands, `LLM`) are the house's doors and see every room.
ARROWS = {
    "state": set(),
    "sched": {"state"},
    "kernels": set(),
    "models": {"kernels"},
    "runtime": {"state", "sched", "models", "kernels"},
    "server": {"state", "sched", "runtime"},
    "bench": {"state", "sched", "runtime", "server"},
    "rerun": {"state", "sched", "models", "kernels", "runtime"},
    "replay": {"state", "sched", "rerun"},
    "chat": {"runtime", "server"},
}
# Doors that a room may use, with the reason.
DOORS = {
    "runtime": {"version", "exits"},  # the log's header and the server's answers name the version; its processes end
    "server": {"version", "exits", "sampling_params"},  # sampling_params is what a client may ask for, shared with `LLM`
    "bench": {"version", "exits", "sampling_params", "llm", "machine", "options"},  # a bench drives vnext as its users do
    "replay": {"version"},
    "chat": {"exits", "options", "llm", "sampling_params"},  # a talk drives vnext as its users do
}
# Files that may read the environment, with the reason.
ENVIRONMENT_READERS = {
    "vnext/options.py",  # the one reader of argv and environment
    "vnext/cli.py",  # its entry point
    "vnext/replay/cli_ui.py",  # a server's key, which `ps` would show among the arguments
    "vnext/runtime/determinism.py",  # a rank's start-up: MKL and OpenMP read these when torch is imported, and only then
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}
# Written apart, so that this file may be read by itself.
FORBIDDEN_WORDS = ["TO" + "DO", "FIX" + "ME", "not " + "implemented", "NotImplemented" + "Error", "/" + "work/", "/" + "root/"]
WORD_EXCEPTIONS: dict[str, set[str]] = {}


def files(*suffixes: str) -> list[Path]:
    """Files of the tree by suffix: the known folders and the top level, without caches and build outputs."""
    return [path for path in tree() if path.suffix in suffixes]


@cache
def tree() -> tuple[Path, ...]:
    inside = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    found = [path for path in [*sorted(ROOT.glob("*")), *inside] if path.is_file()]
    return tuple(path for path in found if "__pycache__" not in path.parts and not path.name.endswith(".so"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def product_files() -> list[Path]:
    return [path for path in files(".py") if name_of(path).startswith("vnext/")]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions; `from vnext import x` is vnext.x."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"vnext.{n.name}") for n in node.names) if module == "vnext" else [(node.lineno, module)]


# ---- arrows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_import_arrows(room: str) -> None:
    allowed = {room} | ARROWS[room] | DOORS.get(room, set())
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in sorted((ROOT / "vnext" / room).rglob("*.py"))
        for line, module in imports(path)
        if module.split(".")[0] == "vnext" and (module.split(".") + [""])[1] not in allowed
    ]
    assert wrong == []


def test_every_room_is_known() -> None:
    found = {path.name for path in (ROOT / "vnext").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert found == set(ROOMS)


def file_of(module: str) -> Path | None:
    """Where a module of ours stands."""
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def imported_files(path: Path) -> set[Path]:
    """What a file imports of ours, anywhere in it: also for its types alone, also when it is first needed."""
    named = {module for _, module in imports(path)}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {f"{node.module}.{name.name}" for name in node.names}
    return {found for module in named if module.startswith("vnext.") and (found := file_of(module))} - {path}


def test_no_circle_of_imports() -> None:
    try:
        TopologicalSorter({path: imported_files(path) for path in product_files()}).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(name_of(path) for path in reversed(circle.args[1])))


def test_imports_are_absolute() -> None:
    wrong = [f"{name_of(path)}:{line} {module}" for path in files(".py") for line, module in imports(path) if module[0] == "."]
    assert wrong == []


def test_product_code_imports_no_tests_and_nothing_unsafe() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in files(".py")
        for line, module in imports(path)
        if module.split(".")[0] in FORBIDDEN_MODULES or (module.startswith("tests") and path in product_files())
    ]
    assert wrong == []


def test_no_python_among_the_cuda_sources() -> None:
    """`cuda` is also NVIDIA's namespace package: a Python file there would hide theirs."""
    assert [name_of(path) for path in files(".py", ".pyi", ".pyc") if name_of(path).startswith("cuda/")] == []


# ---- files and functions -----------------------------------------------------------------------------------------


def test_every_file_opens_with_what_it_owns() -> None:
    wrong = []
    for path in files(".py"):
        header = ast.get_docstring(parsed(path), clean=False)
        if header is None or len(header.splitlines()) > HEADER_LINES_MAX:
            wrong.append(f"{name_of(path)} has {'no header' if header is None else 'a long header'}")
    assert wrong == []


def test_files_are_small() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in product_files()}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES_MAX} == {}


def test_functions_are_small() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in product_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert wrong == []


def test_lines_are_short() -> None:
    wrong = [
        f"{name_of(path)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > LINE_LENGTH_MAX
    ]
    assert wrong == []


# ---- words, errors, environment ----------------------------------------------------------------------------------


def test_no_forbidden_words() -> None:
    wrong = []
    for path in files(*TEXT_SUFFIXES):
        name, text = name_of(path), path.read_text()
        for word in FORBIDDEN_WORDS:
            if word.lower() in text.lower() and word not in WORD_EXCEPTIONS.get(name, set()):
                line = text.lower()[: text.lower().index(word.lower())].count("\n") + 1
                wrong.append(f"{name}:{line} contains {word!r}")
    assert wrong == []


def test_no_bare_except_and_broad_ones_say_why() -> None:
    """A broad `except` stands only at an effect boundary: its line has the reason, or its last word is `raise`."""
    wrong = []
    for path in files(".py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or "Exception" in named(node.type) or "BaseException" in named(node.type)
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if node.type is None or (broad and not raises_again and "#" not in lines[node.lineno - 1]):
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert wrong == []


def named(node: ast.expr) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def test_only_the_edge_reads_the_environment() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        if name_of(path) not in ENVIRONMENT_READERS
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {n.name for n in node.names} & {"environ", "getenv"})
    ]
    assert wrong == []


def test_exceptions_to_the_rules_are_still_needed() -> None:
    for name in ENVIRONMENT_READERS - {"vnext/cli.py"}:
        assert "environ" in (ROOT / name).read_text(), f"{name} reads no environment any more: take it from the list"
    for room, doors in DOORS.items():
        used = {m.split(".")[1] for p in (ROOT / "vnext" / room).rglob("*.py") for _, m in imports(p) if m.startswith("vnext.")}
        assert doors - {"version"} <= used, f"{room} no longer uses {doors - used}: take it from the list"


# ---- tests -------------------------------------------------------------------------------------------------------


def test_test_files_have_names_of_their_own() -> None:
    """Test folders are no packages, so two files of one name would hide each other."""
    names = Counter(path.name for path in files(".py") if name_of(path).startswith("tests/") and path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
    assert [name_of(path) for path in files(".py") if name_of(path).startswith("tests/") and path.name == "__init__.py"] == []


def test_test_folders_mirror_the_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders <= set(ROOMS) | {"sim", "golden", "e2e", "cuda", "gpu"}
