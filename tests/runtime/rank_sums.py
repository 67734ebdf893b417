"""Sums over ranks, computed beside them: what each rank brings, and the sum in the order of ranks.

Programs of their own that fork ranks (tests/runtime, tests/cuda) load it too.
"""

from __future__ import annotations

from functools import reduce

import torch


def values(case: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, so that another order of adding is another result."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    exponents = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 2.0**exponents).to(dtype)


def tree_sum(case: int, world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """From the leaves on: as many neighbours in order as the ranks have of an odd factor, then neighbours in pairs."""
    sums = [values(case, rank, count, dtype).float() for rank in range(world_size)]
    odd = next(size for size in range(1, world_size + 1, 2) if world_size % size == 0 and (world_size // size).bit_count() == 1)
    sums = [reduce(torch.add, sums[first : first + odd]) for first in range(0, world_size, odd)]
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2])]
    return sums[0].to(dtype)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
