"""Tests of undocumented imports: numpy is what it is, but for texts."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from vnext.base.undocumented import TEXTS

PROGRAM = """
import sys
from contextlib import nullcontext
from vnext.base.undocumented import TEXTS, undocumented
with undocumented() if sys.argv[1] == "without" else nullcontext():
    import numpy
print(len(numpy.ndarray.__doc__ or "") > 1000, len(numpy.mean.__doc__) > 1000, set(TEXTS) <= sys.modules.keys())
print(sorted(vars(numpy)), sorted(vars(numpy._core)), sorted(vars(numpy.ndarray)))
print(numpy.linalg.norm(numpy.arange(12, dtype=numpy.float32).reshape(3, 4)), numpy.dtype("<i4").newbyteorder(), numpy.finfo("f4"))
"""


def ran(form: str) -> tuple[str, list[str]]:
    found = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, timeout=60, check=True)
    first, *others = found.stdout.splitlines()
    return first, others


def test_numpy_lacks_texts_alone() -> None:
    (usual, all_there), (without, all_here) = ran("usual"), ran("without")
    assert (usual, without) == ("True True True", "False True False")
    assert all_there == all_here


@pytest.mark.parametrize("name", TEXTS)
def test_numpy_has_such_modules(name: str) -> None:
    assert find_spec(name) is not None
