"""The key-value cache: its layout, size and making. Who holds which block is not known here.

Each layer has a pair (key, value) of [block_count, kv_heads_local, block_size, head_dim]. Heads come before slots so
that one head's tokens of a block are one run of memory: attention reads a head at a time.
"""

from __future__ import annotations

import math

import torch

from vnext.kernels.cpu.memory import huge
from vnext.models.config import ModelConfig
from vnext.models.sharding import Parallel, local_kv_heads

KvCache = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def make_kv_cache(
    config: ModelConfig,
    block_count: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: Parallel,
) -> KvCache:
    """An empty cache, zeroed: one (key, value) pair for each layer. On the CPU a block takes memory when it is first used."""
    shape = (block_count, local_kv_heads(config, parallel.world_size), block_size, config.head_dim)

    def zeros() -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return huge(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    return tuple((zeros(), zeros()) for _ in range(config.layer_count))


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype, parallel: Parallel) -> int:
    """Bytes of one block on one rank, over all layers, keys and values."""
    per_layer = 2 * local_kv_heads(config, parallel.world_size) * block_size * config.head_dim * dtype.itemsize
    return per_layer * config.layer_count
