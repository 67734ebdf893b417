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
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention, shifted_norm
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.recurrent import assemble_delta_net
from vnext.models.layers.sharding import Axis, Layout, matrix, shared_axes

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
    return common_config(raw, generation, partial=True, recurrent=delta_nets(raw), form=form, experts=experts)


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
    bias = config.attention_bias
    assert config.recurrent is not None
    nets = config.recurrent.layers

    def mixing(prefix: str, index: int) -> Mixing:
        if index in nets:
            return assemble_delta_net(source, prefix + "linear_attn.")
        query, key = (shifted_norm(source, f"{prefix}self_attn.{name}_norm") for name in "qk")
        return attention(source, prefix, qkv_bias=bias, output_bias=bias)._replace(q_norm=query, k_norm=key)

    root = next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix, index), any_mlp(source, config, prefix, index, NAMES)),
        Names(root=root),
        shifted_norm,
    )
