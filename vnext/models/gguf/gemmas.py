"""The configurations of Gemma's models in GGUF files. What layers of one kind have apart from others stands there by layer."""

from __future__ import annotations

from statistics import NormalDist
from types import MappingProxyType

from vnext.models.gguf.members import STRETCHES, Members, plain, rope_of

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
SLIDING, WHOLE = "sliding_attention", "full_attention"
BY_LAYER = "per_layer_token_embd.weight"
SHARE_DIGITS = 6
"""Of a share of gates, which the file has as the deviations above their mean."""
UNTURNED = 1e30
"""What divides the frequency of a pair that does not turn."""


def _gemma2(members: Members) -> dict[str, object]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": members.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": members.number("final_logit_softcapping", 30.0),
    } | _scaled(members, GEMMA2_27B_LAYERS)


def _gemma3(members: Members) -> dict[str, object]:
    ropes = {"rope_parameters": _two_ropes(members)}
    return {"architectures": ["Gemma3ForCausalLM"]} | ropes | _scaled(members, GEMMA3_27B_LAYERS)


def _gemma3n(members: Members) -> dict[str, object]:
    deviations = members.each("activation_sparsity_scale", float("-inf"))
    return {
        "architectures": ["Gemma3nForCausalLM"],
        "intermediate_size": [int(size) for size in members.each("feed_forward_length")],
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), SHARE_DIGITS) for each in deviations],
        "altup_num_inputs": members.number("altup.num_inputs"),
        "laurel_rank": members.shape("blk.0.laurel_l.weight")[0],
        "final_logit_softcapping": members.number("final_logit_softcapping", 30.0),
        "rope_parameters": _two_ropes(members),
    } | _layered(members)


def _gemma4(members: Members) -> dict[str, object]:
    """Layers with a window have smaller heads; experts stand beside the MLP."""
    shares_values = any(members.has("attn_k.weight", at) and not members.has("attn_v.weight", at) for at in members.places)
    heads = dict(zip(_kinds(members), members.each("attention.head_count_kv")))
    widths, ropes = members.each("feed_forward_length"), _two_ropes(members)
    if turning := [each < UNTURNED for each in members.stretches.get(STRETCHES, ())]:
        ropes[WHOLE] |= {"rope_type": "proportional", "partial_rotary_factor": sum(turning) / len(turning)}
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "head_dim": members.number("attention.key_length_swa"),
        "global_head_dim": members.number("attention.key_length"),
        "num_key_value_heads": int(heads.get(SLIDING, 0) or members.least("attention.head_count_kv")),
        **({"num_global_key_value_heads": int(heads.get(WHOLE, 0))} if shares_values else {}),
        "attention_k_eq_v": shares_values,
        "use_double_wide_mlp": len(set(widths)) > 1,
        "final_logit_softcapping": members.number("final_logit_softcapping") if "final_logit_softcapping" in members else None,
        "rope_parameters": ropes,
    } | _layered(members) | (_experts(members) if members.number("expert_count", 0) else {})


def _experts(members: Members) -> dict[str, object]:
    return {
        "enable_moe_block": True,
        "num_experts": members.number("expert_count"),
        "top_k_experts": members.number("expert_used_count"),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
    }


def _two_ropes(members: Members) -> dict[str, dict[str, object]]:
    local: dict[str, object] = {"rope_type": "default", "rope_theta": members.number("rope.freq_base_swa", 10000.0)}
    return {WHOLE: rope_of(members), SLIDING: local}


def _kinds(members: Members) -> list[str]:
    return [SLIDING if has_window else WHOLE for has_window in members.each("attention.sliding_window_pattern")]


def _layered(members: Members) -> dict[str, object]:
    """What tokens give to each layer, whose caches layers read, and which have a window."""
    size = members.number("embedding_length_per_layer_input", 0)
    known: dict[str, object] = {"vocab_size_per_layer_input": members.shape(BY_LAYER)[0]} if size else {}
    return {
        "layer_types": _kinds(members),
        "sliding_window": members.number("attention.sliding_window"),
        "num_kv_shared_layers": members.number("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": size,
    } | known


def _scaled(members: Members, largest: int) -> dict[str, object]:
    """Of the two Gemmas, the largest divides scores by the root of its channels a head, the others by that of a head's."""
    hidden, heads = members.number("embedding_length"), members.number("attention.head_count")
    of_head = members.number("attention.key_length", hidden // heads)
    scalar = hidden // heads if members.number("block_count") == largest else of_head
    return {"query_pre_attn_scalar": scalar, "sliding_window": members.number("attention.sliding_window", 4096)}


ARCHITECTURES = MappingProxyType(
    {"gemma": plain("GemmaForCausalLM"), "gemma2": _gemma2, "gemma3": _gemma3, "gemma3n": _gemma3n, "gemma4": _gemma4}
)
"""By general.architecture."""
