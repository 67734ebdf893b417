"""The ranks' collectives, every form in one run: `python -m pytest perf/bench_collectives.py`

Times are of one operation among many back to back, as rank 0 sees it; the other ranks are processes that do the same.
"gloo all-reduce" is the sum as torch has it over loopback sockets, "gloo" the one that vnext falls back to, "plain" the
shared memory without the compiled operations. Four ranks on two cores sleep instead of spinning.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from perf.collective_ranks import join
from vnext.runtime.collectives import Group

ROOT = Path(__file__).resolve().parent.parent
END_TIMEOUT_S = 60
BUDGET_BYTES = 64 * 2**20  # of one case, in all: small tensors go round more often
KIB = 1024
SIZES = (2 * KIB, 16 * KIB, 64 * KIB, 512 * KIB, 8 * KIB * KIB)
FORMS = ("gloo all-reduce", "gloo", "plain", "one-shot", "two-shot")


@contextmanager
def group(form: str, folder: Path, world_size: int, operation: str, tensor: torch.Tensor) -> Iterator[Group]:
    """Rank 0 of a group whose other ranks do the operation until the block ends."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    words = [form, folder / "rendezvous", None, world_size, operation, dtype, *tensor.shape]
    commands = ([sys.executable, "-m", "perf.collective_ranks", *map(str, [*words[:2], rank, *words[3:]])] for rank in
                range(1, world_size))  # fmt: skip
    others = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    joined = join(form, folder / "rendezvous", 0, world_size)
    try:
        yield joined
    finally:
        joined.close()
        assert [other.wait(END_TIMEOUT_S) for other in others] == [0] * (world_size - 1)


def iterations(size_bytes: int) -> int:
    return max(1, min(100, BUDGET_BYTES // 40 // size_bytes))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("world_size", (2, 4))
def test_all_reduce(benchmark, tmp_path: Path, world_size: int, size_bytes: int, form: str) -> None:
    """bfloat16; 64 KiB are 16 rows of 2,048."""
    if world_size > 2 and form == "plain":
        pytest.skip("the plain form is timed with two ranks")
    tensor = torch.zeros(size_bytes // 2, dtype=torch.bfloat16)
    with group(form, tmp_path, world_size, "all_reduce", tensor) as joined:
        benchmark.pedantic(joined.all_reduce, (tensor,), rounds=40, iterations=iterations(size_bytes), warmup_rounds=3)


@pytest.mark.parametrize("form", ("gloo", "plain", "chosen"))
@pytest.mark.parametrize("rows", (1, 32))
def test_all_gather(benchmark, tmp_path: Path, rows: int, form: str) -> None:
    """float32 logits of half a vocabulary of 151,936."""
    tensor = torch.zeros(rows, 75968)
    with group(form, tmp_path, 2, "all_gather", tensor) as joined:
        benchmark.pedantic(joined.all_gather, (tensor, 1), rounds=20, iterations=iterations(tensor.nbytes), warmup_rounds=2)
