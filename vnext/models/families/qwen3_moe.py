"""Qwen 3 with experts in most layers."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag, positive, shown
from vnext.models.config.model_config import Experts, ModelConfig, common_config, same_window
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, attention, gated_mlp, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import GatedMlp, SparseMlp
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        "gate": matrix(Axis.EXPERTS, Axis.HIDDEN),
        "experts.gate_proj": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "experts.up_proj": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "experts.down_proj": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
    }
)
DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    }
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; newer files say num_local_experts for num_experts. Raises ModelError."""
    raw = DEFAULTS | raw
    windows = same_window(raw) if flag(raw, "use_sliding_window") else ()
    count = positive(raw, "num_experts", raw.get("num_local_experts", 128))
    experts = Experts(
        count=count,
        per_token=positive(raw, "num_experts_per_tok"),
        intermediate_size=positive(raw, "moe_intermediate_size"),
        normalise=flag(raw, "norm_topk_prob"),
        dense_layers=dense_layers(raw),
    )
    return common_config(raw, generation, windows=windows, experts=experts)


def dense_layers(raw: Json) -> tuple[int, ...]:
    """Layers with a plain MLP: those named, and those between every decoder_sparse_step-th."""
    named, step = raw.get("mlp_only_layers") or [], positive(raw, "decoder_sparse_step", 1)
    if not isinstance(named, list):
        raise ModelError(f"mlp_only_layers must be a list of layers but is {shown(named)}; correct config.json")
    count = positive(raw, "num_hidden_layers")
    return tuple(index for index in range(count) if index in named or (index + 1) % step)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    bias, dense = config.attention_bias, config.experts.dense_layers

    def widening(prefix: str, index: int) -> GatedMlp | SparseMlp:
        if index in dense:
            return gated_mlp(source, prefix)
        return sparse_mlp(source, config, prefix + "mlp.", "gate_proj", "up_proj", "down_proj")

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            attention(source, prefix, qkv_bias=bias, output_bias=bias, head_norms=True),
            widening(prefix, index),
        ),
    )
