"""The encoder: token ids in, states out; each token sees all of its text, which one step computes whole.

Owns the order of operations where norms stand behind what is added. Encoders of another order are decoders (decoder.py) that see to
both sides (both_sides.py). The pages hold a text's keys for one step alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch, host_batch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Attention, Mlp, Norm, attention, embed, layer_steps, mlp, norm_of
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    import torch


class EncoderLayer(NamedTuple):
    """A norm stands behind what attention or MLP is added to."""

    attention: Attention
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm


class EncoderParams(NamedTuple):
    """One rank's weights. `positions` [N, hidden] and `types` [K, hidden] are added to the embedding, whose norm is `norm`;
    `frequencies` float32 [R / 2] turn what has no positions. It has no `head`, and no `stack` of layers is one call."""

    embedding: Any
    positions: Array | None
    types: Array | None
    norm: Norm
    layers: tuple[EncoderLayer, ...]
    head: tuple[()] = ()
    frequencies: Array | None = None
    stack: None = None


def forward(
    params: EncoderParams, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step of whole texts: (states [S, hidden] at batch.sample_at, the cache)."""
    steps = layer_steps(kv, batch, config, parallel, params.frequencies)
    hidden = norm_of(embedded(params, batch, config, parallel), params.norm, steps[0])
    for layer, cache, step in zip(params.layers, kv, steps):
        hidden = norm_of(hidden + attention(layer.attention, cache, hidden, step), layer.attention_norm, step)
        hidden = norm_of(hidden + mlp(layer.mlp, hidden, step), layer.mlp_norm, step)
    return hidden.index_select(0, batch.sample_at), kv


def logits(params: Any, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Float32 [S, vocab_size] zeros: a request of the engine ends with a token, which is not read."""
    return hidden.new_zeros((len(hidden), 1)).float().expand(-1, config.vocab_size).contiguous()


def embedded(params: EncoderParams, batch: ForwardBatch, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """What the tokens and their places and types add up to, [T, hidden]."""
    assert config.encoder is not None
    hidden = embed(params.embedding, batch.token_ids, parallel)
    if params.types is not None:
        hidden = hidden + (params.types[:1] if config.encoder.separator is None else params.types[types_of(batch, config.encoder)])
    if params.positions is None:
        return hidden
    placed: torch.Tensor = hidden + params.positions.index_select(0, batch.positions + config.encoder.first_position)
    return placed


def types_of(batch: ForwardBatch, encoder: Encoder) -> torch.Tensor:
    """int64 [T]: 1 for each token that has a separator before it in its text, else 0."""
    starts = host_batch(batch)[0]
    ends = (batch.token_ids == encoder.separator).long()
    before = ends.cumsum(0) - ends
    first = before.new_tensor(np.repeat(starts[:-1], np.diff(starts)))
    found: torch.Tensor = (before - before.index_select(0, first)).clamp(max=1)
    return found
