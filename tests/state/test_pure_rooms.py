"""vnext/state, vnext/log, vnext/sched and vnext/sim are pure: what they import, call and iterate over, read from their source and in a process."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE_ROOMS = ("state", "log", "sched", "sim")
STORIES = (
    "copying", "crashes", "deciding", "fleet", "illegal_events", "redacted_tape", "routing", "scenario", "scenario_draw", "seeds",
    "shortages", "simulator", "streams", "tier", "weight_changes",
)  # fmt: skip
"""The simulator and what drives it, which are as pure as what they simulate."""
SEEN_BY = {"sched": {"log"}, "sim": {"log", "sched", "sim"}}
PURE_IMPORTS = {
    "__future__", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools", "math",
    "operator", "struct", "types", "typing", "zlib", "msgspec", "numpy", "xxhash",
}  # fmt: skip
# What single files may import beside these, with the reason.
EXTRA_IMPORTS = {
    "tests/sim/copying.py": {"vnext.sampling.constraint", "pathlib"},  # knows what a story holds
    "sched/policies.py": {"contextlib", "importlib", "inspect", "re", "sys"},  # finds the policy that a configuration names
    "tests/sim/routing.py": {"vnext.routing.policies", "vnext.routing.prompts", "vnext.routing.router"},  # what it simulates
    "sim/rank.py": {"vnext.sampling.constraint"},  # folds the grammars that ranks fold
    "sim/toy.py": {"vnext.sampling.constraint", "ctypes", "pathlib"},  # stands in for a tokenizer and for llguidance
}
EXTRA_CALLS = {"tests/sim/copying.py": {"id"}}  # which objects it has copied; no number reaches a result
IMPURE_CALLS = {"hash", "id", "open", "input", "print", "eval", "exec", "globals", "__import__"}
ORDERED_BY = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "array", "fromiter", "join", "dict", "fromkeys"}
FILES = [path for room in PURE_ROOMS for path in sorted((ROOT / "vnext" / room).rglob("*.py"))]
FILES += [ROOT / "tests" / "sim" / f"{name}.py" for name in STORIES]


def impurities(tree: ast.Module, room: str) -> Iterator[str]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from (f"line {line}: imports {name.name}" for name in node.names if not allowed(name.name, room))
        elif isinstance(node, ast.ImportFrom):
            if not allowed(node.module or ".", room):
                yield f"line {line}: imports {node.module}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield f"line {line}: calls {node.func.id}()"
        elif isinstance(node, ast.Attribute) and node.attr == "random":
            yield f"line {line}: reads .random"
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            yield f"line {line}: writes outside its function"
        elif isinstance(node, (ast.FunctionDef, ast.Module)):
            yield from set_orders(node)


def place(path: Path) -> str:
    """Room and file, such as "sim/rank.py"."""
    return path.relative_to(ROOT).as_posix().removeprefix("vnext/")


def room_of(path: Path) -> str:
    return "sim" if path.stem in STORIES else place(path).split("/")[0]


def allowed(module: str, room: str) -> bool:
    rooms = {"vnext.state", "vnext.base.compiled", f"vnext.{room}", *(f"vnext.{each}" for each in SEEN_BY.get(room, ()))}
    rooms |= {f"tests.sim.{name}" for name in STORIES if room == "sim"}
    return module.split(".")[0] in PURE_IMPORTS or any(f"{module}.".startswith(f"{name}.") for name in rooms)


def set_orders(scope: ast.FunctionDef | ast.Module) -> Iterator[str]:
    """Places where the order of a set could reach a result: loops, comprehensions, conversions to a sequence."""
    nodes = list(own_nodes(scope))
    names = {
        target.id
        for node in nodes if isinstance(node, ast.Assign) and is_set(node.value, set())
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    for node in nodes:
        found: list[ast.expr] = []
        if isinstance(node, (ast.For, ast.comprehension)):
            found = [node.iter]
        elif isinstance(node, ast.Call) and called(node) in ORDERED_BY:
            found = node.args
        elif isinstance(node, ast.Starred):
            found = [node.value]
        yield from (f"line {value.lineno}: takes the order of a set" for value in found if is_set(value, names))


def own_nodes(scope: ast.FunctionDef | ast.Module) -> Iterator[ast.AST]:
    """What belongs to this scope and to no function inside it."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            waiting += ast.iter_child_nodes(node)


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def is_set(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        return called(node) in ("set", "frozenset")
    if isinstance(node, ast.BinOp):
        return is_set(node.left, names) or is_set(node.right, names)
    return isinstance(node, ast.Name) and node.id in names


@pytest.mark.parametrize("path", FILES, ids=lambda path: place(path))
def test_a_pure_file_is_pure(path: Path) -> None:
    extra = EXTRA_IMPORTS.get(place(path), set())
    calls = {f"calls {name}()" for name in EXTRA_CALLS.get(place(path), ())}
    found = impurities(ast.parse(path.read_text()), room_of(path))
    assert [line for line in found if line.split(": imports ")[-1] not in extra and line.split(": ")[-1] not in calls] == []


WRONG = [
    "import time", "import random", "import os", "from os import environ", "import socket", "import uuid", "import torch",
    "import zmq", "import asyncio", "import datetime", "import secrets", "import vnext.runtime.engine.engine_core",
    "from vnext.sched import schedule", "x = hash('a')", "x = id(3)", "x = open('a')", "import numpy as np\nnp.random.rand()",
    "def f():\n    s = {1, 2}\n    return [x for x in s]", "def f(a):\n    for x in set(a):\n        g(x)",
    "def f(a, b):\n    return tuple(set(a) - set(b))", "def f(a):\n    return [*{y for y in a}]", "def f():\n    global g",
]  # fmt: skip


@pytest.mark.parametrize("source", WRONG)
def test_the_check_sees_what_is_impure(source: str) -> None:
    assert list(impurities(ast.parse(source), "state"))


@pytest.mark.parametrize("source", ["def f(a):\n    return sorted(set(a))", "import msgspec", "from vnext.state.store import rows"])
def test_the_check_leaves_what_is_pure(source: str) -> None:
    assert list(impurities(ast.parse(source), "state")) == []


CHILD = """
import importlib, pkgutil, sys
for room in {rooms}:
    package = importlib.import_module(f"vnext.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(("vnext.replay.ui.", "vnext.replay.rerun.")):  # the page and the model: by their commands
            importlib.import_module(module.name)
print(*sorted(set(sys.modules) & {forbidden}))
"""


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        (("state", "log", "sched", "replay"), {"torch", "zmq", "aiohttp", "tokenizers", "transformers"}),
        (("state", "log", "sched", "sim"), {"torch", "zmq", "asyncio", "rich"}),
    ],
)
def test_pure_rooms_load_nothing_heavy(rooms: tuple[str, ...], forbidden: set[str]) -> None:
    child = [sys.executable, "-c", CHILD.format(rooms=rooms, forbidden=forbidden)]
    ran = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: place(path))
def test_structs_are_frozen(path: Path) -> None:
    """Every struct of the pure rooms is a value."""
    dotted = path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
    module = importlib.import_module(dotted.removesuffix(".__init__"))
    structs = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)]
    assert [struct.__name__ for struct in structs if not struct.__struct_config__.frozen] == []
