"""Benchmark of the ranks' collectives, every implementation in one run: `python -m pytest perf/bench_collectives.py`

A time is that of one operation within a long back-to-back series on rank 0; the other ranks are processes that do the same.
"gloo-sum" is torch's sum over loopback sockets, "gloo" is vnext's fallback, "plain" is shared memory without the compiled
operations, "chosen" is vnext's own choice. Four ranks on two cores sleep instead of spinning.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.collective_ranks import join

ROOT = Path(__file__).resolve().parent.parent
END_TIMEOUT_S = 60
ROUNDS, WARMUP_ROUNDS, SPARE_ROUNDS = 30, 3, 1
BUDGET_BYTES = 48 * 2**20  # in total per case: small tensors repeat more often
KIB = 1024
PAIR = [(2, size, form) for size in (2, 16, 64, 512, 8192) for form in ("gloo-sum", "gloo", "one-shot", "two-shot")]
FOUR = [(4, size, form) for size in (2, 64, 512, 8192) for form in ("gloo", "one-shot", "two-shot")]
CASES = [*PAIR, (2, 64, "plain"), (2, 64, "chosen"), *FOUR]

Operation = Callable[[], Any]


@pytest.fixture(scope="module")
def others() -> Iterator[list[subprocess.Popen[str]]]:
    """Start ranks 1 to 3; each takes part in the cases it receives."""
    command = [sys.executable, "-m", "perf.collective_ranks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in (1, 2, 3)]
    yield ranks
    for rank in ranks:
        rank.stdin.close()
        rank.wait(END_TIMEOUT_S)


def measure(benchmark, others, folder: Path, form: str, world_size: int, operation: str, tensor: torch.Tensor) -> None:
    iterations = max(1, min(100, BUDGET_BYTES // ROUNDS // tensor.nbytes))
    left = (ROUNDS + WARMUP_ROUNDS + SPARE_ROUNDS) * iterations
    words = [form, folder / "rendezvous", world_size, operation, left, str(tensor.dtype).removeprefix("torch."), *tensor.shape]
    for other in others[: world_size - 1]:
        print(*words, file=other.stdin, flush=True)
    group = join(form, folder / "rendezvous", 0, world_size)

    def once() -> None:
        nonlocal left
        left -= 1
        group.all_reduce(tensor) if operation == "all_reduce" else group.all_gather(tensor, 1)

    benchmark.pedantic(once, rounds=ROUNDS, iterations=iterations, warmup_rounds=WARMUP_ROUNDS)
    while left:
        once()
    assert [other.stdout.readline() for other in others[: world_size - 1]] == ["done\n"] * (world_size - 1)
    group.close()


@pytest.mark.parametrize(("world_size", "size_kib", "form"), CASES)
def test_all_reduce(benchmark, others, tmp_path: Path, world_size: int, size_kib: int, form: str) -> None:
    """bfloat16; 64 KiB hold 16 rows of 2,048."""
    tensor = torch.zeros(size_kib * KIB // 2, dtype=torch.bfloat16)
    measure(benchmark, others, tmp_path, form, world_size, "all_reduce", tensor)


@pytest.mark.parametrize("form", ("gloo", "chosen"))
@pytest.mark.parametrize("rows", (1, 32))
def test_all_gather(benchmark, others, tmp_path: Path, rows: int, form: str) -> None:
    """float32 logits of half a vocabulary of 151,936."""
    measure(benchmark, others, tmp_path, form, 2, "all_gather", torch.zeros(rows, 75968))
