"""Ling 3: Kimi Delta Attention, experts.

Decays have a bound. One layer of six has latent attention, with a gate for each head. Experts are those of Ling 2.
"""

from __future__ import annotations

from math import inf
from types import MappingProxyType

from vnext.models.config.expert_keys import dense_kinds, sigmoid_experts
from vnext.models.config.json_keys import Json, flag, positive, refuse
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.mamba_config import linear_layers, width_of
from vnext.models.config.model_config import DecoderForm, ModelConfig, Recurrent, common_config
from vnext.models.errors import ModelError
from vnext.models.families.hybrids.kimi_linear import OTHER_KEYS, assemble_key_delta, key_delta_axes
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, linear
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.latent import assemble_attention, latent_axes
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

HERE, OUTPUT = "attention.", "dense"
EXPERTS = ExpertNames(bias="gate.expert_bias", shared="shared_experts")
DEFAULTS = MappingProxyType(
    {
        "head_dim": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 262144, "rope_theta": 6e6, "n_routed_experts": 512, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "moe_intermediate_size": 768,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "short_conv_kernel_size": 4, "layer_group_size": 6,
        "kda_safe_gate": True, "kda_lower_bound": -5.0,
    }
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    latent = latent_axes(config)
    return {
        **latent,
        OUTPUT: latent["o_proj"],
        "g_proj": Layout((Sized(config.head_count, is_split=True),), Axis.HIDDEN),
        **key_delta_axes(config, HERE, OUTPUT),
        "word_embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
        "expert_bias": Layout((Axis.EXPERTS,)),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    theirs = {ours: raw[key] for key, ours in OTHER_KEYS.items() if raw.get(key) is not None}
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None} | theirs
    refuse(raw, "q_lora_rank", unless=())
    refuse(raw, "attention_bias", unless=(False,))
    count, group = positive(raw, "num_hidden_layers"), positive(raw, "layer_group_size")
    heads, size, bound = positive(raw, "num_attention_heads"), positive(raw, "linear_head_dim", positive(raw, "head_dim")), 0.0
    if flag(raw, "kda_safe_gate"):
        bound = float(raw["kda_lower_bound"])
        if not -inf < bound < 0:
            raise ModelError(f"kda_lower_bound must be a number below 0 but is {bound}; correct config.json")
    own_heads = positive(raw, "linear_num_heads", heads)
    recurrent = Recurrent(
        layers=linear_layers(raw, ["linear_attention" if (layer + 1) % group else "full_attention" for layer in range(count)]),
        width=width_of(raw, "linear_conv_kernel_dim", positive(raw, "short_conv_kernel_size")),
        key_heads=own_heads,
        key_dim=size,
        value_heads=own_heads,
        value_dim=size,
        bound=bound,
    )
    experts = sigmoid_experts(raw, dense_kinds(raw, raw["first_k_dense_replace"]))
    form = DecoderForm(turns_neighbours=True)
    return common_config(raw, generation, form=form, recurrent=recurrent, experts=experts, **latent_fields(raw))


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.recurrent is not None
    recurring = config.recurrent.layers

    def mixing(prefix: str, index: int) -> Mixing:
        if index in recurring:
            return assemble_key_delta(source, prefix + HERE, OUTPUT)
        plain = assemble_attention(source, config, prefix, HERE, OUTPUT)
        return plain._replace(gates=linear(source, prefix + HERE, "g_proj"))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix, index), any_mlp(source, config, prefix, index, EXPERTS)),
        Names(embedding="word_embeddings"),
    )
