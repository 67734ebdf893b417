"""OLMo 2, 3, OLMoE, FlexOlmo: norms over all heads and, but in OLMoE, behind attention and MLP.

Norm weights multiply in float32 before rounding, so they are kept in float32. Three layers of four have a window in OLMo 3, which
stretches the rope of the others.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.json_keys import Json, flag, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import two_ropes
from vnext.models.layers.assembly import Source, any_mlp, attention, rms_norm, wide_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout

WEIGHT_AXES = MappingProxyType(
    {"q_norm": Layout((Axis.HEADS,)), "k_norm": Layout((Axis.KV_HEADS,)), "post_feedforward_layernorm": Layout((Axis.HIDDEN,))}
)
OLMOE = "OlmoeForCausalLM"
FLEX = "FlexOlmoForCausalLM"
FLEX_DEFAULTS = usual(max_position_embeddings=4096, rope_theta=5e5, num_experts=7, num_experts_per_tok=5, eos_token_id=100257)
OLMOE_DEFAULTS = usual(max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
DEFAULTS = usual(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
NAMES = Names(
    attention_norm="",
    after_attention_norm="post_attention_layernorm",
    mlp_norm="",
    after_mlp_norm="post_feedforward_layernorm",
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    if raw["architectures"][0] == OLMOE:
        return _olmoe(OLMOE_DEFAULTS | raw, generation)
    if raw["architectures"][0] == FLEX:
        return _olmoe(FLEX_DEFAULTS | raw, generation)
    raw, form = DEFAULTS | raw, DecoderForm(head_norms="all")
    if raw["architectures"][0] == "Olmo2ForCausalLM":
        return common_config(raw, generation, form=form)
    theta, usual = raw.get("rope_theta") or 5e5, positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    rope, local = two_ropes(raw, positive(raw, "head_dim", usual), theta, theta)
    return common_config(
        raw, generation, form=form, windows=windows(raw), rope=rope, local_rope=local if local != rope else None
    )


def _olmoe(raw: Json, generation: Json) -> ModelConfig:
    refuse(raw, "clip_qkv", unless=())
    experts = Experts(
        count=positive(raw, "num_experts"),
        intermediate_size=positive(raw, "intermediate_size"),
        router=Router(positive(raw, "num_experts_per_tok"), flag(raw, "norm_topk_prob")),
    )
    return common_config(raw, generation, form=DecoderForm(head_norms="all"), experts=experts)


def windows(raw: Json) -> tuple[int, ...]:
    """Three layers of four have one, or all but every n-th, or those marked L by letters that come again, the last one never; or
    those that layer_types names."""
    count, pattern = positive(raw, "num_hidden_layers"), raw.get("sliding_window_pattern") or 4
    if raw.get("sliding_window") is None:
        return (0,) * count
    if isinstance(pattern, str):
        have = [index != count - 1 and pattern[index % len(pattern)] == "L" for index in range(count)]
    else:
        have = [(index + 1) % pattern != 0 for index in range(count)]
    return layer_windows(raw, ["sliding_attention" if each else "full_attention" for each in have])


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(prefix: str) -> Attention:
        bias, here = config.attention_bias, prefix + "self_attn."
        plain = attention(source, prefix, qkv_bias=bias, output_bias=bias)
        return plain._replace(q_norm=wide_norm(source, here + "q_norm"), k_norm=wide_norm(source, here + "k_norm"))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix), any_mlp(source, config, prefix, index)),
        Names() if config.architecture == OLMOE else NAMES,
        rms_norm if config.architecture == OLMOE else wide_norm,
    )
