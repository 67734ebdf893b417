"""Tests of undocumented imports: numpy is what it is, but for texts and types."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from vnext.base.undocumented import BACKPORTS, TEXTS, TYPES

PROGRAM = """
import sys
from contextlib import nullcontext
from vnext.base.undocumented import TEXTS, TYPES, undocumented
with undocumented() if sys.argv[1] == "without" else nullcontext():
    import numpy, msgspec
print(len(numpy.ndarray.__doc__ or "") > 1000, len(numpy.mean.__doc__) > 1000, {*TEXTS, TYPES} & sys.modules.keys() == {*sys.argv[2:]})
import numpy.typing, typing_extensions
print(sorted(vars(numpy)), sorted(vars(numpy._core)), sorted(vars(numpy.ndarray)), sorted(vars(numpy._typing)))
print(numpy.linalg.norm(numpy.arange(12, dtype=numpy.float32).reshape(3, 4)), numpy.dtype("<i4").newbyteorder(), numpy.finfo("f4"))
print(numpy.linalg.eigh(numpy.eye(2)), numpy.typing.NDArray[numpy.float32], typing_extensions.get_type_hints is not None)
class Point(typing_extensions.TypedDict):
    x: int
    y: typing_extensions.NotRequired[int]
print(msgspec.json.decode(b'{"x": 3}', type=Point), typing_extensions.NotRequired is msgspec._utils.NotRequired)
"""
FIRST = """
import sys
from vnext.base.undocumented import undocumented
with undocumented():
    import numpy
    from numpy._typing import ArrayLike
print(ArrayLike is not None, sys.modules["numpy._typing"].ArrayLike is ArrayLike)
"""


def ran(*program: str) -> list[str]:
    found = subprocess.run([sys.executable, "-c", *program], capture_output=True, text=True, timeout=60, check=True)
    return found.stdout.splitlines()


def test_numpy_lacks_texts_and_types_alone() -> None:
    usual, *all_there = ran(PROGRAM, "usual", *TEXTS, TYPES)
    without, *all_here = ran(PROGRAM, "without")
    assert (usual, without) == ("True True True", "False True True")
    assert all_there == all_here


def test_another_name_of_the_types_is_the_modules_own() -> None:
    assert ran(FIRST) == ["True True"]


@pytest.mark.parametrize("name", (*TEXTS, TYPES, BACKPORTS))
def test_there_are_such_modules(name: str) -> None:
    assert find_spec(name) is not None
