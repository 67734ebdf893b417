"""The configuration in a GGUF file's metadata as a checkpoint's config.json.

One function an architecture of llama.cpp says what its members mean to a family of vnext; what the file does not say follows from
its tensors, as in llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isclose, prod
from types import MappingProxyType

from vnext.models.errors import ModelError
from vnext.models.gguf import experts, gemmas, hybrids
from vnext.models.gguf.header import Header, Tensor
from vnext.models.gguf.members import (
    QUERY_BIAS,
    Members,
    Stretches,
    biased,
    epsilon_of,
    long_rope,
    multipliers,
    per_token,
    plain,
    rope_of,
    turning_share,
    window_of,
)

FLOATS = MappingProxyType({"F32": "float32", "F16": "float16"})
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
XIELU = MappingProxyType({"xielu.beta": 0.5, "xielu.eps": -1e-6})
"""Of Apertus's activation, in all models."""
PARTIAL = frozenset(
    {
        "glm4", "stablelm", "glm4moe", "minimax-m2", "qwen3next", "qwen35", "qwen35moe", "granitehybrid", "nemotron_h",
        "nemotron_h_moe", "nemotron", "phi3",
    }
)  # fmt: skip
"""Architectures whose heads turn in part, or not at all."""


def config_of(header: Header, stretches: Mapping[str, Stretches] = MappingProxyType({})) -> dict[str, object]:
    """config.json of a file. `stretches`: the numbers of its tensors of a number a turning pair, by name. Raises ModelError."""
    members = Members(header, stretches)
    own = ARCHITECTURES.get(members.architecture) if isinstance(members.architecture, str) else None
    if own is None:
        raise ModelError(
            f"the file's architecture {members.architecture!r:.120} is not read; read are {', '.join(ARCHITECTURES)}: take "
            "the model's safetensors checkpoint"
        )
    if EMBEDDING not in members.tensors or len(members.tensors[EMBEDDING].shape) != 2:
        raise ModelError(f"the file has no {EMBEDDING}, which a model begins with; download it again")
    return _common(members) | own(members)


