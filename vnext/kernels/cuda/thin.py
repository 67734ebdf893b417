"""Thin products of adapters (cuda/thin.cu): two launches add those of all adapters of a step to a product.

Sums have the order of vnext/kernels/thin_tiles.py, bit for bit. Arguments are checked by the contract, not here.
"""

from __future__ import annotations

import numpy as np
import torch

from vnext.kernels.cuda.backends import kernel_for
from vnext.kernels.cuda.interface import SCALARS
from vnext.kernels.cuda.rows import CHUNK_BYTES, whole
from vnext.kernels.thin import LANES
from vnext.kernels.thin_tiles import CHAINS, SEGMENT, TILE_TOKENS, ThinLines

SOURCE = "thin.cu"
UP_THREADS = 128
SUMS_BYTES = (CHAINS * LANES + LANES) * 4
"""Of shared memory, for each token of a tile."""


def add_tiled(
    product: torch.Tensor, x: torch.Tensor, memory: torch.Tensor, tokens: torch.Tensor, tiles: torch.Tensor, lines: ThinLines
) -> None:
    """As thin_tiles.add_tiled, for rows that are dense."""
    if not tiles.shape[0]:
        return
    defines, chunk = (("SCALAR", SCALARS[x.dtype]),), CHUNK_BYTES // x.element_size()
    segments, groups = -(-x.shape[1] // SEGMENT), lines.rank_room // LANES
    narrow = torch.empty((tokens.shape[0], lines.count, segments, lines.rank_room), dtype=torch.float32, device=x.device)
    shared = (memory, tokens, tiles)
    sizes = (np.int64(memory.stride(0)), np.int32(lines.first + 1))  # the name takes the place of one line
    kernel_for(x.device, SOURCE, "thin_down", defines)(
        (tiles.shape[0], segments, lines.count * groups),
        (CHAINS * LANES // chunk,),
        (narrow, x, *shared, np.int64(x.stride(0)), *sizes, np.int32(x.shape[1]), np.int32(lines.rank_room)),
        shared_mem=TILE_TOKENS * SUMS_BYTES,
    )
    kernel_for(x.device, SOURCE, "thin_up", defines)(
        (tiles.shape[0], -(-lines.width_max // (UP_THREADS * chunk)), lines.count),
        (UP_THREADS,),
        (
            product, narrow, *shared, np.int64(product.stride(0)), *sizes, np.int32(segments), np.int32(lines.rank_room),
            whole(chunk, product),
        ),
        shared_mem=TILE_TOKENS * lines.rank_room * 4,
    )  # fmt: skip
