"""Random rows for the row-wise kernels, and bounds of rounding."""

from __future__ import annotations

import torch

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half of the distance between neighbours, relative. float16's is coarser below 2**-14: see `half_step`."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def half_step(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What one rounding to `dtype` may change."""
    return expected.abs() * ROUNDING[dtype] + (2.0**-25 if dtype is torch.float16 else 0.0)


def within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Assert that each element is near enough."""
    error = (found.double() - expected.double()).abs()
    assert bool((error <= bound).all()), f"{(error - bound).max()} too much, of {error.max()}"
