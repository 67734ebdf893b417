"""Writes checkpoints as GGUF files, as llama.cpp's converter does: its names, its order of channels, its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from hybrid_writing import hybrid_forms, hybrid_members

from vnext.models.gguf.header import name_map
from vnext.models.loading.checkpoint import open_checkpoint

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite", "Glm4ForCausalLM": "glm4", "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2", "Starcoder2ForCausalLM": "starcoder2", "StableLmForCausalLM": "stablelm",
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "YoutuForCausalLM"), "deepseek2"),
    "Exaone4ForCausalLM": "exaone4", "SeedOssForCausalLM": "seed_oss", "GptOssForCausalLM": "gpt-oss", "ArceeForCausalLM": "arcee",
    "GemmaForCausalLM": "gemma", "Ernie4_5ForCausalLM": "ernie4_5", "HunYuanDenseV1ForCausalLM": "hunyuan-dense", "Qwen2MoeForCausalLM": "qwen2moe",
    "OlmoeForCausalLM": "olmoe", "Glm4MoeForCausalLM": "glm4moe", "Dots1ForCausalLM": "dots1", "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe", "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    **dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), "granitemoe"),
    "Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2moe", "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe", **dict.fromkeys(("GraniteMoeHybridForCausalLM", "BambaForCausalLM"), "granitehybrid"),
    "FalconH1ForCausalLM": "falcon-h1", "NemotronHForCausalLM": "nemotron_h", "Phi3ForCausalLM": "phi3", "NemotronForCausalLM": "nemotron",
    "Olmo3ForCausalLM": "olmo2", "AfmoeForCausalLM": "afmoe", "ExaoneMoeForCausalLM": "exaone-moe",
    **dict.fromkeys(("MistralForCausalLM", "Ministral3ForCausalLM"), "mistral3"),
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl", "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe", "ApertusForCausalLM": "apertus", "Gemma3nForCausalLM": "gemma3n", "Gemma4ForCausalLM": "gemma4",
}  # fmt: skip
MEMBERS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "attention.sliding_window": "sliding_window", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
BY_LAYER = {"embedding_length_per_layer_input": "hidden_size_per_layer_input", "attention.shared_kv_layers": "num_kv_shared_layers"}
SIGMOID = {
    "expert_shared_count": "n_shared_experts", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}  # fmt: skip
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
OWN_MEMBERS = {
    **dict.fromkeys(
        ("granite", "granitemoe", "granitehybrid"),
        {
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
    ),
    **dict.fromkeys(("qwen2moe", "qwen3next", "qwen35moe"), SHARED),
    **dict.fromkeys(("glm4moe", "dots1"), SIGMOID),
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size", "rope.dimension_count": "rotary_dim"},
    "hunyuan-moe": {"expert_feed_forward_length": "intermediate_size", "expert_used_count": "moe_topk"},
    "ernie4_5-moe": {
        "expert_used_count": "moe_k", "expert_count": "moe_num_experts", "expert_shared_count": "moe_num_shared_experts",
        "leading_dense_block_count": "moe_layer_start_index", "interleave_moe_layer_step": "moe_layer_interval",
    },
    "lfm2moe": {"leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "routed_scaling_factor"},
    **dict.fromkeys(("command-r", "cohere2"), {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"}),
    "deepseek2": {
        "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
        "attention.value_length_mla": "v_head_dim", **SIGMOID,
    },
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
    "phi3": {"rope.scaling.original_context_length": "original_max_position_embeddings"},
    "exaone-moe": SIGMOID | {"expert_shared_count": "num_shared_experts"},
    "nemotron_h_moe": SIGMOID | {
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size", "moe_latent_size": "moe_latent_size",
    },
    "afmoe": {
        "expert_shared_count": "num_shared_experts", "leading_dense_block_count": "num_dense_layers",
        "expert_weights_scale": "route_scale",
    },
    "gemma3n": {"altup.num_inputs": "altup_num_inputs", **BY_LAYER},
    "gemma4": {
        "attention.key_length": "global_head_dim", "attention.value_length": "global_head_dim", "rope.dimension_count": "global_head_dim",
        "attention.key_length_swa": "head_dim", "expert_used_count": "top_k_experts", **BY_LAYER,
    },
    "gpt-oss": {"expert_feed_forward_length": "intermediate_size"},
    "stablelm": {"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
}  # fmt: skip
TOKENS = [f"t{number}" for number in range(97)]
BYTE_LEVEL = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS}
FUSED = {"gemma4"}
"""Architectures whose experts have gate and up in one tensor; of others the converter makes such files on request."""
SCALED = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
"""What stands below a router of Gemma 4."""
DRAWN = {"Q4_K": ((0, 4e-4), (2, 3e-3)), "Q6_K": ((208, 5e-5),)}
"""Types by where their blocks have scales in float16, and what those are."""
Metadata = Mapping[str, Any]


def write(path: Path, metadata: Metadata, tensors: Mapping[str, tuple[np.ndarray, str]] | None = None) -> Path:
    """A GGUF file of these members, and of tensors each as one of the package's types. `path` names it."""
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    for name, value in metadata.items():
        if name != "general.architecture":
            _add(writer, name, value)
    for name, (numbers, type_) in (tensors or {}).items():
        kind = gguf.GGMLQuantizationType[type_]
        data = drawn_blocks(numbers, type_) if type_ in DRAWN else gguf.quants.quantize(numbers, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drawn_blocks(numbers: np.ndarray, type_: str) -> np.ndarray:
    """Random blocks in the place of a tensor's numbers, of about the size of random weights, for types that the package cannot write."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    data = np.random.default_rng(numbers.size).integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // block, size), np.uint8)
    for place, scale in DRAWN[type_]:
        data[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return data.reshape(*numbers.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    else:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)


def mixed(name: str) -> str:
    """The types of Q4_K_M, by the name of a tensor."""
    return "Q6_K" if name.split(".")[-2] in ("attn_v", "ffn_down", "output") else "Q4_K"


def convert(
    folder: Path, path: Path, vocabulary: Metadata | None = None, type_: str | Callable[[str], str] = "F32"
) -> Path:
    """The checkpoint in `folder` as a GGUF file at `path`, its matrices as this type, or each as the type for its name."""
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    for layer in (config.get("per_layer_config") or {}).values():  # of layers without a window, all alike
        config |= {"global_head_dim": layer["head_dim"], "num_global_key_value_heads": layer.get("num_key_value_heads")}
    name = ARCHITECTURES[config["architectures"][0]]
    name += "_moe" * (name == "nemotron_h" and "moe" in config["layers_block_type"])
    vocabulary = BYTE_LEVEL if vocabulary is None else vocabulary
    tensors = tensors_of(folder, config, name, type_)
    learned = {}
    for key in [key for key in tensors if key.startswith("xielu.")]:
        learned[key.rpartition(".")[0]] = [*learned.get(key.rpartition(".")[0], ()), float(tensors.pop(key)[0][0])]
    return write(path, metadata_of(config, name) | learned | vocabulary, tensors)


def metadata_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The members that the converter writes."""
    members = MEMBERS | OWN_MEMBERS.get(name, {})
    found = {key: config[own] for key, own in members.items() if config.get(own) is not None}
    kinds = config.get("layers_block_type") or ("moe",)
    if (experts := config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")) and "moe" in kinds:
        found["expert_count"] = experts
    if "expert_count" not in found:
        found.pop("expert_used_count", None)
    if name == "ernie4_5-moe":
        found["expert_shared_feed_forward_length"] = config["moe_intermediate_size"] * config["moe_num_shared_experts"]
    if name in ("glm4moe", "dots1", "minimax-m2", "lfm2moe", "afmoe", "exaone-moe"):
        found["expert_gating_func"] = 2
    found |= latent_members(config) if name == "deepseek2" else {}
    found |= layered_members(config, name) if name in ("gemma3n", "gemma4") else {}
    found |= hybrid_members(config, name)
    rope = config.get("rope_parameters") or config
    found["rope.freq_base"] = float((rope.get("full_attention") or rope).get("rope_theta", 1e4))
    if rope.get("alpha"):  # Hunyuan's
        found["rope.freq_base"] *= rope["alpha"] ** (config["head_dim"] / (config["head_dim"] - 2))
    rope = rope.get("full_attention") or rope
    if sections := rope.get("mrope_section"):
        found["rope.dimension_sections"] = [*sections, 0]
    if rope.get("rope_type") == "yarn":
        stretched = {"type": "yarn", "factor": rope["factor"], "original_context_length": rope["original_max_position_embeddings"]}
        found |= {f"rope.scaling.{key}": value for key, value in stretched.items()}
    if rope.get("llama_4_scaling_beta"):
        found |= {"attention.temperature_scale": rope["llama_4_scaling_beta"], "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
    if rope.get("partial_rotary_factor") is not None and name != "gemma4":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found["rope.dimension_count"] = int(rope["partial_rotary_factor"] * head_dim)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def layered_members(config: dict[str, Any], name: str) -> dict[str, Any]:
    """What layers of Gemma 3n and 4 have of their own."""
    kinds, count = config["layer_types"], config["num_hidden_layers"]
    found: dict[str, Any] = {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}
    found["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if name == "gemma3n":
        found["activation_sparsity_scale"] = [NormalDist().inv_cdf(each) if each else -np.inf for each in config["activation_sparsity_pattern"]]
        return found
    if whole := config.get("num_global_key_value_heads"):
        found["attention.head_count_kv"] = [whole if kind == "full_attention" else config["num_key_value_heads"] for kind in kinds]
    if config.get("use_double_wide_mlp"):
        first = count - config["num_kv_shared_layers"]
        found["feed_forward_length"] = [config["intermediate_size"] * (1 + (layer >= first)) for layer in range(count)]
    return found


def latent_members(config: dict[str, Any]) -> dict[str, Any]:
    """What follows from several members of a model with latent attention."""
    turning, rope = config["qk_rope_head_dim"], config["rope_parameters"]
    found: dict[str, Any] = {
        "attention.key_length": config["kv_lora_rank"] + turning, "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + turning, "attention.head_count_kv": 1,
        "expert_gating_func": 1 + config["architectures"][0].startswith("DeepseekV3"),
    }  # fmt: skip
    if rope["rope_type"] == "yarn":
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"] / 10
    return found


def by_head(array: np.ndarray, config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What makes keys [heads, rank, plain], and values [heads, value, rank], of a row, as the converter parts them."""
    heads = array.reshape(config["num_attention_heads"], -1, array.shape[1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(values)


def tensors_of(folder: Path, config: dict[str, Any], name: str, type_: str | Callable[[str], str]) -> dict[str, tuple[np.ndarray, str]]:
    """The tensors by llama.cpp's names: experts in one, queries and keys of Llama's form by neighbours, Gemma's norms with 1."""
    with open_checkpoint(folder) as checkpoint:
        stored = {key: checkpoint.part(key, checkpoint.shape(key) or (), ()).copy() for key in checkpoint.names()}
    found: dict[str, Any] = {}
    for key in sorted(stored):
        for own, array in hybrid_forms(key, stored[key].astype(np.float32), config, name):
            add(found, own, array, config, name)
    if name == "phi3" and "long_factor" in config["rope_parameters"]:
        found |= {f"rope_factors_{each}.weight": np.float32(config["rope_parameters"][f"{each}_factor"]) for each in ("long", "short")}
    if name == "gemma4":
        half, share = config["global_head_dim"] // 2, config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        found["rope_freqs.weight"] = np.where(np.arange(half) < int(half * share), 1, 1e30).astype(np.float32)
    if (rope := config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        found["rope_freqs.weight"] = stretches(rope, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    whole = {key: np.stack([each[i] for i in sorted(each)]) if isinstance(each, dict) else each for key, each in found.items()}
    types = {key: type_ if isinstance(type_, str) else type_(key) for key in whole}
    exact = [key for key, array in whole.items() if array.ndim < 2 or key.endswith(".bias") or "conv" in key or "ssm_a" in key]
    return {key: (array, "F32" if key in exact else types[key]) for key, array in whole.items()}


def add(found: dict[str, Any], key: str, array: np.ndarray, config: dict[str, Any], name: str) -> None:
    """Put a tensor among those found, an expert's among its like."""
    names, own, expert = name_map(name, config["num_hidden_layers"]), key, ""
    for stacked in (".experts.", ".altup_projections.", ".altup_unembed_projections."):
        if stacked in key:
            before, _, after = key.partition(stacked)
            expert, _, rest = after.partition(".")
            own = f"{before}{stacked}{rest}"
    if ".act_fn." in key:  # among the metadata, a number a layer
        found[f"xielu.{key.rpartition('.')[2]}.{len(found)}"] = array.reshape(1)
        return
    if key.endswith("kv_b_proj.weight") and config["architectures"] != ["YoutuForCausalLM"]:
        layer = names.get_name(own.replace("kv_b", "k_b"), (".weight",)), names.get_name(own.replace("kv_b", "v_b"), (".weight",))
        found |= dict(zip(layer, by_head(array, config)))
        return
    if scaled := SCALED.get(own.partition(".router.")[2]):
        found[f"blk.{own.split('.')[2]}.{scaled}"] = array
        return
    if own.endswith(("_scale", "_scalar")):
        own += ".weight"
    if expert and name in FUSED:  # up follows gate
        own = own.replace(".gate_proj", ".gate_up_proj").replace(".up_proj", ".gate_up_proj")
    place = names.get_name(own.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
    assert place is not None, own
    if own.endswith(".sinks"):
        place = f"{place}.weight"
    if own.endswith(".expert_bias"):
        place = f"{place}.bias"
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(key.split(".")[-2])
    if name in ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "arcee", "mistral3") and heads:
        array = neighbours(array, config[heads])
    if name in ("gemma", "gemma2", "gemma3", "nemotron") and key.endswith("norm.weight"):
        array = array + 1
    if expert:
        parts = found.setdefault(place, {})
        parts[int(expert)] = np.concatenate((parts[int(expert)], array)) if int(expert) in parts else array
    else:
        found[place] = array


def stretches(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """By what the frequencies of Llama 3.1 are divided, one after the other."""
    low, high = (rope["original_max_position_embeddings"] / rope[f"{each}_freq_factor"] for each in ("low", "high"))
    found = []
    for channel in range(0, head_dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (channel / head_dim)
        smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(1 if length < high else rope["factor"] if length > low else between)
    return np.array(found, np.float32)


def neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """The channels of each head with those of a pair beside each other, as ggml turns them."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def vocabulary_of(spec: dict[str, Any], pre: str) -> dict[str, Any]:
    """The members of a byte-level tokenizer.json."""
    added = {each["content"]: each["id"] for each in spec["added_tokens"]}
    numbers = spec["model"]["vocab"] | added
    tokens = sorted(numbers, key=numbers.__getitem__)
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in tokens],
        "tokenizer.ggml.merges": pairs,
    }
