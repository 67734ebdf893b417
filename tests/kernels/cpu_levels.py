"""What the tests of the CPU's kernels share: the instruction sets of this machine, and error bounds from the dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vnext.kernels.cpu import native

needs_native = pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled here")
LEVELS = native.levels() if native.is_built() else ()
OWN_PRODUCTS = {native.Level.AVX512_BF16, native.Level.NEON_BF16}
"""Levels whose products of bfloat16 have an order of their own."""
OWN_ATTENTION = {native.Level.AVX512_BF16, native.Level.AMX}
"""Levels whose attention in bfloat16 has an order of its own."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding."""


@contextmanager
def using(level: native.Level, threads: int = 1) -> Iterator[None]:
    """An instruction set and a number of threads, for a while."""
    before = native.level()
    native.set_level(level)
    native.start(threads, spin_us=20)
    try:
        yield
    finally:
        native.start(1, 0)
        native.set_level(before)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Every element of `found` is within `bound` (float64, same shape) of `expected` (float64)."""
    error = (found.double() - expected).abs()
    worst = (error / bound.clamp(min=1e-300)).max().item() if error.numel() else 0.0
    assert worst <= 1.0, f"the largest error is {worst:.2f} times its bound"
