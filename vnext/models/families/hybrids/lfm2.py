"""LFM2, also with experts: gated convolutions."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, first_layers
from vnext.models.config.json_keys import Json, flag, number, positive, shown
from vnext.models.config.model_config import Experts, ModelConfig, Recurrent, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, gated, linear, sparse_mlp
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention, GatedMlp, SparseMlp
from vnext.models.layers.recurrent import assemble_convolution
from vnext.models.layers.sharding import EXPERT_AXES, WEIGHT_AXES as LLAMA_AXES, Axis, Layout, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

CHANNELS = Axis.STATE_VALUES
WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        "embedding_norm": Layout((Axis.HIDDEN,)),
        "operator_norm": Layout((Axis.HIDDEN,)),
        "ffn_norm": Layout((Axis.HIDDEN,)),
        "q_layernorm": Layout((Axis.HEAD_DIM,)),
        "k_layernorm": Layout((Axis.HEAD_DIM,)),
        "self_attn.out_proj": matrix(Axis.HIDDEN, Axis.HEADS),
        "conv.in_proj": matrix((CHANNELS, CHANNELS, CHANNELS), Axis.HIDDEN),
        "conv.conv": Layout((CHANNELS,), Axis.STATE_WIDTH, depthwise=True),
        "conv.out_proj": matrix(Axis.HIDDEN, CHANNELS),
        "w1": matrix(Axis.MLP, Axis.HIDDEN),
        "w2": matrix(Axis.HIDDEN, Axis.MLP),
        "w3": matrix(Axis.MLP, Axis.HIDDEN),
        **EXPERT_AXES,
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
EXPERT_DEFAULTS = MappingProxyType(
    {
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "block_auto_adjust_ff_dim": False,
    }
)
EXPERTS = "Lfm2MoeForCausalLM"


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    has_experts = raw["architectures"][0] == EXPERTS
    raw = DEFAULTS | (EXPERT_DEFAULTS if has_experts else {}) | raw
    named = {
        "rms_norm_eps": number(raw, "norm_eps"),
        "tie_word_embeddings": flag(raw, "tie_embedding", flag(raw, "tie_word_embeddings", True)),
        "intermediate_size": mlp_size(raw),
    }
    layers = convolving_layers(raw)
    recurrent = Recurrent(layers=layers, width=positive(raw, "conv_L_cache"), value_heads=positive(raw, "hidden_size"))
    bias = flag(raw, "conv_bias")
    experts = biased_experts(raw) if has_experts else None
    return common_config(raw | named, generation, recurrent=recurrent if layers else None, mlp_bias=bias, experts=experts)


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
        kinds = ["full_attention" if layer in found else "conv" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"full_attention", "conv"}:
        raise ModelError(
            f"layer_types must name full_attention or conv for each of {count} layers but is {shown(kinds)}; correct config.json"
        )
    if "full_attention" not in kinds:
        raise ModelError("layer_types names no layer of full_attention, without which nothing here is served; correct config.json")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    convolving = config.recurrent.layers if config.recurrent else ()

    def mixing(prefix: str, index: int) -> Mixing:
        if index in convolving:
            return assemble_convolution(source, prefix + "conv.", bias=config.mlp_bias)
        here = prefix + "self_attn."
        return Attention(
            qkv=linear(source, here, "q_proj", "k_proj", "v_proj"),
            output=linear(source, here, "out_proj"),
            q_norm=source.fused((here + "q_layernorm.weight",)),
            k_norm=source.fused((here + "k_layernorm.weight",)),
        )

    def widening(here: str, index: int) -> GatedMlp | SparseMlp:
        if config.experts and index not in config.experts.dense_layers:
            bias = "expert_bias" if here + "expert_bias" in source else ""
            return sparse_mlp(source, config, here, ExpertNames(("w1", "w3"), "w2", bias=bias))
        return GatedMlp(gated(source, here, "w1", "w3"), linear(source, here, "w2"))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix, index), widening(prefix + "feed_forward.", index)),
        Names(norm="embedding_norm", attention_norm="operator_norm", mlp_norm="ffn_norm"),
    )
