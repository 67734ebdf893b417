"""What llama.cpp's converter makes of models with recurrent layers: members of the metadata, and tensors in another form.

Source: convert_hf_to_gguf.py of llama.cpp, its classes LFM2Model, Mamba2Model, GraniteHybridModel, FalconH1Model, NemotronHModel,
Qwen3NextModel and _LinearAttentionVReorderBase.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vnext.models.families.hybrids.lfm2 import mlp_size

Config = dict[str, Any]
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
MAMBAS = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")


def hybrid_members(config: Config, name: str) -> dict[str, Any]:
    """Beside those that are members of config.json."""
    if name in ("lfm2", "lfm2moe"):
        found = {"shortconv.l_cache": config["conv_L_cache"], "attention.layer_norm_rms_epsilon": config["norm_eps"]}
        found |= {} if name == "lfm2moe" else {"feed_forward_length": mlp_size(config)}
        return found | {"attention.head_count_kv": by_layer(config, config["num_key_value_heads"])}
    if name in DELTA_NETS:
        heads = config["linear_num_value_heads"]
        half = int(config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]) // 2
        return {
            "rope.dimension_sections": [half - half // 2, half // 2, 0, 0],
            "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * config["linear_value_head_dim"], "full_attention_interval": 4,
        }  # fmt: skip
    if name not in MAMBAS or "linear_attention" not in kinds_of(config):
        return {"rope.scaling.finetuned": config["position_embedding_type"] == "rope"} if name == "granitehybrid" else {}
    return mamba_members(config, name)


def mamba_members(config: Config, name: str) -> dict[str, Any]:
    found = {
        "ssm.conv_kernel": first_of(config, "mamba_d_conv", "conv_kernel"), "ssm.inner_size": inner_size(config),
        "ssm.state_size": first_of(config, "mamba_d_state", "ssm_state_size"), "ssm.group_count": first_of(config, "mamba_n_groups", "n_groups"),
        "ssm.time_step_rank": first_of(config, "mamba_n_heads", "mamba_num_heads"),
    }  # fmt: skip
    if name == "falcon-h1":
        return found
    found["attention.head_count_kv"] = by_layer(config, config["num_key_value_heads"])
    if name.startswith("nemotron_h"):
        wide = config["moe_intermediate_size"] if name == "nemotron_h_moe" else config["intermediate_size"]
        sizes = [wide if kind in ("mlp", "moe") else 0 for kind in kinds_of(config)]
        return found | {"feed_forward_length": sizes, "attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
    return found | {"rope.scaling.finetuned": config["architectures"] == ["BambaForCausalLM"]}


def kinds_of(config: Config) -> list[str]:
    if (attending := config.get("attn_layer_indices")) is not None:
        return ["full_attention" if layer in attending else "linear_attention" for layer in range(config["num_hidden_layers"])]
    words = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * config["num_hidden_layers"]
    return ["linear_attention" if word == "mamba" else "full_attention" if word == "attention" else word for word in words]


def by_layer(config: Config, heads: int) -> list[int]:
    """The number of heads of keys of each layer, none where it does not attend."""
    return [heads if kind == "full_attention" else 0 for kind in kinds_of(config)]


def first_of(config: Config, *keys: str) -> Any:
    return next(config[key] for key in keys if config.get(key) is not None)


def inner_size(config: Config) -> int:
    if "mamba_num_heads" in config:
        return config["mamba_num_heads"] * config["mamba_head_dim"]
    return config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]


def hybrid_forms(key: str, array: np.ndarray, config: Config, name: str) -> list[tuple[str, np.ndarray]]:
    """What becomes of a tensor: names as the converter's table has them, and numbers."""
    if key.endswith(".A_log"):
        array = -np.exp(array)
    if key.endswith((".conv1d.weight", ".conv.conv.weight")):
        array = array[:, 0]
    if name in ("granitemoe", "granitehybrid") and "shared_mlp" in key:
        return shared_parts(key, array, "shared_expert." if config.get("num_local_experts") else "")
    if name in ("granitemoe", "granitehybrid"):
        key = key.replace("block_sparse_moe.experts", "mlp.experts")
    for own, usual in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        if name == "lfm2moe" and ".experts." in key and key.endswith(f".{own}.weight"):
            key = key.replace("feed_forward.experts", "mlp.experts").replace(f".{own}.", f".{usual}.")
    if name in MAMBAS:
        array = mamba_form(key, scaled(key, array, config) if name == "falcon-h1" else array, config)
    if ".mixer.experts." in key:
        key = key.replace("backbone.", "model.").replace(".mixer.experts.", ".mlp.experts.")
    if name in DELTA_NETS:
        return delta_net_forms(key, array, config, name)
    return [(key.replace(".dt_bias", ".dt_proj.bias"), array)]


