"""The Llama family as pure functions over arrays: token ids in, hidden states and logits out.

Owns the order of operations and the parameters' shape. Knows no ranks (it calls the collectives of `parallel`), no
requests and no files; parameters come as a tree of tensors, the cache is threaded through and donated: it is updated
in place and the returned one is the only one to be used. In each layer all writes precede the attention's reads,
since rows of one step may share a block that this very step fills.
Biases are added apart from the products: a fused addition rounds otherwise for one row than for many.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from vnext.kernels.table import Operations, operations
from vnext.models.batch import ForwardBatch, host_batch
from vnext.models.config import ModelConfig
from vnext.models.kv_cache import KvCache, kv_bytes_per_block, make_kv_cache
from vnext.models.rope import inverse_frequencies, rotary_angles
from vnext.models.sharding import Parallel, local_heads, local_kv_heads

__all__ = ["Params", "assemble", "forward", "kv_bytes_per_block", "logits", "make_kv_cache"]


class Linear(NamedTuple):
    """weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class LayerParams(NamedTuple):
    """One decoder layer. `qkv` and `gate_up` are column-parallel and fused, `output` and `down` row-parallel."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Params(NamedTuple):
    """One rank's weights. `head` is the same tensor as `embedding` when they are tied; frequencies are float32."""

    embedding: torch.Tensor
    layers: tuple[LayerParams, ...]
    norm: torch.Tensor
    head: torch.Tensor
    frequencies: torch.Tensor


class Source(Protocol):
    """Where weights come from: this rank's part of named tensors, in the wanted dtype and place."""

    def fused(self, names: tuple[str, ...]) -> torch.Tensor:
        """The parts of these tensors, one below the other."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A computed tensor, moved to the device with its dtype kept."""


class Step(NamedTuple):
    """What every layer of one step needs beside its weights."""

    operations: Operations
    config: ModelConfig
    parallel: Parallel
    slots: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    metadata: NamedTuple


def assemble(source: Source, config: ModelConfig) -> Params:
    """Build the parameters from a source of checkpoint tensors under Hugging Face's names."""
    embedding = source.fused(("model.embed_tokens.weight",))
    return Params(
        embedding=embedding,
        layers=tuple(assemble_layer(source, config, f"model.layers.{index}.") for index in range(config.layer_count)),
        norm=source.fused(("model.norm.weight",)),
        head=embedding if config.tie_embeddings else source.fused(("lm_head.weight",)),
        frequencies=source.place(inverse_frequencies(config)),
    )


def assemble_layer(source: Source, config: ModelConfig, prefix: str) -> LayerParams:
    """One layer's parameters; `prefix` ends with a dot."""

    def linear(bias: bool, *modules: str) -> Linear:
        weight = source.fused(tuple(f"{prefix}{module}.weight" for module in modules))
        return Linear(weight, source.fused(tuple(f"{prefix}{module}.bias" for module in modules)) if bias else None)

    attention, mlp = config.attention_bias, config.mlp_bias
    return LayerParams(
        attention_norm=source.fused((prefix + "input_layernorm.weight",)),
        qkv=linear(attention, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=linear(attention, "self_attn.o_proj"),
        mlp_norm=source.fused((prefix + "post_attention_layernorm.weight",)),
        gate_up=linear(mlp, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(mlp, "mlp.down_proj"),
    )


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    step = prepare(params, kv, batch, config, parallel)
    residual = embed(params.embedding, batch.token_ids, parallel)
    normed = step.operations.rms_norm(residual, params.layers[0].attention_norm, config.rms_norm_eps)
    next_norms = [layer.attention_norm for layer in params.layers[1:]] + [params.norm]
    for layer, cache, next_norm in zip(params.layers, kv, next_norms):
        normed, residual = run_layer(layer, cache, normed, residual, next_norm, step)
    return normed.index_select(0, batch.sample_at), kv


def prepare(params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel) -> Step:
    """Make once what all layers share."""
    chosen = operations(batch.token_ids.device.type)
    _, kv_heads, block_size, _ = kv[0][0].shape
    cosine, sine = rotary_angles(batch.positions, params.frequencies)
    metadata = chosen.attention_metadata(*host_batch(batch), batch.block_table, block_size, kv_heads)
    return Step(chosen, config, parallel, batch.slots, cosine, sine, metadata)


def run_layer(
    layer: LayerParams,
    cache: tuple[torch.Tensor, torch.Tensor],
    normed: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    step: Step,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on [T, hidden]: (input of the next layer, already normed; residual stream)."""
    eps = step.config.rms_norm_eps
    mixed = attention(layer, cache, normed, step)
    normed, residual = step.operations.add_rms_norm(mixed, residual, layer.mlp_norm, eps)
    widened = step.operations.silu_and_mul(column(normed, layer.gate_up))
    return step.operations.add_rms_norm(row(widened, layer.down, step.parallel), residual, next_norm, eps)


def attention(
    layer: LayerParams, cache: tuple[torch.Tensor, torch.Tensor], normed: torch.Tensor, step: Step
) -> torch.Tensor:
    """Self-attention of [T, hidden]: writes this step's keys and values, then reads the whole contexts."""
    head_dim, ranks = step.config.head_dim, step.parallel.world_size
    heads, kv_heads = local_heads(step.config, ranks), local_kv_heads(step.config, ranks)
    joined = column(normed, layer.qkv).view(-1, heads + 2 * kv_heads, head_dim)
    query, key, value = joined.split((heads, kv_heads, kv_heads), dim=1)
    query, key = step.operations.rotary(query, key, step.cosine, step.sine)
    step.operations.kv_write(key, value, *cache, step.slots)
    seen = step.operations.paged_attention(query, *cache, step.metadata, head_dim**-0.5)
    return row(seen.view(-1, heads * head_dim), layer.output, step.parallel)


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], whole on every rank."""
    local = functional.linear(hidden, params.head).float()
    return parallel.all_gather(local, 1)[:, : config.vocab_size]


def embed(embedding: torch.Tensor, token_ids: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Rows of the vocabulary-parallel embedding [V_local, hidden]: ids held elsewhere give zeros, summed over ranks."""
    if parallel.world_size == 1:
        return embedding.index_select(0, token_ids)
    local = token_ids - parallel.rank * embedding.shape[0]
    elsewhere = (local < 0) | (local >= embedding.shape[0])
    rows = embedding.index_select(0, local.masked_fill(elsewhere, 0))
    return parallel.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))


def column(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """[T, in] -> [T, out_local]: each rank computes its own outputs."""
    product = functional.linear(x, linear.weight)
    return product if linear.bias is None else product.add_(linear.bias)


def row(x: torch.Tensor, linear: Linear, parallel: Parallel) -> torch.Tensor:
    """[T, in_local] -> [T, out]: partial sums over the ranks' inputs, then the bias, once."""
    product = parallel.all_reduce(functional.linear(x, linear.weight))
    return product if linear.bias is None else product + linear.bias
