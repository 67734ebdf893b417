"""HY V4: DeepSeek V3.2's form, hyper-connections, sinks.

Keys are chosen, and experts marked, as DeepSeek V3.2 does it; layers share a choice as in GLM 5. Routed experts limit their gates.
"""

from __future__ import annotations

from msgspec.structs import replace

from vnext.models.config.expert_keys import dense_kinds, sigmoid_experts
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.config.streams import Joined
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, linear
from vnext.models.layers.decoder import Params, assemble_decoder, logits
from vnext.models.layers.decoder_params import Joint
from vnext.models.layers.latent import LatentAttention, assemble_attention, latent_axes
from vnext.models.layers.layers import GatedMlp, SparseMlp
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix
from vnext.models.layers.streams import forward_joined as forward

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = usual(
    max_position_embeddings=262144, rms_norm_eps=1e-5, bos_token_id=120000, eos_token_id=120025, moe_intermediate_size=768,
    n_routed_experts=256, num_experts_per_tok=8, routed_scaling_factor=2.827, norm_topk_prob=True, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, index_topk=2048, index_head_dim=128,
    index_n_heads=16, index_topk_freq=4, hc_mult=4, hc_magnitude=2.0, hc_eps=1e-6,
)  # fmt: skip
GATE, SINKS = "linear_gate", "learnable_sink_param"
NAMES = ExpertNames(bias="gate.e_score_correction_bias", shared="shared_experts", gate=GATE)


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "swiglu_limit", unless=(10.0,))
    own = latent_fields(raw)
    eps = number(raw, "rms_norm_eps")
    own["latent"] = replace(own["latent"], index=replace(own["latent"].index, turns_last=True, eps=eps))
    joined = Joined(count=positive(raw, "hc_mult"), eps=number(raw, "hc_eps"), magnitude=number(raw, "hc_magnitude"))
    experts = replace(sigmoid_experts(raw, dense_kinds(raw, 1)), activation="silu_limited")
    form = DecoderForm(output_bias=flag(raw, "attention_bias"))
    return common_config(raw, generation, form=form, experts=experts, joined=joined, **own)


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    latent, joined = config.latent, config.joined
    assert latent is not None and joined is not None
    one, two = Sized(joined.count), Sized(2 * joined.count)
    all_streams = Sized(joined.count * config.hidden_size)
    return {
        **latent_axes(config),
        "hc_fn": Layout((two,), all_streams),
        "hc_base": Layout((two,)),
        "hc_scale": Layout((Sized(2),)),
        "hc_head_fn": Layout((one,), all_streams),
        "hc_head_base": Layout((one,)),
        "hc_head_scale": Layout((Axis.ONE,)),
        SINKS: Layout((Sized(config.head_count, is_split=True),)),
        f"self_attn.{GATE}": Layout((Sized(config.head_count * latent.value, is_split=True),), Axis.HIDDEN),
        GATE: matrix(Axis.MLP, Axis.HIDDEN),
        f"shared_experts.{GATE}": matrix(Axis.SHARED_MLP, Axis.HIDDEN),
    }


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""

    def parts(prefix: str, index: int) -> tuple[LatentAttention, GatedMlp | SparseMlp]:
        here = prefix + "self_attn."
        mixing = assemble_attention(source, config, prefix)
        mixing = mixing._replace(gates=linear(source, here, GATE), sinks=source.wide(here + SINKS))
        return mixing, any_mlp(source, config, prefix, index, NAMES)

    def joints(index: int) -> tuple[Joint, Joint]:
        here = f"model.layers.{index}.hc_pre.hc_"
        return joint(source, here + "attn_layer.hc_"), joint(source, here + "mlp_layer.hc_")

    found = assemble_decoder(source, config, parts)
    layers = (layer._replace(joints=joints(index)) for index, layer in zip(config.layer_numbers, found.layers))
    return found._replace(layers=tuple(layers), joint=joint(source, "model.hc_pre.hc_head.hc_head_"))


def joint(source: Source, here: str) -> Joint:
    """That whose tensors' names begin so."""
    return Joint(source.packed_wide(here + "fn"), source.wide(here + "scale"), source.wide(here + "base"))
