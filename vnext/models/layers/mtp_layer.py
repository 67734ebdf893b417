"""A layer for multi-token prediction, as DeepSeek 3 has it: any layer that attends, behind a product of a token's embedding and the
model's state of the token before.

Writes what its cache keeps of all its tokens; only sampled tokens go on to attention and MLP. Whole on each rank. Source: DeepSeek,
"DeepSeek-V3" (2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vnext.kernels.calls import AttentionStep
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import host_batch
from vnext.models.layers.decoder_params import LayerParams
from vnext.models.layers.heads import projected
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.latent import LatentAttention, attended, written as latent_written
from vnext.models.layers.layers import Attention, Norm, Step, add_and_norm, mlp, norm_of, operations, read_and_join, written
from vnext.models.layers.rope import rotary_angles
from vnext.models.layers.sharding import alone

if TYPE_CHECKING:
    import torch

    from vnext.kernels.arrays import Array
    from vnext.models.layers.head_layer import HeadBatch


class MtpParams(NamedTuple):
    """The layer that drafts. `project` packed [hidden, 2 * hidden]: first the embedding, then the state, which both are normed; the
    model's states by `last_norm` before. `norm` follows the layer. `frequencies`: None where nothing turns."""

    last_norm: Norm
    embedding_norm: Norm
    state_norm: Norm
    project: Any
    layer: LayerParams
    norm: Norm
    frequencies: Array | None


def combine_mtp(params: MtpParams, states: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The model's states [T, 1, hidden], normed."""
    found: torch.Tensor = operations(states.device.type).rms_norm(states.flatten(1), params.last_norm, config.rms_norm_eps)
    return found


def forward_mtp(params: MtpParams, kv: KvCache, batch: HeadBatch, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the tokens' rows, and of those at sample_at give (normed hidden states, states for the next), [S, hidden] each, which
    are the same."""
    chosen, rows, layer, eps = operations(batch.states.device.type), batch.rows, params.layer, config.rms_norm_eps
    joined = batch.states.new_empty((batch.states.shape[0], 2 * config.hidden_size))
    joined[:, : config.hidden_size] = chosen.rms_norm(batch.embeddings, params.embedding_norm, eps)
    joined[:, config.hidden_size :] = chosen.rms_norm(batch.states, params.state_norm, eps)
    hidden = chosen.linear(joined, params.project, None)
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    step = Step(chosen, config, alone(), rows.slots, None, None, None, scale, 0)
    if params.frequencies is not None:
        cosine, sine = rotary_angles(rows.positions, params.frequencies, config.rope)
        step = step._replace(cosine=cosine, sine=sine)
    mixed = mix_sampled(layer, kv, batch, norm_of(hidden, layer.attention_norm, step), step)
    residual = hidden.index_select(0, rows.sample_at)
    if mixed is None:
        return residual, residual
    normed, residual = add_and_norm(mixed, residual, layer.mlp_norm, step)
    assert layer.mlp is not None
    drafted, _ = add_and_norm(mlp(layer.mlp, normed, step), residual, params.norm, step)
    return drafted, drafted


def mix_sampled(layer: LayerParams, kv: KvCache, batch: HeadBatch, x: torch.Tensor, step: Step) -> torch.Tensor | None:
    """Write what the cache keeps of x [T, hidden] -> what the tokens at sample_at see, [S, hidden]; None where none is sampled."""
    rows, own, (cache,) = batch.rows, layer.attention, kv
    gates = selection = None
    if isinstance(own, LatentAttention):
        gates = own.gates and step.operations.linear(x, own.gates.weight, None)
        query, selection, _ = latent_written(own, cache, x, step)
    else:
        assert isinstance(own, Attention)
        qkv, own, gates, step = projected(own, cache, x, step)
        query = written(qkv, own, cache, step)
    if not len(rows.sample_at):
        return None
    prepared = rows.attention.metadata[0] if rows.attention is not None else None
    asked = AttentionStep(*host_batch(rows), rows.block_table, 1, step.config.kv_head_count)
    step = step._replace(metadata=prepared or step.operations.attention_metadata(asked))
    query, gates = query.index_select(0, rows.sample_at), None if gates is None else gates.index_select(0, rows.sample_at)
    if not isinstance(own, LatentAttention):
        return read_and_join(query, own, cache, step, gates)
    if selection is not None:
        asking, weights = (each.index_select(0, rows.sample_at) for each in (selection.query, selection.weights))
        selection = selection._replace(query=asking, weights=weights)
    return attended(own, cache, query, step, gates, selection)
