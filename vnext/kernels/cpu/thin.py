"""Thin products of LoRA adapters: one call adds the blocks of all of a step's adapters to a product."""

from __future__ import annotations

import torch

from vnext.kernels.cpu.native import KINDS, module
from vnext.kernels.thin import ThinParts


def add_thin(product: torch.Tensor, x: torch.Tensor, parts: ThinParts) -> torch.Tensor:
    """As kernels.thin.add_thin, for float32 or bfloat16 rows that are dense."""
    lines = parts.lines
    module().add_thin(
        KINDS[x.dtype], x.data_ptr(), x.stride(0), x.shape[1], product.data_ptr(), product.stride(0), lines.ctypes.data, len(lines)
    )
    return product
