"""The configuration in a GGUF file's metadata as a checkpoint's config.json.

One function an architecture of llama.cpp says what its members mean to a family of vnext; what the file does not say follows from
its tensors, as in llama.cpp.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from types import MappingProxyType

from vnext.models.errors import ModelError
from vnext.models.gguf.header import Header, Tensor

FLOATS = MappingProxyType({"F32": "float32", "F16": "float16"})
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
EMBEDDING, HEAD, STRETCHES, QUERY_BIAS = "token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.bias"
Stretches = Sequence[float]
LATENT = "deepseek2"
"""Whose heads share a row of each token: the numbers of a head mean something else."""
PARTIAL = frozenset({"glm4", "stablelm"})
"""Architectures whose heads turn in part."""
LLAMA3 = (1.0, 4.0, 8192)
"""Turns within the original context below which frequencies are stretched, and above which they are not; that context."""


class Members:
    """The metadata of one architecture."""

    def __init__(self, header: Header, stretches: Stretches | None) -> None:
        self.tensors, self._metadata, self.stretches = header.tensors, header.metadata, stretches
        self.architecture = header.metadata.get("general.architecture")

    def number(self, name: str, usual: float | None = None) -> int | float:
        """A member that is one number for all layers. Raises ModelError where there is none, nor a usual one."""
        found = self._metadata.get(f"{self.architecture}.{name}", usual)
        if isinstance(found, array) and found and found.count(found[0]) == len(found):
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float):
            reported = "layers that differ" if isinstance(found, array) else repr(found)
            raise ModelError(f"the file's {self.architecture}.{name} is {reported}, and one number is wanted; take another file")
        return found

    def text(self, name: str) -> str:
        return str(self._metadata.get(f"{self.architecture}.{name}", ""))

    def __contains__(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._metadata


def config_of(header: Header, stretches: Stretches | None = None) -> dict[str, object]:
    """config.json of a file. `stretches`: the numbers of STRETCHES in it, float32 [head_dim / 2]. Raises ModelError."""
    members = Members(header, stretches)
    if members.architecture not in ARCHITECTURES:
        raise ModelError(
            f"the file's architecture {members.architecture!r} is not read; read are {', '.join(ARCHITECTURES)}: take the model's "
            "safetensors checkpoint"
        )
    if EMBEDDING not in members.tensors or len(members.tensors[EMBEDDING].shape) != 2:
        raise ModelError(f"the file has no {EMBEDDING}, which a model begins with; download it again")
    return _common(members) | ARCHITECTURES[members.architecture](members)


def _common(members: Members) -> dict[str, object]:
    heads, hidden = members.number("attention.head_count"), members.number("embedding_length")
    if not 0 < heads <= hidden:
        raise ModelError(f"the file has {heads} attention heads for {hidden} channels; download it again")
    if (layers := members.number("block_count")) > len(members.tensors):
        raise ModelError(f"the file states {layers} layers and has {len(members.tensors)} tensors; download it again")
    head_dim = members.number("attention.key_length", hidden // heads)
    sizes = ("rope.dimension_count", "attention.value_length") if members.architecture != LATENT else ()
    for name in sizes[members.architecture in PARTIAL :]:
        if (found := members.number(name, head_dim)) != head_dim:
            raise ModelError(
                f"the file's {members.architecture}.{name} is {found}, and only that of a head's {head_dim} channels is read; take "
                "the model's safetensors checkpoint"
            )
    return {
        "vocab_size": members.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": members.number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": members.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": members.number("context_length"),
        "rms_norm_eps": members.number("attention.layer_norm_rms_epsilon", members.number("attention.layer_norm_epsilon", 0.0)),
        "rope_parameters": _rope(members),
        "tie_word_embeddings": HEAD not in members.tensors,
        "dtype": _dtype(members.tensors),
    }


def _dtype(tensors: dict[str, Tensor]) -> str:
    """That of most numbers; bfloat16 beside quantised ones."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.type] += prod(tensor.shape)
    return FLOATS.get(counts.most_common(1)[0][0], "bfloat16")


