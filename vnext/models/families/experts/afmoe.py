"""Trinity (AFMoE): GLM 4.5's router, gates behind attention, norms on both sides; no rope without a window."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.expert_keys import first_layers, sigmoid_experts
from vnext.models.config.json_keys import Json, flag, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, linear, wide_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, matrix, shared_axes

WEIGHT_AXES = MappingProxyType(
    {
        **shared_axes("shared_experts"),
        "self_attn.gate_proj": matrix(Axis.HEADS, Axis.HIDDEN),
        "expert_bias": Layout((Axis.EXPERTS,)),
        **dict.fromkeys(("pre_mlp_layernorm", "post_mlp_layernorm"), Layout((Axis.HIDDEN,))),
    }
)
NAMES = Names(
    after_attention_norm="post_attention_layernorm", mlp_norm="pre_mlp_layernorm", after_mlp_norm="post_mlp_layernorm"
)  # fmt: skip
EXPERTS = ExpertNames(router="router.gate", bias="expert_bias", shared="shared_experts")
DEFAULTS = usual(
    head_dim=128, max_position_embeddings=16384, rms_norm_eps=1e-5, sliding_window=1024, num_dense_layers=1,
    moe_intermediate_size=1408, num_experts=64, num_experts_per_tok=6, num_shared_experts=2, route_scale=1.0,
    global_attn_every_n_layers=4,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "attention_bias", unless=(False,))
    count, interval = positive(raw, "num_hidden_layers"), positive(raw, "global_attn_every_n_layers")
    windows = layer_windows(raw, ["sliding_attention" if (at + 1) % interval else "full_attention" for at in range(count)])
    named = {
        "n_routed_experts": raw["num_experts"], "n_shared_experts": raw["num_shared_experts"], "norm_topk_prob": True,
        "routed_scaling_factor": raw["route_scale"],
    }  # fmt: skip
    form = DecoderForm(
        embedding_scale=positive(raw, "hidden_size") ** 0.5 if flag(raw, "mup_enabled") else 1.0,
        is_gated=True,
        gates_apart=True,
    )
    return common_config(
        raw,
        generation,
        form=form,
        windows=windows,
        still_layers=tuple(layer for layer in range(count) if not windows[layer]),
        experts=sigmoid_experts(raw | named, first_layers(raw, "num_dense_layers")),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(here: str) -> Attention:
        return Attention(
            qkv=linear(source, here, "q_proj", "gate_proj", "k_proj", "v_proj"),
            output=linear(source, here, "o_proj"),
            q_norm=wide_norm(source, here + "q_norm"),
            k_norm=wide_norm(source, here + "k_norm"),
        )

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix + "self_attn."), any_mlp(source, config, prefix, index, EXPERTS)),
        NAMES,
        wide_norm,
    )
