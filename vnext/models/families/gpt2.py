"""GPT-2: learned positions, layer norms, biases everywhere, a plain MLP, weights stored as [in, out].

The fused projection of queries, keys and values is cut into heads as the sharding table says. Norm weights are kept in
float32, in which a layer norm works anyway.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vnext.models.config.json_keys import positive, refuse
from vnext.models.config.model_config import ModelConfig, activation, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, embeddings, linear
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import (
    Attention,
    LayerCache,
    Linear,
    Step,
    attention as attention_layer,
    embed,
    keep_input,
    keep_output,
    layer_steps,
    output_logits,
    row,
)
from vnext.models.layers.sharding import Axis, Layout, Parallel, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        "wte": matrix(Axis.VOCAB, Axis.HIDDEN),
        "lm_head": matrix(Axis.VOCAB, Axis.HIDDEN),
        "wpe": matrix(Axis.POSITIONS, Axis.HIDDEN),
        "ln_1": Layout((Axis.HIDDEN,)),
        "ln_2": Layout((Axis.HIDDEN,)),
        "ln_f": Layout((Axis.HIDDEN,)),
        "attn.c_attn": matrix((Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS), Axis.HIDDEN, flipped=True),
        "attn.c_proj": matrix(Axis.HIDDEN, Axis.HEADS, flipped=True),
        "mlp.c_fc": matrix(Axis.MLP, Axis.HIDDEN, flipped=True),
        "mlp.c_proj": matrix(Axis.HIDDEN, Axis.MLP, flipped=True),
    }
)
DEFAULTS = MappingProxyType(
    {
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
)


class Norm(NamedTuple):
    """A layer norm: weight and bias float32 [hidden]."""

    weight: torch.Tensor
    bias: torch.Tensor


class LayerParams(NamedTuple):
    """One decoder layer; `widen` is column-parallel, `narrow` row-parallel."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    widen: Linear
    narrow: Linear


class Params(NamedTuple):
    """One rank's weights; `positions` [position_count_max, hidden] is whole on every rank."""

    embedding: Any
    positions: torch.Tensor
    layers: tuple[LayerParams, ...]
    norm: Norm
    head: Any


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration, from GPT-2's own names. Raises ModelError."""
    raw = DEFAULTS | raw
    refuse(raw, "scale_attn_weights", unless=(True,))
    refuse(raw, "scale_attn_by_inverse_layer_idx", unless=(False,))
    refuse(raw, "add_cross_attention", unless=(False,))
    if activation(raw, "activation_function") != "gelu_tanh":
        raise ModelError(f"activation_function {raw['activation_function']!r} is not supported; supported is gelu_new")
    hidden_size = positive(raw, "n_embd")
    named = {
        "hidden_size": hidden_size,
        "num_attention_heads": positive(raw, "n_head"),
        "num_hidden_layers": positive(raw, "n_layer"),
        "intermediate_size": positive(raw, "n_inner", 4 * hidden_size),
        "max_position_embeddings": positive(raw, "n_positions"),
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "hidden_act": raw["activation_function"],
    }
    return common_config(raw | named, generation)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters; the first checkpoints leave the prefix "transformer." out."""
    root = "transformer." if "transformer.wpe.weight" in source else ""

    def norm(name: str) -> Norm:
        return Norm(source.wide(name + ".weight"), source.wide(name + ".bias"))

    def layer(prefix: str) -> LayerParams:
        return LayerParams(
            attention_norm=norm(prefix + "ln_1"),
            attention=Attention(
                qkv=linear(source, prefix, "attn.c_attn", bias=True),
                output=linear(source, prefix, "attn.c_proj", bias=True),
            ),
            mlp_norm=norm(prefix + "ln_2"),
            widen=linear(source, prefix, "mlp.c_fc", bias=True),
            narrow=linear(source, prefix, "mlp.c_proj", bias=True),
        )

    embedding, head = embeddings(source, config, root + "wte.weight")
    return Params(
        embedding=embedding,
        positions=source.fused((root + "wpe.weight",)),
        layers=tuple(layer(f"{root}h.{index}.") for index in config.layer_numbers),
        norm=norm(root + "ln_f"),
        head=head,
    )


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    steps = layer_steps(kv, batch, config, parallel, None)
    if (hidden := batch.states) is None:
        hidden = embed(params.embedding, batch.token_ids, parallel) + params.positions.index_select(0, batch.positions)
    for layer, cache, step in zip(params.layers, kv, steps):
        keep_input(hidden, step)
        hidden = run_layer(layer, cache, hidden, step)
    keep_output(hidden, steps[-1])
    return steps[0].operations.layer_norm(
        hidden.index_select(0, batch.sample_at), *params.norm, config.rms_norm_eps
    ), kv


def run_layer(layer: LayerParams, cache: LayerCache, hidden: torch.Tensor, step: Step) -> torch.Tensor:
    """One layer on the residual stream [T, hidden]."""
    chosen, eps = step.operations, step.config.rms_norm_eps
    normed = chosen.layer_norm(hidden, *layer.attention_norm, eps)
    hidden = hidden + attention_layer(layer.attention, cache, normed, step)
    normed = chosen.layer_norm(hidden, *layer.mlp_norm, eps)
    widened = chosen.gelu_tanh(chosen.linear(normed, layer.widen.weight, layer.widen.bias))
    return hidden + row(widened, layer.narrow, step)


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], whole on every rank."""
    return output_logits(params.head, hidden, config, parallel)