def shared_parts(key: str, array: np.ndarray, inner: str) -> list[tuple[str, np.ndarray]]:
    """Granite's MLP that experts share, or that is all there is."""
    here = key.partition("shared_mlp.")[0] + "mlp." + inner
    if "output_linear" in key:
        return [(here + "down_proj.weight", array)]
    return list(zip((here + "gate_proj.weight", here + "up_proj.weight"), np.split(array, 2)))


def mamba_form(key: str, array: np.ndarray, config: Config) -> np.ndarray:
    if key.endswith((".A_log", ".D")):
        return array[:, None]
    if key.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return array.reshape(first_of(config, "mamba_n_groups", "n_groups"), -1)
    return array


def scaled(key: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Falcon H1's weights have its multipliers."""
    gate, down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * into, "q_proj": into, "v_proj": into,
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"], "in_proj": config["ssm_in_multiplier"],
    }  # fmt: skip
    module = key.split(".")[-2]
    array = array * np.float32(factors.get(module, 1.0)) if key.endswith(".weight") else array
    if module == "in_proj":
        inner, state = inner_size(config), config["mamba_n_groups"] * config["mamba_d_state"]
        ends = np.cumsum([inner, inner, state, state])
        parts = np.split(array, ends)
        array = np.concatenate([part * np.float32(each) for part, each in zip(parts, config["ssm_multipliers"])])
    return array


def delta_net_forms(key: str, array: np.ndarray, config: Config, name: str) -> list[tuple[str, np.ndarray]]:
    """Qwen's norms contain the 1; parts of the joined products stand one below the other; heads of values of Qwen 3.5 take turns."""
    if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        array = array + 1
    if key.endswith("in_proj_qkvz.weight"):
        keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
        heads = config["linear_num_key_heads"]
        ratio = config["linear_num_value_heads"] // heads
        by_head = array.reshape(heads, -1, array.shape[-1])
        parts = np.split(by_head, np.cumsum([keys, keys, ratio * values]), axis=1)
        query, key_part, value, gate = (part.reshape(-1, array.shape[-1]) for part in parts)
        return [(key.replace("qkvz", "qkv"), np.concatenate([query, key_part, value])), (key.replace("qkvz", "z"), gate)]
    if name != "qwen3next" and ".linear_attn." in key:
        array = in_turns(key, array, config)
    return [(key.replace(".dt_bias", ".dt_proj.bias"), array)]


def in_turns(key: str, array: np.ndarray, config: Config) -> np.ndarray:
    heads, values = config["linear_num_key_heads"], config["linear_value_head_dim"]
    before = 2 * heads * config["linear_key_head_dim"] if ".in_proj_qkv." in key or ".conv1d." in key else 0

    def turned(part: np.ndarray, size: int) -> np.ndarray:
        return part.reshape(heads, -1, size, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    if ".out_proj." in key:
        return np.ascontiguousarray(turned(np.ascontiguousarray(array.T), values).T)
    if key.endswith((".A_log", ".dt_bias")) or ".in_proj_a." in key or ".in_proj_b." in key:
        return turned(array, 1)
    if ".linear_attn.norm." in key:
        return array
    return np.concatenate([array[:before], turned(array[before:], values)])
