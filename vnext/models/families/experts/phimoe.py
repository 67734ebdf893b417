"""Phi 3.5 MoE: layer norms, SparseMixer's router."""

from __future__ import annotations

from msgspec.structs import replace

from vnext.kernels.calls import Router
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, same_window
from vnext.models.config.rope_config import Rope, parse_rope, scaling_of
from vnext.models.layers.assembly import MIXTRAL, MIXTRAL_PREFIX, Source, layer_norm, own_attention, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.sharding import MIXTRAL_AXES

WEIGHT_AXES = MIXTRAL_AXES
BIAS = "lm_head.bias"
DEFAULTS = usual(
    vocab_size=32064, hidden_size=4096, intermediate_size=6400, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6, bos_token_id=1, eos_token_id=2,
    num_local_experts=16, router_jitter_noise=0.01,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "num_experts_per_tok", unless=(2,))
    experts = Experts(
        count=positive(raw, "num_local_experts"),
        intermediate_size=positive(raw, "intermediate_size"),
        router=Router(2, False, marks="mixer", margin=2 * number(raw, "router_jitter_noise")),
    )
    form = DecoderForm(output_bias=flag(raw, "attention_bias"), head_bias=flag(raw, "lm_head_bias"))
    return common_config(raw, generation, rope=own_rope(raw), windows=same_window(raw), experts=experts, form=form)


def own_rope(raw: Json) -> Rope:
    """The rope; longrope's factor of cosines and sines has keys of its own. Raises ModelError."""
    scaling, usual = scaling_of(raw), positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    rope = parse_rope(raw, scaling, positive(raw, "head_dim", usual))
    if rope.kind == "default":
        return rope
    refuse({"rope_type": rope.kind}, "rope_type", unless=("longrope",))
    return replace(rope, attention_factor=number(scaling, "long_mscale" if rope.beyond else "short_mscale"))


def assemble(source: Source, config: ModelConfig) -> Params:
    params = assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            own_attention(source, config, prefix),
            sparse_mlp(source, config, prefix + MIXTRAL_PREFIX, MIXTRAL),
        ),
        norm=layer_norm,
    )
    return params._replace(head_bias=source.wide(BIAS)) if config.form.head_bias and config.is_last else params
