"""LFM2, also with experts, LFM3: gated convolutions.

LFM3 has norms on both sides, windows in some of the layers that attend, and a gate for each of their heads.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, first_layers
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, shown, usual
from vnext.models.config.mamba_config import width_of
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, Recurrent, common_config
from vnext.models.config.rope_config import two_ropes
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, gated, linear, rms_norm, sparse_mlp
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention, GatedMlp, SparseMlp
from vnext.models.layers.recurrent import assemble_convolution
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix

CHANNELS = Axis.STATE_VALUES
OWN_AXES = MappingProxyType(
    {
        "embedding_norm": Layout((Axis.HIDDEN,)),
        "operator_norm": Layout((Axis.HIDDEN,)),
        "ffn_norm": Layout((Axis.HIDDEN,)),
        **dict.fromkeys(("post_operator_norm", "post_ffn_norm"), Layout((Axis.HIDDEN,))),
        "q_layernorm": Layout((Axis.HEAD_DIM,)),
        "k_layernorm": Layout((Axis.HEAD_DIM,)),
        "self_attn.out_proj": matrix(Axis.HIDDEN, Axis.HEADS),
        "conv.in_proj": matrix((CHANNELS, CHANNELS, CHANNELS), Axis.HIDDEN),
        "conv.conv": Layout((CHANNELS,), Axis.STATE_WIDTH, depthwise=True),
        "conv.out_proj": matrix(Axis.HIDDEN, CHANNELS),
        "w1": matrix(Axis.MLP, Axis.HIDDEN),
        "w2": matrix(Axis.HIDDEN, Axis.MLP),
        "w3": matrix(Axis.MLP, Axis.HIDDEN),
        "experts.w1": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "experts.w2": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
        "experts.w3": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "expert_bias": Layout((Axis.EXPERTS,)),
    }
)
DEFAULTS = MappingProxyType(
    {
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }
)
EXPERT_DEFAULTS = usual(
    intermediate_size=7168, moe_intermediate_size=1792, num_dense_layers=2, num_experts=32, num_experts_per_tok=4,
    use_expert_bias=True, norm_topk_prob=True, block_auto_adjust_ff_dim=False,
)  # fmt: skip
EXPERTS, THIRD = "Lfm2MoeForCausalLM", "Lfm3ForCausalLM"
THIRD_DEFAULTS = MappingProxyType(
    {
        "intermediate_size": 7680, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7, "sliding_window": 256,
        "block_auto_adjust_ff_dim": False, "use_sandwich_norm": True, "use_attention_gate": True,
    }
)  # fmt: skip
FULL, NEAR = "full_attention", "sliding_attention"
ROPES = MappingProxyType(
    {
        NEAR: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }
)
"""How layers of LFM3 turn where their configuration does not say it."""


NAMES = Names(norm="embedding_norm", attention_norm="operator_norm", mlp_norm="ffn_norm")
THIRD_NAMES = NAMES._replace(after_attention_norm="post_operator_norm", after_mlp_norm="post_ffn_norm")


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    gates = Layout((Sized(config.head_count, is_split=True),), Axis.HIDDEN)
    return {**OWN_AXES, "self_attn.gate_proj": gates}


def parse(raw: Json, generation: Json) -> ModelConfig:
    has_experts = raw["architectures"][0] == EXPERTS
    is_third = raw["architectures"][0] == THIRD
    raw = DEFAULTS | (EXPERT_DEFAULTS if has_experts else THIRD_DEFAULTS if is_third else {}) | raw
    named = {
        "rms_norm_eps": number(raw, "norm_eps"),
        "tie_word_embeddings": flag(raw, "tie_embedding", flag(raw, "tie_word_embeddings", True)),
        "intermediate_size": mlp_size(raw),
    }
    layers = convolving_layers(raw)
    recurrent = Recurrent(layers=layers, width=width_of(raw, "conv_L_cache"), value_heads=positive(raw, "hidden_size"))
    bias = flag(raw, "conv_bias")
    experts = biased_experts(raw) if has_experts else None
    own = near_and_far(raw) if is_third else {}
    recurring = recurrent if layers else None
    return common_config(raw | named, generation, recurrent=recurring, mlp_bias=bias, experts=experts, **own)


def near_and_far(raw: Json) -> Json:
    """What is LFM3's own: windows of some layers, ropes of both kinds, gates. Raises ModelError."""
    refuse(raw, "use_sandwich_norm", unless=(True,))
    refuse(raw, "attention_bias", unless=(False,))
    kinds = raw.get("layer_types") or usual_kinds(positive(raw, "num_hidden_layers"))
    windows = tuple(positive(raw, "sliding_window") if kind == NEAR else 0 for kind in kinds)
    ropes = {"rope_parameters": dict(ROPES)} | ({"rope_parameters": raw["rope_parameters"]} if raw.get("rope_parameters") else {})
    rope, local = two_ropes(raw | ropes, positive(raw, "head_dim"), 1e6, 1e4)
    gated = flag(raw, "use_attention_gate")
    return dict(windows=windows, rope=rope, local_rope=local, form=DecoderForm(is_gated=gated, gates_heads=gated))