def _rope(members: Members) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": members.number("rope.freq_base", 10000.0)}
    kind = members.text("rope.scaling.type")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": members.number("rope.scaling.factor")}
    if kind == "yarn":
        original = members.number("rope.scaling.original_context_length", members.number("context_length"))
        rope |= {"original_max_position_embeddings": original}
    if members.stretches is not None:
        rope |= _llama3(members.stretches, float(members.number("rope.freq_base", 10000.0)))
    return rope


def _llama3(stretches: Stretches, theta: float) -> dict[str, object]:
    """The settings of Llama 3.1 and later that stretch positions so: all of these models differ in the factor alone. Raises
    ModelError where none does."""
    factor, (low, high, original) = max(stretches, default=0.0), LLAMA3

    def stretch(share: float) -> float:
        """Of a frequency with so great a share of its turns between the two bounds."""
        return 1 / ((1 - share) / factor + share)

    def share(place: int) -> float:
        turns = original * theta ** (-place / len(stretches)) / math.tau
        return min(max((turns - low) / (high - low), 0), 1)

    is_usual = factor >= 1 and theta >= 1
    if not is_usual or not all(math.isclose(found, stretch(share(place)), rel_tol=1e-4) for place, found in enumerate(stretches)):
        raise ModelError(f"the file stretches positions by {STRETCHES} as no Llama does; take the model's safetensors checkpoint")
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", "factor": factor} | dict(zip(names, LLAMA3))


def _llama(members: Members) -> dict[str, object]:
    """Llama and what has its form: Mistral, and Mixtral where there are experts."""
    if "expert_count" in members:
        experts = {"num_local_experts": members.number("expert_count")}
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": None} | experts | _per_token(members)
    return {"architectures": ["LlamaForCausalLM"], "attention_bias": "blk.0.attn_q.bias" in members.tensors}


def _plain(architecture: str) -> Callable[[Members], dict[str, object]]:
    return lambda members: {"architectures": [architecture]}


def _biased(architecture: str) -> Callable[[Members], dict[str, object]]:
    """Of a family with biases of queries, keys and values where the file has them."""
    return lambda members: {"architectures": [architecture], "attention_bias": QUERY_BIAS in members.tensors}


def _granite(members: Members) -> dict[str, object]:
    scales = {
        "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    return _biased("GraniteForCausalLM")(members) | {key: members.number(name, 1.0) for key, name in scales.items()}


def _glm4(members: Members) -> dict[str, object]:
    return _biased("Glm4ForCausalLM")(members) | {"partial_rotary_factor": _share(members)}


def _share(members: Members) -> float:
    """The part of a head's channels that turns."""
    head_dim = members.number("attention.key_length", members.number("embedding_length") // members.number("attention.head_count"))
    return members.number("rope.dimension_count", head_dim) / head_dim


def _cohere(members: Members) -> dict[str, object]:
    return _biased("CohereForCausalLM")(members) | {
        "logit_scale": members.number("logit_scale"),
        "layer_norm_eps": members.number("attention.layer_norm_epsilon"),
    }


def _cohere2(members: Members) -> dict[str, object]:
    return _cohere(members) | {"architectures": ["Cohere2ForCausalLM"], "sliding_window": _window(members)}


def _starcoder2(members: Members) -> dict[str, object]:
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": members.number("attention.layer_norm_epsilon"),
        "use_bias": QUERY_BIAS in members.tensors,
        "sliding_window": _window(members),
    }


def _stablelm(members: Members) -> dict[str, object]:
    return {
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": members.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": _share(members),
        "use_qkv_bias": QUERY_BIAS in members.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in members.tensors,
    }


def _exaone4(members: Members) -> dict[str, object]:
    return {"architectures": ["Exaone4ForCausalLM"], "sliding_window": _window(members)}


def _window(members: Members) -> int | float | None:
    return members.number("attention.sliding_window") if "attention.sliding_window" in members else None


def _qwen3_moe(members: Members) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": members.number("expert_count"),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
    } | _per_token(members)


