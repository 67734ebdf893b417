"""gpt-oss: experts with biases and a clamped gate, sinks, windows in every other layer.

The published checkpoints hold experts in MXFP4 (loading/joined_experts.py).
"""

from __future__ import annotations

from vnext.kernels.calls import BiasedExperts, Router
from vnext.models.config.json_keys import Json, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import Source, own_attention, wide_norm
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention, SparseMlp
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix

MXFP4_GROUP = 32
DEFAULTS = usual(
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=150000.0,
    num_local_experts=128, num_experts_per_tok=4, sliding_window=128, attention_bias=True,
    rope_parameters={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts. A rank has the sinks of its heads."""
    sinks = Layout((Sized(config.head_count, is_split=True),))
    return {"router": matrix(Axis.EXPERTS, Axis.HIDDEN), "sinks": sinks}


def parse(raw: Json, generation: Json) -> ModelConfig:
    refuse(raw, "hidden_act", unless=("silu",))
    refuse(raw, "swiglu_alpha", unless=(1.702,))
    refuse(raw, "swiglu_limit", unless=(7.0,))
    refuse(raw, "attention_bias", unless=(True,))
    if "rope_scaling" in raw:
        raw = {"rope_parameters": None} | raw
    raw = DEFAULTS | raw
    experts = Experts(
        count=positive(raw, "num_local_experts"),
        intermediate_size=positive(raw, "intermediate_size"),
        router=Router(positive(raw, "num_experts_per_tok"), True),
        whole_group=MXFP4_GROUP,
    )
    count = positive(raw, "num_hidden_layers")
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    return common_config(
        raw, generation, windows=layer_windows(raw, kinds), experts=experts, activation="swiglu_clamped",
        form=DecoderForm(output_bias=True, has_sinks=True),
    )  # fmt: skip


def assemble(source: Source, config: ModelConfig) -> Params:
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (_attention(source, config, prefix), _experts(source, config, prefix + "mlp.")),
        norm=wide_norm,
    )


def _attention(source: Source, config: ModelConfig, prefix: str) -> Attention:
    return own_attention(source, config, prefix)._replace(sinks=source.wide(prefix + "self_attn.sinks"))


def _experts(source: Source, config: ModelConfig, here: str) -> SparseMlp:
    """The router stays exact, as that of `assembly.sparse_mlp`."""
    assert config.experts is not None
    experts = [f"{here}experts.{index}." for index in range(config.experts.count)]

    def stacked(*parts: str) -> BiasedExperts:
        groups = tuple(tuple(expert + part for part in parts) for expert in experts)
        weights = source.stacked(tuple(tuple(f"{part}.weight" for part in group) for group in groups), False)
        return BiasedExperts(weights, tuple(source.fused(tuple(f"{part}.bias" for part in group)) for group in groups))

    return SparseMlp(
        router=source.packed((here + "router.weight",), exact=True),
        gate_up=stacked("gate_proj", "up_proj"),
        down=stacked("down_proj"),
        score_bias=source.wide(here + "router.bias"),
    )
