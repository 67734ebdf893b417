"""Flint: sinks, windows, experts marked by sigmoids; no rope without a window."""

from __future__ import annotations

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, dense_layers
from vnext.models.config.json_keys import Json, flag, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention, wide_norm
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Layout, LayoutTable, Sized, shared_axes

EXPERTS = ExpertNames(shared="shared_expert")
SINKS = "softmax_offset"
DEFAULTS = usual(
    num_key_value_heads=4, head_dim=128, max_position_embeddings=262144, sliding_window=513, moe_intermediate_size=512,
    shared_expert_intermediate_size=1024, num_experts_per_tok=6, num_experts=256, norm_topk_prob=True, mlp_only_layers=[0, 1],
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts. A rank has the sinks of its heads."""
    return {**shared_axes("shared_expert"), SINKS: Layout((Sized(config.head_count, is_split=True),))}


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "attention_bias", unless=(False,))
    count = positive(raw, "num_hidden_layers")
    whole = {layer for layer in range(count) if layer < 2 or layer % 4 == 1 or layer == count - 1}
    windows = layer_windows(raw, [f"{'full' if layer in whole else 'sliding'}_attention" for layer in range(count)])
    experts = Experts(
        count=positive(raw, "num_experts"),
        intermediate_size=positive(raw, "moe_intermediate_size"),
        router=Router(positive(raw, "num_experts_per_tok"), flag(raw, "norm_topk_prob"), marks="sigmoid"),
        dense_layers=dense_layers(raw),
        shared_size=positive(raw, "shared_expert_intermediate_size"),
    )
    return common_config(
        raw,
        generation,
        windows=windows,
        still_layers=tuple(layer for layer in range(count) if not windows[layer]) if any(windows) else tuple(range(count)),
        experts=checked(experts),
        form=DecoderForm(has_sinks=True),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(prefix: str) -> Attention:
        here = prefix + "self_attn."
        query, key = (wide_norm(source, f"{here}{name}_norm") for name in "qk")
        return attention(source, prefix)._replace(q_norm=query, k_norm=key, sinks=source.wide(here + SINKS))

    return assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix), any_mlp(source, config, prefix, index, EXPERTS)), norm=wide_norm
    )