def usual_kinds(count: int) -> list[str]:
    """What each layer of LFM3 is."""
    return [FULL if at % 4 == 2 else NEAR if at % 4 == 0 and at else "conv" for at in range(count)]


def biased_experts(raw: Json) -> Experts:
    """Experts behind the first layers, marked by sigmoids and chosen with a bias."""
    router = Router(
        positive(raw, "num_experts_per_tok"),
        flag(raw, "norm_topk_prob"),
        marks="sigmoid",
        scale=number(raw, "routed_scaling_factor", 1.0),
    )
    count, size = positive(raw, "num_experts"), positive(raw, "moe_intermediate_size")
    dense = first_layers(raw, "num_dense_layers")
    return checked(Experts(count=count, intermediate_size=size, router=router, dense_layers=dense))


def mlp_size(raw: Json) -> int:
    """The width of MLPs: two thirds of what is named, times a factor, up to whole blocks; or as it is named."""
    size = positive(raw, "block_ff_dim", positive(raw, "intermediate_size"))
    if not flag(raw, "block_auto_adjust_ff_dim"):
        return size
    block, size = positive(raw, "block_multiple_of"), int(2 * size / 3)
    if raw.get("block_ffn_dim_multiplier") is None:
        return size
    return -(-int(number(raw, "block_ffn_dim_multiplier") * size) // block) * block


def convolving_layers(raw: Json) -> tuple[int, ...]:
    """The layers that convolve: those of their kind, or those that are not among the ones that attend."""
    count, kinds, attending = positive(raw, "num_hidden_layers"), raw.get("layer_types"), raw.get("full_attn_idxs")
    if kinds is None:
        found = attending if isinstance(attending, list) else range(count)
        kinds = [FULL if layer in found else "conv" for layer in range(count)]
        kinds = usual_kinds(count) if raw["architectures"][0] == THIRD else kinds
    known = (*([NEAR] if raw["architectures"][0] == THIRD else []), FULL, "conv")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        names = " or ".join(known)
        raise ModelError(f"layer_types must name {names} for each of {count} layers but is {shown(kinds)}; correct config.json")
    if "full_attention" not in kinds:
        raise ModelError("layer_types names no layer of full_attention, without which nothing here is served; correct config.json")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")


def assemble(source: Source, config: ModelConfig) -> Params:
    convolving = config.recurrent.layers if config.recurrent else ()

    def mixing(prefix: str, index: int) -> Mixing:
        if index in convolving:
            return assemble_convolution(source, prefix + "conv.", bias=config.mlp_bias)
        here = prefix + "self_attn."
        gates = ("gate_proj",) if config.form.gates_heads else ()
        qkv = linear(source, here, "q_proj", *gates, "k_proj", "v_proj")
        if config.architecture == THIRD:
            return Attention(qkv, linear(source, here, "o_proj"), *(rms_norm(source, f"{here}{part}_norm") for part in "qk"))
        norms = (rms_norm(source, f"{here}{part}_layernorm") for part in "qk")
        return Attention(qkv, linear(source, here, "out_proj"), *norms)

    def widening(here: str, index: int) -> GatedMlp | SparseMlp:
        if config.experts and index not in config.experts.dense_layers:
            bias = "expert_bias" if here + "expert_bias" in source else ""
            return sparse_mlp(source, config, here, ExpertNames(("w1", "w3"), "w2", bias=bias))
        return GatedMlp(gated(source, here, "w1", "w3"), linear(source, here, "w2"))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix, index), widening(prefix + "feed_forward.", index)),
        THIRD_NAMES if config.architecture == THIRD else NAMES,
    )