def _gpt_oss(members: Members) -> dict[str, object]:
    """Its frequencies are stretched between fractions of pairs, whatever llama.cpp does."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": members.number("expert_count"),
        "sliding_window": _window(members),
        "intermediate_size": members.number("expert_feed_forward_length", members.number("feed_forward_length")),
        "rope_parameters": {**_rope(members), "truncate": False},
    } | _per_token(members)


def _per_token(members: Members) -> dict[str, object]:
    return {"num_experts_per_tok": members.number("expert_used_count")}


def _deepseek2(members: Members) -> dict[str, object]:
    """DeepSeek 2 and 3 and what is built as they are, by how experts are marked: 2 stands for sigmoids."""
    turning, query_rank = members.number("rope.dimension_count"), members.number("attention.q_lora_rank", 0)
    keys, values = (f"attention.{each}_length" for each in ("key", "value"))
    sizes = {
        "kv_lora_rank": members.number("attention.kv_lora_rank"),
        "q_lora_rank": query_rank or None,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": members.number(keys + "_mla", members.number(keys, 0)) - turning,
        "v_head_dim": members.number(values + "_mla", members.number(values, 0)),
        "num_key_value_heads": members.number("attention.head_count"),
        "rope_parameters": _warm(members),
    }
    if "expert_count" not in members:
        return {"architectures": ["YoutuForCausalLM"]} | sizes
    groups, is_second = members.number("expert_group_count", 1), members.number("expert_gating_func", 1) == 1
    return {
        "architectures": [f"DeepseekV{2 if is_second else 3}ForCausalLM"],
        "n_routed_experts": members.number("expert_count"),
        "n_shared_experts": members.number("expert_shared_count", 1),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
        "first_k_dense_replace": members.number("leading_dense_block_count", 0),
        "routed_scaling_factor": members.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": members.text("expert_weights_norm") == "True",
        "topk_method": ("group_limited_greedy" if groups > 1 else "greedy") if is_second else "noaux_tc",
        "n_group": groups,
        "topk_group": members.number("expert_group_used_count", 1),
    } | sizes | _per_token(members)


def _warm(members: Members) -> dict[str, object]:
    """The rope; by YaRN scores are warmed, by yarn_log_multiplier, a tenth of DeepSeek's mscale_all_dim, and angles are not."""
    rope, warmth = _rope(members), members.number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] != "yarn":
        return rope
    return rope | {"attention_factor": 1.0} | ({"mscale_all_dim": 10 * warmth} if warmth else {})


def _gemma2(members: Members) -> dict[str, object]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": members.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": members.number("final_logit_softcapping", 30.0),
    } | _gemma(members, GEMMA2_27B_LAYERS)


def _gemma3(members: Members) -> dict[str, object]:
    rope = _rope(members)
    local = {"rope_type": "default", "rope_theta": members.number("rope.freq_base_swa", 10000.0)}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    } | _gemma(members, GEMMA3_27B_LAYERS)


def _gemma(members: Members, largest: int) -> dict[str, object]:
    """Of the two Gemmas, the largest divides scores by the root of its channels a head, the others by that of a head's."""
    hidden, heads = members.number("embedding_length"), members.number("attention.head_count")
    of_head = members.number("attention.key_length", hidden // heads)
    scalar = hidden // heads if members.number("block_count") == largest else of_head
    return {"query_pre_attn_scalar": scalar, "sliding_window": members.number("attention.sliding_window", 4096)}


ARCHITECTURES = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _plain("Qwen2ForCausalLM"),
        "qwen3": _plain("Qwen3ForCausalLM"),
        "qwen3moe": _qwen3_moe,
        "gpt-oss": _gpt_oss,
        LATENT: _deepseek2,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "olmo2": _plain("Olmo2ForCausalLM"),
        "smollm3": _plain("SmolLM3ForCausalLM"),
        "granite": _granite,
        "glm4": _glm4,
        "command-r": _cohere,
        "cohere2": _cohere2,
        "starcoder2": _starcoder2,
        "stablelm": _stablelm,
        "exaone4": _exaone4,
        "seed_oss": _biased("SeedOssForCausalLM"),
        "arcee": _plain("ArceeForCausalLM"),
    }
)
"""By general.architecture."""
