"""Runs the Numba kernels, as JSON: `python batch_kernels.py simulate SEED [cpu|cuda]` or `ptx MAJOR MINOR`.

A program of its own: Numba's simulator is chosen by the environment, for a whole process, before Numba is imported. With
"cuda" the same life of a batch goes on on a GPU, without a simulator.
"""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import torch

from vnext.kernels.batch_index import plain_batch_operations

ROWS, WIDTH, BLOCK_SIZE = 12, 40, 4  # 12 blocks of 128 threads at most: a simulated thread costs about 0.1 ms


class Twins:
    """The same operations on two sets of tensors of a device: Numba's kernels on one, plain torch on the other."""

    def __init__(self, numba: Any, device: str) -> None:
        self._forms = (numba, plain_batch_operations())
        self._device = torch.device(device)

    def run(self, name: str, *arguments: torch.Tensor | int) -> None:
        """AssertionError where they differ in any argument afterwards; then the arguments hold the result."""
        pair = [[self._copied(each) for each in arguments] for _ in self._forms]
        for form, copies in zip(self._forms, pair):
            getattr(form, name)(*copies)
        for given, fast, plain in zip(arguments, *pair):
            if isinstance(given, torch.Tensor):
                assert torch.equal(fast, plain), name
                given.copy_(fast)

    def _copied(self, argument: torch.Tensor | int) -> torch.Tensor | int:
        return argument.to(self._device, copy=True) if isinstance(argument, torch.Tensor) else argument


def integers(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def starts_of(counts: list[int]) -> list[int]:
    return [sum(counts[:end]) for end in range(len(counts) + 1)]


def simulate(seed: int, device: str = "cpu") -> dict[str, int]:
    """A batch that lives: rows join, grow and leave; after every change a step is indexed. Counts what happened."""
    from vnext.kernels import batch_numba

    rng, twins = random.Random(seed), Twins(batch_numba, device)
    table, last = torch.full((ROWS, WIDTH), -1, dtype=torch.int32), torch.arange(100, 100 + ROWS)
    model: dict[int, list[int]] = {}  # row -> its blocks, by plain Python
    seen = {"joined": 0, "grown": 0, "left": 0, "steps": 0, "chunks": 0}
    for _ in range(12):
        for row in [row for row in model if rng.random() < 0.2]:
            del model[row]
            seen["left"] += 1
        write(rng, twins, table, model, seen)
        step(rng, twins, table, last, model, seen)
    return seen


def write(rng: random.Random, twins: Twins, table: torch.Tensor, model: dict[int, list[int]], seen: dict[str, int]) -> None:
    rows, columns, counts = [], [], []
    for row in rng.sample(range(ROWS), rng.randint(0, 6)):
        seen["grown" if row in model else "joined"] += 1
        blocks = model.setdefault(row, [])
        count = rng.randint(0, WIDTH - len(blocks)) if rng.random() < 0.3 else min(rng.randint(0, 2), WIDTH - len(blocks))
        rows, columns, counts = [*rows, row], [*columns, len(blocks)], [*counts, count]
        blocks += [rng.randrange(10**6) for _ in range(count)]
    values = [block for row, count in zip(rows, counts) for block in model[row][len(model[row]) - count :]]
    twins.run("write_spans", table, integers(rows), integers(columns), integers(starts_of(counts)), integers(values, torch.int32))
    for row, blocks in model.items():
        assert table[row, : len(blocks)].tolist() == blocks


def step(
    rng: random.Random, twins: Twins, table: torch.Tensor, last: torch.Tensor, model: dict[int, list[int]], seen: dict[str, int]
) -> None:
    rows = [row for row in rng.sample(sorted(model), len(model)) if model[row]]
    spans = []
    for row in rows:
        begin = rng.randrange(len(model[row]) * BLOCK_SIZE)
        spans.append((begin, rng.randint(1, len(model[row]) * BLOCK_SIZE - begin) if rng.random() < 0.3 else 1))
    query_starts = starts_of([count for _, count in spans])
    total, spare = query_starts[-1], 3
    positions, slots = torch.full((total + spare,), -7), torch.full((total + spare,), -7)
    contexts = torch.zeros(len(rows), dtype=torch.int32)
    begins = integers([begin for begin, _ in spans])
    twins.run("index_tokens", begins, integers(query_starts, torch.int32), integers(rows), table, BLOCK_SIZE, positions, slots,
              contexts)  # fmt: skip
    expected = [position for begin, count in spans for position in range(begin, begin + count)]
    owners = [row for row, (_, count) in zip(rows, spans) for _ in range(count)]
    assert positions.tolist() == [*expected, *[-7] * spare]
    wanted = [model[row][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for row, place in zip(owners, expected)]
    assert slots.tolist() == [*wanted, *[-7] * spare]
    assert contexts.tolist() == [begin + count for begin, count in spans]
    ahead = [index for index in range(len(rows)) if rng.random() < 0.5]
    token_ids = torch.zeros(total, dtype=torch.int64)
    at = [query_starts[index] for index in ahead]
    twins.run("place_tokens", last, integers([rows[index] for index in ahead]), integers(at), token_ids)
    assert [token_ids[place].item() for place in at] == [100 + rows[index] for index in ahead]
    seen["steps"] += bool(rows)
    seen["chunks"] += total > len(rows)


def sample(signature: str) -> list[torch.Tensor | int]:
    """Arguments of these types."""
    sizes = {"int64": 0, "int64[::1]": 1, "int32[::1]": 1, "int64[:, ::1]": 2, "int32[:, ::1]": 2}
    types = re.findall(r"int\d\d(?:\[[^]]*\])?", signature)
    return [torch.zeros([3] * sizes[each], dtype=torch.int64) if sizes[each] else 3 for each in types]


def ptx(major: int, minor: int) -> dict[str, list[str]]:
    """Every kernel compiled for a compute capability, for each of its signatures: the entry lines of what came of it."""
    from numba import cuda

    from vnext.kernels import batch_numba

    entries: dict[str, list[str]] = {}
    for kernel, signatures in batch_numba.SIGNATURES.items():
        for signature in signatures:
            text, _ = cuda.compile_ptx(kernel, signature, cc=(major, minor))
            entry = text[text.index(".visible .entry") :].partition(")")[0]
            parameters = re.findall(r"\.param \.(\w+)", entry)
            assert parameters == ["u64"] * len(batch_numba.words(sample(signature))), f"{kernel.__name__} takes {parameters}"
            lines = [line for line in text.splitlines() if line.startswith((".target", ".visible .entry"))]
            entries.setdefault(kernel.__name__, []).append(" ".join(lines))
    return entries


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*(int(each) if each.isdecimal() else each for each in sys.argv[2:]))))
