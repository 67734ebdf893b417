"""LongCat Flash: latent attention, experts beside the next layer.

A layer of its authors is two here, with an attention and an MLP each. Experts read what the first MLP reads, and what they give is
added behind the second; some give what they get.
"""

from __future__ import annotations

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config
from vnext.models.layers.assembly import ExpertNames, Source, gated_mlp, sparse_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.latent import LatentAttention, assemble_attention, latent_axes
from vnext.models.layers.layers import GatedMlp
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

EXPERTS = ExpertNames(router="router.classifier", bias="router.e_score_correction_bias")
DEFAULTS = usual(
    num_layers=28, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e7, ffn_hidden_size=12288, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_topk=12, n_routed_experts=512,
    zero_expert_num=256, expert_ffn_hidden_size=2048, routed_scaling_factor=6.0,
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    assert config.experts is not None
    choices = Sized(config.experts.count + config.experts.idle)
    return {
        **latent_axes(config),
        "classifier": Layout((choices,), Axis.HIDDEN),
        "e_score_correction_bias": Layout((choices,)),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "router_bias", unless=(False,))
    refuse(raw, "zero_expert_type", unless=("identity",))
    refuse(raw, "attention_method", unless=("MLA",))
    refuse(raw, "mla_scale_q_lora", unless=(True,))
    refuse(raw, "mla_scale_kv_lora", unless=(True,))
    count = 2 * positive(raw, "num_layers")
    raw = raw | {"num_hidden_layers": count, "intermediate_size": positive(raw, "ffn_hidden_size")}
    own = latent_fields(raw)
    own["query_scale"] *= (positive(raw, "hidden_size") / positive(raw, "q_lora_rank")) ** 0.5
    experts = Experts(
        count=positive(raw, "n_routed_experts"),
        intermediate_size=positive(raw, "expert_ffn_hidden_size"),
        router=Router(positive(raw, "moe_topk"), False, "softmax", number(raw, "routed_scaling_factor")),
        dense_layers=tuple(range(1, count, 2)),
        idle=positive(raw, "zero_expert_num") if raw["zero_expert_num"] else 0,
        ahead=True,
    )
    form = DecoderForm(turns_neighbours=True, output_bias=flag(raw, "attention_bias"))
    return common_config(raw, generation, form=form, experts=checked(experts), **own)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters. The norm of rows takes in what multiplies them."""
    assert config.latent is not None
    scale = (config.hidden_size / config.latent.rank) ** 0.5

    def names(index: int) -> Names:
        norms = (f"{name}.{index % 2}" for name in ("input_layernorm", "post_attention_layernorm"))
        return Names(**dict(zip(("attention_norm", "mlp_norm"), norms)), each=2)

    def parts(prefix: str, index: int) -> tuple[LatentAttention, GatedMlp]:
        mixing = assemble_attention(source, config, prefix, f"self_attn.{index % 2}.")
        return mixing._replace(norm=mixing.norm * scale), gated_mlp(source, prefix, name=f"mlps.{index % 2}.")

    found = assemble_decoder(source, config, parts, names)
    layers = (
        layer if at % 2 else layer._replace(ahead=sparse_mlp(source, config, f"model.layers.{at // 2}.mlp.", EXPERTS))
        for at, layer in zip(config.layer_numbers, found.layers)
    )
    return found._replace(layers=tuple(layers), stack=None)
