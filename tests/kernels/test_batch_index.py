"""The batch's index work: Numba's kernels equal plain torch in the simulator and compile for real devices; doors refuse.

batch_kernels.py runs the kernels in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vnext.kernels import batch_index
from vnext.kernels.batch_index import BatchOperations, batch_operations, plain_batch_operations
from vnext.kernels.contracts import ContractError

ROOT = Path(__file__).parents[2]
KERNELS = {"write_spans_kernel": 2, "index_tokens_kernel": 1, "place_tokens_kernel": 1}


def run_kernels(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("numba", reason="Numba is not installed: pip install 'vnext[dev]'")
    command = [sys.executable, str(Path(__file__).with_name("batch_kernels.py")), *map(str, arguments)]
    words = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=words, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_kernels_equal_plain_torch_in_the_simulator(seed: int) -> None:
    """And both equal plain Python lists: rows join, grow and leave, chunks and decodes are indexed."""
    ran = run_kernels("simulate", seed, NUMBA_ENABLE_CUDASIM="1")
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, Any] = json.loads(ran.stdout)
    assert all(seen.values()), seen


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_compile_without_a_device(capability: tuple[int, int]) -> None:
    ran = run_kernels("ptx", *capability)
    if ran.returncode != 0 and any(word in ran.stderr for word in ("NvvmSupportError", "libNVVM", "libnvvm")):
        pytest.skip("no NVVM is installed here: pip install 'vnext[cuda]'")
    assert ran.returncode == 0, ran.stderr
    entries: dict[str, list[str]] = json.loads(ran.stdout)
    assert {name: len(each) for name, each in entries.items()} == KERNELS
    for name, compiled in entries.items():
        for text in compiled:
            assert f".target sm_{capability[0]}{capability[1]}" in text and name in text


# ---- the choice and the doors --------------------------------------------------------------------------------------


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


TABLE = torch.zeros(3, 4, dtype=torch.int32)
REFUSED = [
    ("write_spans", (TABLE.t(), longs(0), longs(0), longs(0, 1), TABLE[0, :1]), "target must be contiguous"),
    ("write_spans", (TABLE.float(), longs(0), longs(0), longs(0, 1), TABLE[0, :1]), "target must be torch.int32 or torch.int64"),
    ("write_spans", (TABLE, longs(0), longs(0), longs(0), TABLE[0, :1]), r"starts must have the shape \[2\]"),
    ("write_spans", (TABLE, longs(0), longs(0), longs(0, 1), longs(1)), "values must be torch.int32"),
    ("index_tokens", (longs(0), longs(0, 1), longs(0), TABLE, 4, longs(0), longs(0), longs(0).int()), "query_starts must"),
    ("index_tokens", (longs(0), longs(0, 1).int(), longs(0), TABLE, 0, longs(0), longs(0), longs(0).int()), "block_size must"),
    ("index_tokens", (longs(0), longs(0, 1).int(), longs(0), TABLE, 4, longs(0), longs(0, 0), longs(0).int()), "slots must"),
    ("place_tokens", (longs(0), longs(0), longs(0, 1), longs(0)), r"at must have the shape \[1\]"),
]


@pytest.mark.parametrize(("operation", "arguments", "message"), REFUSED)
def test_the_doors_refuse(operation: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        getattr(plain_batch_operations(), operation)(*arguments)


def test_the_cpu_has_the_plain_forms() -> None:
    assert batch_operations("cpu") == plain_batch_operations()
    assert BatchOperations._fields == tuple(name.removesuffix("_kernel") for name in KERNELS)


@pytest.fixture
def forms_anew() -> Iterator[None]:
    """The choice is made once a process: here before and after the test."""
    for choice in (batch_operations, batch_index.why_not_compiled):
        choice.cache_clear()
    yield
    for choice in (batch_operations, batch_index.why_not_compiled):
        choice.cache_clear()


@pytest.mark.usefixtures("forms_anew")
def test_where_numba_does_not_compile_plain_torch_does_the_work_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As numba-cuda 0.30 with NumPy 2.5, of which it reads a name that is gone."""

    def compile_all() -> None:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setitem(sys.modules, "vnext.kernels.batch_numba", SimpleNamespace(compile_all=compile_all))
    monkeypatch.setattr("vnext.kernels.batch_numba", sys.modules["vnext.kernels.batch_numba"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert batch_operations("cuda") == plain_batch_operations()
    assert batch_index.why_not_compiled().endswith("(AttributeError: module 'numpy' has no attribute 'row_stack')")
