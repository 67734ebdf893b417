"""Thin products of LoRA adapters: one call adds the blocks of all of a step's adapters to a product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vnext.kernels.cpu.native import KINDS, kernels
from vnext.kernels.thin import ThinParts


def add_thin(
    product: torch.Tensor,
    x: torch.Tensor,
    parts: ThinParts,
    shards: int = 1,
    join: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """As kernels.thin.add_thin, for float32 or bfloat16 rows that are dense."""
    lines = parts.lines
    given = (
        KINDS[x.dtype], x.data_ptr(), x.stride(0), x.shape[1], shards, product.data_ptr(), product.stride(0), lines.ctypes.data,
        len(lines),
    )  # fmt: skip
    if join is None:
        kernels.add_thin(*given, None, True)
        return product
    narrow = torch.empty(parts.narrow_count, dtype=torch.float32)
    kernels.add_thin(*given, narrow.data_ptr(), False)
    narrow = join(narrow)
    kernels.add_thin(*given, narrow.data_ptr(), True)
    return product
