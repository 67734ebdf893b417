"""The tower: pixels of one image in, vectors out; each patch sees all of the image, which is computed alone.

Owns the order of operations. Products, norms and attention are the decoders': patches are rows of one token each over a cache that
holds one layer's keys and values of one image. No image's bits depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, as_tensor
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Attention, LayerNorm, Linear, PlainMlp, Step, attention, layer_steps, mlp, norm_of
from vnext.models.layers.sharding import alone

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 16


class TowerLayer(NamedTuple):
    """Norms stand before attention and MLP."""

    attention_norm: LayerNorm
    attention: Attention
    mlp_norm: LayerNorm
    mlp: PlainMlp


class TowerParams(NamedTuple):
    """`patches` makes a state of a patch's numbers, colour by colour and row by row; `positions` [N, hidden] are learned ones;
    `projection` packed [width, hidden * shuffle ** 2] makes vectors of states."""

    patches: Linear
    positions: Array
    layers: tuple[TowerLayer, ...]
    norm: LayerNorm
    projection: Any


def encode(params: TowerParams, kv: KvCache, pixels: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Vectors [N, width] of one image, float32 [3, side, side]; `kv` is a cache for its patches and one layer, used up."""
    tower = config.tower
    assert tower is not None
    step = step_of_all(kv, tower.grid**2, config)
    chosen, patch = step.operations, tower.patch
    cut = pixels.reshape(3, tower.grid, patch, tower.grid, patch).permute(1, 3, 0, 2, 4).reshape(-1, tower.patch_size)
    hidden = chosen.linear(cut.to(params.positions.dtype).contiguous(), *params.patches)
    hidden = hidden + params.positions.index_select(0, as_tensor(place_numbers(tower.grid)))
    hidden = through(params.layers, hidden, kv, step)
    return chosen.linear(shuffled(norm_of(hidden, params.norm, step), tower.grid, tower.shuffle), params.projection, None)


def through(layers: Sequence[TowerLayer], hidden: torch.Tensor, kv: KvCache, step: Step) -> torch.Tensor:
    """States [N, hidden] as the layers leave them, before any last norm."""
    for layer in layers:
        hidden = hidden + attention(layer.attention, kv[0], norm_of(hidden, layer.attention_norm, step), step)
        hidden = hidden + mlp(layer.mlp, norm_of(hidden, layer.mlp_norm, step), step)
    return hidden


def shuffled(states: torch.Tensor, grid: int, by: int) -> torch.Tensor:
    """States [grid * grid, hidden] of each square of by * by patches side by side, [squares, hidden * by * by]."""
    small, hidden = grid // by, states.shape[1]
    return states.reshape(small, by, small, by, hidden).permute(0, 2, 1, 3, 4).reshape(small * small, -1).contiguous()


def place_numbers(grid: int) -> np.ndarray:
    """Which position each patch has (int64 [grid * grid]): the authors' float32 fractions decide, which are not exact."""
    step = np.float32(1.0) / np.float32(grid)
    bounds = (1 / grid + np.arange(grid - 1) * (1 / grid)).astype(np.float32)
    along = np.minimum(np.arange(grid, dtype=np.float32) * step, np.float32(1.0 - 1e-6))
    found = np.searchsorted(bounds, along, side="right")
    return (found[:, None] * grid + found[None, :]).reshape(-1).astype(np.int64)


def page_count(patches: int) -> int:
    """Blocks of a cache for one image, or one sound."""
    return -(-patches // BLOCK_SIZE)


def step_of_all(kv: KvCache, patches: int, config: ModelConfig) -> Step:
    """A step of one row for each patch, which sees all of them; layers are all alike."""
    starts, contexts = np.arange(patches + 1, dtype=np.int32), np.full(patches, patches, dtype=np.int32)
    table = np.tile(np.arange(page_count(patches), dtype=np.int32), (patches, 1))
    at = np.arange(patches, dtype=np.int64)
    arrays = (at, at, at, starts, contexts, table, at[:0])
    return layer_steps(kv, ForwardBatch(*map(as_tensor, arrays), host=HostBatch(starts, contexts)), config, alone(), None)[0]
