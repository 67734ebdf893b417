"""The configurations of models with recurrent layers, by what a GGUF file's metadata and tensors say.

Which layers are recurrent follows from their tensors: their state's convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from vnext.models.gguf.members import QUERY_BIAS, Members, epsilon_of, grouped, multipliers, per_token, turning_share

CONVOLUTION, SHORT = "ssm_conv1d.weight", "shortconv.conv.weight"
ATTENDING, RECURRENT = "full_attention", "linear_attention"


def _kinds(members: Members, tensor: str, kind: str) -> list[str]:
    """A word a layer."""
    recurrent = members.layers(tensor)
    return [kind if layer in recurrent else ATTENDING for layer in range(members.layer_count())]


def _lfm2(members: Members) -> dict[str, object]:
    kinds = _kinds(members, SHORT, "conv")
    first = kinds.index("conv") if "conv" in kinds else 0
    found: dict[str, object] = {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": kinds,
        "conv_L_cache": members.number("shortconv.l_cache"),
        "conv_bias": members.has("shortconv.conv.bias", first),
        "norm_eps": members.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }
    if "expert_count" not in members:
        return found
    return found | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": members.number("expert_count"),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
        "num_dense_layers": members.number("leading_dense_block_count", 0),
        "routed_scaling_factor": members.number("expert_weights_scale", 1.0) or 1.0,
    } | per_token(members)


def _delta_nets(architecture: str) -> Callable[[Members], dict[str, object]]:
    """Qwen 3.5, with or without experts, or Qwen 3 Next."""

    def config(members: Members) -> dict[str, object]:
        heads = members.number("ssm.time_step_rank")
        found = {
            "architectures": [architecture],
            "layer_types": _kinds(members, CONVOLUTION, RECURRENT),
            "partial_rotary_factor": turning_share(members),
            "linear_conv_kernel_dim": members.number("ssm.conv_kernel"),
            "linear_key_head_dim": members.number("ssm.state_size"),
            "linear_num_key_heads": members.number("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_value_head_dim": int(members.number("ssm.inner_size") // heads),
        }
        if "expert_count" not in members:
            return found
        return found | {
            "num_experts": members.number("expert_count"),
            "moe_intermediate_size": members.number("expert_feed_forward_length"),
            "shared_expert_intermediate_size": members.number("expert_shared_feed_forward_length"),
        } | per_token(members)

    return config


def _mamba(members: Members) -> dict[str, object]:
    """The sizes of Mamba-2, as most families call them."""
    first = (members.layers(CONVOLUTION) or [0])[0]
    return {
        "mamba_d_ssm": members.number("ssm.inner_size"),
        "mamba_n_heads": members.number("ssm.time_step_rank"),
        "mamba_n_groups": members.number("ssm.group_count"),
        "mamba_d_state": members.number("ssm.state_size"),
        "mamba_d_conv": members.number("ssm.conv_kernel"),
        "mamba_conv_bias": members.has("ssm_conv1d.bias", first),
    }


def _granite_hybrid(members: Members) -> dict[str, object]:
    """Granite 4, or Bamba, whose heads turn and which has no multipliers."""
    kinds, turns = _kinds(members, CONVOLUTION, RECURRENT), members.flag("rope.scaling.finetuned", True)
    mamba = _mamba(members) if RECURRENT in kinds else {}
    if mamba and turns:
        attending = [layer for layer, kind in enumerate(kinds) if kind == ATTENDING]
        shares = {"attn_layer_indices": attending, "partial_rotary_factor": turning_share(members)}
        return {"architectures": ["BambaForCausalLM"]} | shares | mamba
    experts: dict[str, object] = {"num_local_experts": members.number("expert_count", 0)}
    if experts["num_local_experts"]:
        experts |= per_token(members)
    shared = members.number("expert_shared_feed_forward_length", members.number("feed_forward_length"))
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": kinds,
        "position_embedding_type": "rope" if turns else None,
        "shared_intermediate_size": shared,
    } | mamba | experts | multipliers(members)


def _falcon_h1(members: Members) -> dict[str, object]:
    """Its multipliers are in the file's weights."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": QUERY_BIAS in members.tensors,
        "mamba_rms_norm": members.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    } | _mamba(members)


def _nemotron_h(members: Members) -> dict[str, object]:
    mamba = _mamba(members)
    parts = {RECURRENT: CONVOLUTION, ATTENDING: "attn_q.weight", "moe": "ffn_gate_inp.weight"}
    count = members.layer_count()
    kinds = [next((kind for kind, tensor in parts.items() if members.has(tensor, layer)), "mlp") for layer in range(count)]
    heads = members.number("ssm.time_step_rank")
    return {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "layer_norm_epsilon": epsilon_of(members),
        "mamba_num_heads": heads,
        "mamba_head_dim": int(members.number("ssm.inner_size") // heads),
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    } | (_sparse(members) if "moe" in kinds else {})


def _sparse(members: Members) -> dict[str, object]:
    """Nemotron's experts."""
    narrow = members.number("moe_latent_size") if "moe_latent_size" in members else None
    shared = members.number("expert_shared_feed_forward_length")
    return grouped(members) | {"moe_shared_expert_intermediate_size": shared, "moe_latent_size": narrow}


ARCHITECTURES = MappingProxyType(
    {
        **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
        "qwen3next": _delta_nets("Qwen3NextForCausalLM"),
        "qwen35": _delta_nets("Qwen3_5ForCausalLM"),
        "qwen35moe": _delta_nets("Qwen3_5MoeForCausalLM"),
        "granitehybrid": _granite_hybrid,
        "falcon-h1": _falcon_h1,
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    }
)
"""By general.architecture."""
