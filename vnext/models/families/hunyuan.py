"""Hunyuan, dense or with experts and a shared one: norms over turned heads."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked
from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config
from vnext.models.config.rope_config import Rope, parse_rope, scaling_of
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention, rms_norm
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, matrix, shared_axes

WEIGHT_AXES = MappingProxyType(
    {
        **shared_axes("shared_mlp"),
        **dict.fromkeys(("query_layernorm", "key_layernorm"), Layout((Axis.HEAD_DIM,))),
        "wg": matrix(Axis.EXPERTS, Axis.HIDDEN),
    }
)
DEFAULTS = usual(rms_norm_eps=1e-5)
EXPERT_DEFAULTS = usual(num_experts=1, moe_topk=1)
SPARSE = "HunYuanMoEV1ForCausalLM"
NAMES = ExpertNames(router="gate.wg", shared="shared_mlp")


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "use_qk_norm", unless=(True,))
    refuse(raw, "use_cla", unless=(False,))
    experts = own_experts(raw) if raw["architectures"][0] == SPARSE else None
    return common_config(raw, generation, rope=own_rope(raw), form=DecoderForm(head_norms="turned"), experts=experts)


def own_experts(raw: Json) -> Experts:
    """The experts; older files say by layer what is one for all. Raises ModelError."""
    wide, experts = positive(raw, "intermediate_size"), EXPERT_DEFAULTS | raw
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        if isinstance(values := experts.get(key), list):
            experts[key] = values[0] if values else 0
            refuse({key: tuple(values)}, key, unless=((experts[key],) * len(values),))
    refuse(experts, "moe_intermediate_size", unless=(wide,))
    refuse(experts, "num_shared_expert", unless=(1,))
    router = Router(positive(experts, "moe_topk"), True)
    return checked(Experts(count=positive(experts, "num_experts"), intermediate_size=wide, router=router, shared_size=wide))


def own_rope(raw: Json) -> Rope:
    """The rope; with `alpha` its base is stretched, whatever the context's length."""
    scaling, usual = scaling_of(raw), positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    head_dim = positive(raw, "head_dim", usual)
    if scaling.get("type", scaling.get("rope_type")) == "dynamic" and scaling.get("alpha"):
        theta = number(raw | scaling, "rope_theta", 10000.0) * number(scaling, "alpha") ** (head_dim / (head_dim - 2))
        return Rope(theta=theta)
    return parse_rope(raw, scaling, head_dim)


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(prefix: str) -> Attention:
        bias, here = config.attention_bias, prefix + "self_attn."
        plain = attention(source, prefix, qkv_bias=bias, output_bias=bias)
        return plain._replace(
            q_norm=rms_norm(source, here + "query_layernorm"), k_norm=rms_norm(source, here + "key_layernorm")
        )

    return assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix), any_mlp(source, config, prefix, index, NAMES))
    )
