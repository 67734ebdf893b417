"""Ling, Ring: experts beside shared ones; 2.0 has GLM 4.5's router and norms over heads."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, first_layers
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.model_config import Experts, ModelConfig, common_config
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, linear, rms_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, matrix, shared_axes

WEIGHT_AXES = MappingProxyType(
    {
        **shared_axes("shared_experts"),
        "word_embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
        "query_key_value": matrix((Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS), Axis.HIDDEN),
        "dense": matrix(Axis.HIDDEN, Axis.HEADS),
        "expert_bias": Layout((Axis.EXPERTS,)),
        **dict.fromkeys(("query_layernorm", "key_layernorm"), Layout((Axis.HEAD_DIM,))),
    }
)
SECOND = "BailingMoeV2ForCausalLM"
USUAL = usual(num_experts=64, num_experts_per_tok=6, num_shared_experts=2, moe_intermediate_size=1408, norm_topk_prob=True)
SECOND_USUAL = usual(
    num_shared_experts=1, max_position_embeddings=32768, rope_theta=6e5, partial_rotary_factor=0.5, head_dim=128,
    num_key_value_heads=4, num_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=512,
    first_k_dense_replace=1,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    is_second = raw["architectures"][0] == SECOND
    raw = (SECOND_USUAL if is_second else USUAL) | raw
    for key in ("use_bias", "norm_head", "use_sliding_window"):
        refuse(raw, key, unless=(False,))
    bias = flag(raw, "use_qkv_bias")
    return common_config(raw, generation, partial=True, experts=experts(raw, is_second), attention_bias=bias)


def experts(raw: Json, is_second: bool) -> Experts:
    """The experts: marked by softmax, of the second generation by sigmoids with a bias, in groups. Raises ModelError."""
    wide, per_token = positive(raw, "moe_intermediate_size"), positive(raw, "num_experts_per_tok")
    router = Router(per_token, flag(raw, "norm_topk_prob"))
    if is_second:
        refuse(raw, "score_function", unless=("sigmoid",))
        router = Router(
            per_token,
            True,
            marks="sigmoid",
            scale=number(raw, "routed_scaling_factor", 1.0),
            groups=positive(raw, "n_group"),
            kept_groups=positive(raw, "topk_group"),
        )
    shared = positive(raw, "num_shared_experts") if raw["num_shared_experts"] else 0
    return checked(
        Experts(
            count=positive(raw, "num_experts"),
            intermediate_size=wide,
            router=router,
            dense_layers=first_layers(raw, "first_k_dense_replace"),
            shared_size=shared * positive(raw, "moe_shared_expert_intermediate_size", wide),
        )
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    names = ExpertNames(bias="gate.expert_bias" if config.architecture == SECOND else "", shared="shared_experts")

    def mixing(here: str) -> Attention:
        norms = [here + name for name in ("query_layernorm", "key_layernorm")]
        own = [rms_norm(source, name) if f"{name}.weight" in source else None for name in norms]
        joined = linear(source, here, "query_key_value", bias=config.attention_bias)
        return Attention(joined, linear(source, here, "dense"), *own)

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix + "attention."), any_mlp(source, config, prefix, index, names)),
        Names(embedding="word_embeddings"),
    )
