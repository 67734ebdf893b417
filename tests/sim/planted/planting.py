"""Planting: one-line faults put into the running engine, as changes of source text, and taken out again.

The text must occur exactly once in its module. The module's source is compiled with the change, and every function that
contains it gets the changed code: whoever imported the function runs the fault too. Files are not touched.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType

import msgspec
import numpy as np
import pytest

from vnext.sim import core
from vnext.sim.checks.plain_state import Divergence
from tests.sim.fleet import Fleet
from vnext.sim.rank_values import StepResult
from tests.sim.redacted_tape import RedactedTape
from vnext.log import log_bytes, log_plain, redaction
from vnext.state import allocate, reduce as reducer
from vnext.state.store import columns, columns_numpy, extents, prefix_index as names, prefix_index_plain
from vnext.state.errors import LawBroken


class Edit(msgspec.Struct, frozen=True):
    """`old` becomes `new` in the source of `module`: below `vnext.`, or a part of the simulator, `tests.sim.NAME`."""

    module: str
    old: str
    new: str


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what it is, its edits, and the law, exception or words by which the simulator must notice it (`is_found_by`).

    `one_rank`: edits that only rank 1 has. `found_by` are alternatives: the simulator stops at the first law it meets.
    """

    name: str
    edits: tuple[Edit, ...] = ()
    one_rank: tuple[Edit, ...] = ()
    found_by: tuple[str, ...]


def is_found_by(error: Exception, names: tuple[str, ...]) -> bool:
    """Whether a failure is one of these: a law by its name, a difference by its first word or words of it, any other
    exception by the name of its very class."""
    if isinstance(error, LawBroken):
        return error.law in names
    if isinstance(error, Divergence):
        return str(error).split(":")[0] in names or any(name in str(error) for name in names if " " in name)
    return type(error).__name__ in names


Swap = tuple[FunctionType, CodeType, CodeType]


def swaps(edits: tuple[Edit, ...]) -> list[Swap]:
    """(function, its code, its code with the edits) of every function that the edits change."""
    found = []
    for module in dict.fromkeys(edit.module for edit in edits):
        found += _module_swaps(module, [edit for edit in edits if edit.module == module])
    return found


def _module_swaps(name: str, edits: list[Edit]) -> list[Swap]:
    module = _imported(name)
    source, lines = source_with(name, edits)
    codes = dict(_codes(compile(source, module.__file__, "exec")))
    names = dict.fromkeys(_qualified_name(source, line) for line in lines)
    functions = [(_function(module, name), codes[name]) for name in names]
    return [(function, function.__code__, code) for function, code in functions]


def _imported(name: str) -> ModuleType:
    return importlib.import_module(name if name.startswith("tests.") else f"vnext.{name}")


def source_with(name: str, edits: Sequence[Edit]) -> tuple[str, list[int]]:
    """A module's source with the edits, and the line of each."""
    source, lines = inspect.getsource(_imported(name)), []
    for edit in edits:
        assert source.count(edit.old) == 1, f"{name} has {edit.old!r} {source.count(edit.old)} times: choose another text"
        lines.append(source[: source.index(edit.old)].count("\n") + 1)
        padding = "\n" * (edit.old.count("\n") - edit.new.count("\n"))
        source = source.replace(edit.old, edit.new + padding)
    return source, lines


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _qualified_name(source: str, line: int) -> str:
    """`function` or `Class.method` around a line."""
    for node in ast.parse(source).body:
        inside = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
        for function in inside:
            if isinstance(function, ast.FunctionDef) and function.lineno <= line <= function.end_lineno:
                return function.name if function is node else f"{node.name}.{function.name}"
    raise AssertionError(f"line {line} is in no function")


def _function(module: ModuleType, name: str) -> FunctionType:
    found: object = module
    for part in name.split("."):
        found = vars(found)[part]
    found = getattr(found, "fget", found)
    assert isinstance(found, FunctionType)
    return found


@contextmanager
def swapped(changes: list[Swap]) -> Iterator[None]:
    """The changed code runs inside the block."""
    for function, _, code in changes:
        function.__code__ = code
    try:
        yield
    finally:
        for function, code, _ in changes:
            function.__code__ = code


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is in the engine inside the block; what only one rank has, while rank 1 folds."""
    with swapped(swaps(bug.edits)):
        with on_rank_1(swaps(bug.one_rank)) if bug.one_rank else swapped([]):
            yield


@contextmanager
def on_rank_1(changes: list[Swap]) -> Iterator[None]:
    right = Fleet.catch_up

    def catch_up(self: Fleet, rank: int) -> StepResult | None:
        with swapped(changes if rank == 1 else []):
            return right(self, rank)

    Fleet.catch_up = catch_up
    try:
        yield
    finally:
        Fleet.catch_up = right


@contextmanager
def plain_columns() -> Iterator[None]:
    """The columns' arithmetic in numpy and the log's work in Python, where bugs can be planted, not their compiled twins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "impl", columns_numpy)
        patch.setattr(log_bytes, "impl", log_plain)
        patch.setattr(names, "impl", prefix_index_plain)
        yield


@contextmanager
def blank_arenas(value: int = 0) -> Iterator[None]:
    """What was never written in an arena is always this value, so that a fault that reads it fails twice in the same words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "new_places", lambda count: np.full(count, value, dtype=np.int32))
        yield


@contextmanager
def small_arenas() -> Iterator[None]:
    """Arenas of a few places, so that histories and tables move every few steps, and tails that are forgotten soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "ARENA_PLACES_MIN", 8)
        patch.setattr(allocate, "TOKENS_SPARE", 1)
        patch.setattr(redaction, "SWEEP_MIN", 1)
        yield


@contextmanager
def without_twins() -> Iterator[None]:
    """No log without texts beside a run: a fault elsewhere is to be found by a law of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RedactedTape, "write", lambda tape: None)
        yield
