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
from vnext.models.layers.layers import (
    Attention,
    GatedMlp,
    Linear,
    Norm,
    PlainMlp,
    Step,
    attention,
    layer_steps,
    mlp,
    norm_of,
)
from vnext.models.layers.sharding import alone

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 16


class TowerLayer(NamedTuple):
    """Norms stand before attention and MLP."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: PlainMlp | GatedMlp


class TowerParams(NamedTuple):
    """`patches` makes a state of a patch's numbers, colour by colour and row by row; `positions` [N, hidden] are learned ones, None
    where patches turn; `before` and `norm` stand before and behind the layers; `projection`: what the family makes vectors with."""

    patches: Linear
    layers: tuple[TowerLayer, ...]
    projection: Any
    positions: Array | None = None
    before: Norm | None = None
    norm: Norm | None = None


class Passing(NamedTuple):
    """An image on its way through a tower: states [N, rows * columns, hidden] of N images of one size, computed one by one, and the
    step of their layers."""

    states: torch.Tensor
    step: Step
    rows: int
    columns: int


def begin(params: TowerParams, kv: KvCache, pixels: torch.Tensor, config: ModelConfig) -> Passing:
    """Images float32 [N, 3, height, width] of one size before the first layer; `kv` is a cache for the patches of one and one
    layer, used up."""
    tower = config.tower
    assert tower is not None
    patch, (count, _, height, width) = tower.patch, pixels.shape
    rows, columns = height // patch, width // patch
    step = step_of_all(kv, rows * columns, config)
    if tower.theta:
        step = step._replace(**turned(rows, columns, config.head_dim, tower.theta))
    cut = pixels.reshape(count, 3, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5).reshape(-1, tower.patch_size)
    states = step.operations.linear(cut.to(kv[0][0].dtype).contiguous(), *params.patches)
    states = norm_of(states, params.before, step).unflatten(0, (count, -1))
    if params.positions is not None:
        places = place_numbers(rows) if tower.form == "tiles" else np.arange(rows * columns)
        states = states + params.positions.index_select(0, as_tensor(places))
    return Passing(states, step, rows, columns)


def encode(params: TowerParams, kv: KvCache, pixels: torch.Tensor, config: ModelConfig) -> Passing:
    """Images, as for `begin`, behind the last layer and its norm."""
    passing = begin(params, kv, pixels, config)
    for layer in params.layers:
        for states in passing.states:
            states.copy_(through((layer,), states, kv, passing.step))
    return end(params, passing)


def end(params: TowerParams, passing: Passing) -> Passing:
    """Images behind the last norm."""
    count, (_, _, hidden) = len(passing.states), passing.states.shape
    states = norm_of(passing.states.reshape(-1, hidden), params.norm, passing.step)
    return passing._replace(states=states.reshape(count, -1, hidden))


def through(layers: Sequence[TowerLayer], hidden: torch.Tensor, kv: KvCache, step: Step) -> torch.Tensor:
    """States [N, hidden] as the layers leave them, before any last norm."""
    for layer in layers:
        hidden = hidden + attention(layer.attention, kv[0], norm_of(hidden, layer.attention_norm, step), step)
        hidden = hidden + mlp(layer.mlp, norm_of(hidden, layer.mlp_norm, step), step)
    return hidden


def turned(rows: int, columns: int, head_dim: int, theta: float) -> dict[str, torch.Tensor]:
    """The rope over rows and columns, as a step has it: pairs of a head turn by row and by column, every other frequency each."""
    frequencies = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    down = np.repeat(np.arange(rows, dtype=np.float32), columns)[:, None] * frequencies[0::2]
    across = np.tile(np.arange(columns, dtype=np.float32), rows)[:, None] * frequencies[1::2]
    angles = np.concatenate((down, across), axis=1).astype(np.float64)
    return {"cosine": as_tensor(np.cos(angles).astype(np.float32)), "sine": as_tensor(np.sin(angles).astype(np.float32))}


def squares(passing: Passing, by: int) -> torch.Tensor:
    """States of each square of by * by patches side by side, row by row: [N, squares, by * by, hidden]."""
    count, _, hidden = passing.states.shape
    cut = passing.states.reshape(count, passing.rows // by, by, passing.columns // by, by, hidden)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(count, -1, by * by, hidden)


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
