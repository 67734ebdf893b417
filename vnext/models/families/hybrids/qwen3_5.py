"""Qwen 3.5, Qwen 3 Next, also with experts: gated delta nets, gated attention.

Norms multiply by 1 + weight, but for those of delta nets.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, dense_layers
from vnext.models.config.json_keys import Json, flag, positive, refuse, required, usual
from vnext.models.config.mamba_config import linear_layers, shared, width_of
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, Recurrent, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention, shifted_norm
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder, assemble_layer
from vnext.models.layers.layers import Attention
from vnext.models.layers.mtp_layer import MtpParams, combine_mtp, forward_mtp
from vnext.models.layers.recurrent import assemble_delta_net
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Axis, Layout, matrix, shared_axes

__all__ = ["WEIGHT_AXES", "assemble", "assemble_mtp", "combine_mtp", "forward_mtp", "parse"]

KEYS, VALUES = Axis.STATE_KEYS, Axis.STATE_VALUES
WEIGHT_AXES = MappingProxyType(
    {
        **shared_axes("shared_expert"),
        "shared_expert_gate": matrix(Axis.ONE, Axis.HIDDEN),
        "q_proj": matrix(Axis.GATED_HEADS, Axis.HIDDEN),
        "in_proj_qkv": matrix((KEYS, KEYS, VALUES), Axis.HIDDEN),
        "in_proj_z": matrix(VALUES, Axis.HIDDEN),
        "in_proj_qkvz": Layout((KEYS, KEYS, VALUES, VALUES), Axis.HIDDEN, by_state=True),
        "in_proj_ba": Layout((Axis.STATE_HEADS, Axis.STATE_HEADS), Axis.HIDDEN, by_state=True),
        "in_proj_b": matrix(Axis.STATE_HEADS, Axis.HIDDEN),
        "in_proj_a": matrix(Axis.STATE_HEADS, Axis.HIDDEN),
        "conv1d": Layout((KEYS, KEYS, VALUES), Axis.STATE_WIDTH, depthwise=True),
        "linear_attn": Layout((Axis.STATE_HEADS,)),
        "linear_attn.norm": Layout((Axis.STATE_HEAD_DIM,)),
        "linear_attn.out_proj": matrix(Axis.HIDDEN, VALUES),
        **dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden"), Layout((Axis.HIDDEN,))),
        "fc": matrix(Axis.HIDDEN, Axis.TWICE_HIDDEN),
    }
)
DEFAULTS = usual(
    num_key_value_heads=4, head_dim=256, max_position_embeddings=32768, partial_rotary_factor=0.25, full_attention_interval=4,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32,
)  # fmt: skip
EXPERT_DEFAULTS = usual(
    num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=8,
    num_experts=256,
)  # fmt: skip
NEXT = "Qwen3NextForCausalLM"
NEXT_DEFAULTS = usual(EXPERT_DEFAULTS, num_experts_per_tok=10, num_experts=512, intermediate_size=5632)
NAMES = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")
ROOTS = ("model.", "model.language_model.")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config. Raises ModelError."""
    if "text_config" in raw:
        text = {key: value for key, value in required(raw, "text_config", None).items() if value is not None}
        raw = raw | text | {"architectures": raw["architectures"]}
    is_next = raw["architectures"][0] == NEXT
    has_experts = is_next or raw["architectures"][0].startswith("Qwen3_5Moe")
    usual = DEFAULTS | (NEXT_DEFAULTS if is_next else EXPERT_DEFAULTS) if has_experts else DEFAULTS
    raw = raw | {key: value for key, value in usual.items() if raw.get(key) is None}
    if has_experts and not is_next:
        raw["intermediate_size"] = positive(raw, "moe_intermediate_size")
    refuse(raw, "attn_output_gate", unless=(True,))
    form = DecoderForm(is_gated=True)
    experts = shared_experts(raw, dense_layers(raw) if is_next else ()) if has_experts else None
    drafting = raw.get("num_nextn_predict_layers", 1) if is_next else raw.get("mtp_num_hidden_layers")
    layers = positive({"mtp_num_hidden_layers": drafting}, "mtp_num_hidden_layers") if drafting else 0
    own = {"recurrent": delta_nets(raw), "form": form, "experts": experts, "mtp_layers": layers}
    return common_config(raw, generation, partial=True, **own)


def shared_experts(raw: Json, dense: tuple[int, ...]) -> Experts:
    """The experts of all layers but these, whose shares sum to one unless asked otherwise, and the size of the one beside them."""
    return checked(
        Experts(
            count=positive(raw, "num_experts"),
            intermediate_size=positive(raw, "moe_intermediate_size"),
            router=Router(positive(raw, "num_experts_per_tok"), normalise=flag(raw, "norm_topk_prob", True)),
            dense_layers=dense,
            shared_size=positive(raw, "shared_expert_intermediate_size"),
        )
    )


def delta_nets(raw: Json) -> Recurrent:
    """The layers that are delta nets, and their sizes."""
    count, interval = positive(raw, "num_hidden_layers"), positive(raw, "full_attention_interval")
    usual = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    nets = Recurrent(
        layers=linear_layers(raw, usual),
        width=width_of(raw, "linear_conv_kernel_dim"),
        key_heads=positive(raw, "linear_num_key_heads"),
        key_dim=positive(raw, "linear_key_head_dim"),
        value_heads=positive(raw, "linear_num_value_heads"),
        value_dim=positive(raw, "linear_value_head_dim"),
    )
    return shared(nets)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    assert config.recurrent is not None
    nets = config.recurrent.layers

    def mixing(prefix: str, index: int) -> Mixing:
        return assemble_delta_net(source, prefix + "linear_attn.") if index in nets else normed_attention(source, config, prefix)

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix, index), any_mlp(source, config, prefix, index, NAMES)),
        Names(root=root_of(source)),
        shifted_norm,
    )


def root_of(source: Source) -> str:
    """Where a checkpoint keeps its language part."""
    return next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])


def normed_attention(source: Source, config: ModelConfig, prefix: str) -> Attention:
    """That of the layer at `prefix`, with its norms over heads."""
    bias = config.attention_bias
    query, key = (shifted_norm(source, f"{prefix}self_attn.{name}_norm") for name in "qk")
    return attention(source, prefix, qkv_bias=bias, output_bias=bias)._replace(q_norm=query, k_norm=key)


def assemble_mtp(source: Source, config: ModelConfig) -> MtpParams:
    """The parameters of the first layer that drafts: all of them attend. Raises ModelError."""
    if "mtp.fc.weight" not in source:
        raise ModelError("the checkpoint has no tensors mtp.*, which method mtp needs: take another method")
    here = "mtp.layers.0."
    parts = normed_attention(source, config, here), any_mlp(source, config, here, config.layer_count, NAMES)
    return MtpParams(
        last_norm=shifted_norm(source, root_of(source) + "norm"),
        embedding_norm=shifted_norm(source, "mtp.pre_fc_norm_embedding"),
        state_norm=shifted_norm(source, "mtp.pre_fc_norm_hidden"),
        project=source.packed(("mtp.fc.weight",)),
        layer=assemble_layer(source, here, Names(), parts, shifted_norm),
        norm=shifted_norm(source, "mtp.norm"),
        frequencies=source.place(inverse_frequencies(config.rope, config.turning_dim)),
    )
