"""The layer of a draft head: what heads share behind their own way of reading a token and the state of the token before.

Writes keys and values of all its tokens; only sampled tokens go on to attention and MLP. A head has one layer, whole on each rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite
from vnext.kernels.table import operations
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch, host_batch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Attention, GatedMlp
from vnext.models.layers.rope import rotary_angles


class HeadLayer(NamedTuple):
    """`norm` [hidden] follows the layer."""

    attention: Attention
    mlp_norm: torch.Tensor
    mlp: GatedMlp
    norm: torch.Tensor
    frequencies: torch.Tensor


class HeadBatch(NamedTuple):
    """What a head computes: `embeddings` of the tokens and `states` of those before them, [T, hidden] each.

    `rows`: its cache has pages of one token. Queries, their starts, contexts and the table are of the tokens at sample_at
    alone: only they go on after their keys and values are written. Prepared attention is theirs too.
    """

    rows: ForwardBatch
    embeddings: torch.Tensor
    states: torch.Tensor


def run_head_layer(
    layer: HeadLayer, kv: KvCache, rows: ForwardBatch, inputs: torch.Tensor, residual: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the tokens' keys and values, made of `inputs` [T, in], and of the tokens at sample_at give (normed hidden states, the
    sum of `residual` [T, hidden] and what the layer adds), [S, hidden] each."""
    chosen, eps = operations(inputs.device.type), config.rms_norm_eps
    qkv = chosen.linear(inputs, layer.attention.qkv.weight, layer.attention.qkv.bias)
    angles = rotary_angles(rows.positions, layer.frequencies, config.rope)
    query = chosen.rotary_kv_write(qkv, RotaryWrite(None, None, eps, *angles, *kv[0], rows.slots))
    residual = residual.index_select(0, rows.sample_at)
    if not len(rows.sample_at):
        return residual, residual
    if rows.attention is not None:
        (metadata,) = rows.attention.metadata
    else:
        metadata = chosen.attention_metadata(AttentionStep(*host_batch(rows), rows.block_table, 1, config.kv_head_count))
    call = AttentionCall(*kv[0], metadata, config.head_dim**-0.5)
    seen = chosen.paged_attention(query.index_select(0, rows.sample_at), call)
    mixed = chosen.linear(seen.flatten(1), layer.attention.output.weight, layer.attention.output.bias)
    normed, residual = chosen.add_rms_norm(mixed, residual, layer.mlp_norm, eps)
    widened = chosen.gated_linear(normed, layer.mlp.gate_up.weight, layer.mlp.gate_up.bias, config.activation)
    added = chosen.linear(widened, layer.mlp.down.weight, layer.mlp.down.bias)
    return chosen.add_rms_norm(added, residual, layer.norm, eps)
