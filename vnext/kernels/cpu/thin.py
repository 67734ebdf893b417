"""Thin products of LoRA adapters: one call adds the blocks of all of a step's adapters to a product."""

from __future__ import annotations

import numpy as np
import torch

from vnext.kernels.cpu.native import KINDS, module
from vnext.kernels.thin import ThinParts


def add_thin(product: torch.Tensor, x: torch.Tensor, parts: ThinParts) -> torch.Tensor:
    """As kernels.thin.add_thin, for float32 or bfloat16 rows that are dense."""
    described = np.array(
        [
            (
                block.down.data_ptr(), block.up.data_ptr(), tokens.data_ptr(), len(tokens), block.rank, block.down.shape[1],
                block.first, block.width, block.up.shape[1],
            )
            for block, tokens in parts
        ],
        dtype=np.int64,
    )  # fmt: skip
    module().add_thin(
        KINDS[x.dtype], x.data_ptr(), x.stride(0), x.shape[1], product.data_ptr(), product.stride(0), described.ctypes.data,
        len(described),
    )  # fmt: skip
    return product