def _common(members: Members) -> dict[str, object]:
    heads, hidden = members.number("attention.head_count"), members.number("embedding_length")
    if not 0 < heads <= hidden:
        raise ModelError(f"the file has {heads} attention heads for {hidden} channels; download it again")
    if (layers := members.layer_count()) > len(members.tensors):
        raise ModelError(f"the file states {layers} layers and has {len(members.tensors)} tensors; download it again")
    head_dim = members.number("attention.key_length", hidden // heads)
    sizes = ("rope.dimension_count", "attention.value_length") if members.architecture != experts.LATENT else ()
    for name in sizes[members.architecture in PARTIAL :]:
        if (found := members.number(name, head_dim)) != head_dim:
            raise ModelError(
                f"the file's {members.architecture}.{name} is {found}, and only that of a head's {head_dim} channels is read; take "
                "the model's safetensors checkpoint"
            )
    usual = members.number("expert_feed_forward_length") if "expert_feed_forward_length" in members else None
    return {
        "vocab_size": members.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": members.least("feed_forward_length", usual),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": members.least("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": members.number("context_length"),
        "rms_norm_eps": epsilon_of(members),
        "rope_parameters": rope_of(members),
        "tie_word_embeddings": HEAD not in members.tensors,
        "dtype": _dtype(members.tensors),
    }


def _dtype(tensors: dict[str, Tensor]) -> str:
    """That of most numbers; bfloat16 beside quantised ones."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.type] += prod(tensor.shape)
    return FLOATS.get(counts.most_common(1)[0][0], "bfloat16")


def _llama(members: Members) -> dict[str, object]:
    """Llama and what has its form: Mistral, and Mixtral where there are experts."""
    if "expert_count" in members:
        experts = {"num_local_experts": members.number("expert_count")}
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": None} | experts | per_token(members)
    return {"architectures": ["LlamaForCausalLM"], "attention_bias": "blk.0.attn_q.bias" in members.tensors}


def _mistral3(members: Members) -> dict[str, object]:
    """Mistral Small 3.1, or Ministral 3, whose queries grow with their position."""
    common: dict[str, object] = {"sliding_window": window_of(members)}
    if "attention.temperature_scale" not in members:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"} | common
    rope = rope_of(members) | {"llama_4_scaling_beta": members.number("attention.temperature_scale")}
    if warmth := members.number("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": warmth}
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope} | common


def _granite(members: Members) -> dict[str, object]:
    return biased("GraniteForCausalLM")(members) | multipliers(members)


def _glm4(members: Members) -> dict[str, object]:
    return biased("Glm4ForCausalLM")(members) | {"partial_rotary_factor": turning_share(members)}


def _cohere(members: Members) -> dict[str, object]:
    return biased("CohereForCausalLM")(members) | {
        "logit_scale": members.number("logit_scale"),
        "layer_norm_eps": members.number("attention.layer_norm_epsilon"),
    }


def _cohere2(members: Members) -> dict[str, object]:
    return _cohere(members) | {"architectures": ["Cohere2ForCausalLM"], "sliding_window": window_of(members)}


def _starcoder2(members: Members) -> dict[str, object]:
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": members.number("attention.layer_norm_epsilon"),
        "use_bias": QUERY_BIAS in members.tensors,
        "sliding_window": window_of(members),
    }


def _stablelm(members: Members) -> dict[str, object]:
    return {
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": members.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": turning_share(members),
        "use_qkv_bias": QUERY_BIAS in members.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in members.tensors,
    }


def _nemotron(members: Members) -> dict[str, object]:
    return {
        "architectures": ["NemotronForCausalLM"],
        "norm_eps": members.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": turning_share(members),
    }


def _phi3(members: Members) -> dict[str, object]:
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": window_of(members) or None} | long_rope(members)


def _olmo2(members: Members) -> dict[str, object]:
    """OLMo 2, or OLMo 3, whose layers with a window turn as the others would unstretched."""
    if (window := window_of(members)) is None:
        return {"architectures": ["Olmo2ForCausalLM"]}
    local = {"rope_type": "default", "rope_theta": members.number("rope.freq_base", 10000.0)}
    ropes = {"full_attention": rope_of(members), "sliding_attention": local}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, "rope_parameters": ropes}


def _apertus(members: Members) -> dict[str, object]:
    """Raises ModelError for an activation of other numbers than all of these models have."""
    for name, usual in XIELU.items():
        if not all(isclose(found, usual, rel_tol=1e-2) for found in members.each(name, usual)):
            raise ModelError(f"the file's {name} is not {usual:g}, which alone is read; take the model's safetensors checkpoint")
    return biased("ApertusForCausalLM")(members) | {"hidden_act": "xielu"}


def _exaone4(members: Members) -> dict[str, object]:
    return {"architectures": ["Exaone4ForCausalLM"], "sliding_window": window_of(members)}


ARCHITECTURES = MappingProxyType(
    {
        "llama": _llama,
        "mistral3": _mistral3,
        **dict.fromkeys(("qwen2", "qwen2vl"), plain("Qwen2ForCausalLM")),
        **dict.fromkeys(("qwen3", "qwen3vl"), plain("Qwen3ForCausalLM")),
        "olmo2": _olmo2,
        "phi3": _phi3,
        "nemotron": _nemotron,
        "smollm3": plain("SmolLM3ForCausalLM"),
        "granite": _granite,
        "glm4": _glm4,
        "command-r": _cohere,
        "cohere2": _cohere2,
        "starcoder2": _starcoder2,
        "stablelm": _stablelm,
        "exaone4": _exaone4,
        "seed_oss": biased("SeedOssForCausalLM"),
        "ernie4_5": plain("Ernie4_5ForCausalLM"),
        "hunyuan-dense": plain("HunYuanDenseV1ForCausalLM"),
        "arcee": plain("ArceeForCausalLM"),
        "apertus": _apertus,
        **gemmas.ARCHITECTURES,
        **experts.ARCHITECTURES,
        **hybrids.ARCHITECTURES,
    }
)
"""By general.architecture."""
