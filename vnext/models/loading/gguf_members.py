"""A configuration as the metadata of a GGUF file: what vnext/models/gguf/config.py reads, written."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from vnext.models.config.model_config import ModelConfig, Recurrent, parse_config, without_windows
from vnext.models.errors import ModelError
from vnext.models.gguf.config import config_of
from vnext.models.gguf.header import Header, Tensor
from vnext.models.gguf.members import STRETCHES
from vnext.models.gguf.vocabulary_out import REMEDY

ARCHITECTURES = MappingProxyType(
    {
        "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama", "SmolLM3ForCausalLM": "smollm3",
        "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
        "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
        "Qwen3_5ForCausalLM": "qwen35", "Lfm2ForCausalLM": "lfm2", "GraniteMoeHybridForCausalLM": "granitehybrid",
        "GraniteForCausalLM": "granite", "GptOssForCausalLM": "gpt-oss", "Gemma4ForCausalLM": "gemma4",
        "Gemma3nForCausalLM": "gemma3n",
    }
)  # fmt: skip
"""Whose checkpoints are written, and llama.cpp's names of them."""
WINDOWED = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss")
"""Architectures whose files state a window."""
UNCOMPARED = frozenset({"architecture", "dtype", "pooling", "bos_token_id", "eos_token_ids"})
"""Fields that the arithmetic does not depend on."""


def config_members(config: ModelConfig) -> dict[str, object]:
    """The members by name. Raises ModelError for an architecture that is not written."""
    name = ARCHITECTURES.get(config.architecture)
    if name is None:
        names = ", ".join(ARCHITECTURES)
        raise ModelError(f"{config.architecture} is not written as GGUF, only {names}: {REMEDY}")
    if name == "granitehybrid" and config.recurrent is None:
        name = "granite"
    found: dict[str, object] = {
        "vocab_size": config.vocab_size, "context_length": config.position_count_max, "embedding_length": config.hidden_size,
        "block_count": config.layer_count, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.head_count, "attention.head_count_kv": config.kv_head_count,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": int(config.head_dim * config.rope.share), "rope.freq_base": float(config.rope.theta),
    }  # fmt: skip
    if (rope := config.rope).kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        found["rope.scaling.original_context_length"] = rope.original_position_count
    if any(config.windows) and name in WINDOWED:
        found["attention.sliding_window"] = max(config.windows)
    if config.local_rope:
        found["rope.freq_base_swa"] = float(config.local_rope.theta)
    if name == "gemma2":
        found |= {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logits_softcap}
    if experts := config.experts:
        counts = {"expert_count": experts.count, "expert_used_count": experts.per_token}
        found |= counts | {"expert_feed_forward_length": experts.intermediate_size}
    if name.startswith("granite"):
        found |= _granite_members(config)
    elif config.recurrent:
        found |= _recurrent_members(config, config.recurrent)
    if name in ("gemma3n", "gemma4"):
        found |= _layered_members(config)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def _granite_members(config: ModelConfig) -> dict[str, object]:
    """Of Granite: multipliers, and Mamba-2."""
    form, experts, recurrent = config.form, config.experts, config.recurrent
    found: dict[str, object] = {
        "embedding_scale": float(form.embedding_scale), "residual_scale": float(form.residual_scale),
        "logit_scale": 1 / form.logits_scale, "attention.scale": float(config.query_scale or 1.0),
    }  # fmt: skip
    if recurrent is None:
        return found
    return found | {
        "feed_forward_length": experts.intermediate_size if experts else config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size, "rope.scaling.finetuned": not config.still_layers,
        "attention.head_count_kv": _by_layer(config, recurrent),
        "ssm.conv_kernel": recurrent.width, "ssm.state_size": recurrent.key_dim, "ssm.group_count": recurrent.key_heads,
        "ssm.time_step_rank": recurrent.value_heads, "ssm.inner_size": recurrent.values,
    }  # fmt: skip


def _by_layer(config: ModelConfig, recurrent: Recurrent) -> list[int]:
    """The heads of keys of each layer, none where it does not attend."""
    return [0 if layer in recurrent.layers else config.kv_head_count for layer in range(config.layer_count)]


def _layered_members(config: ModelConfig) -> dict[str, object]:
    """Of Gemma 3n and 4, what their layers have of their own."""
    whole, count = without_windows(config), config.layer_count
    found: dict[str, object] = {
        "attention.sliding_window_pattern": [window > 0 for window in config.windows],
        "attention.shared_kv_layers": sum(layer != own for layer, own in enumerate(config.cache_layers)),
        "embedding_length_per_layer_input": config.layer_inputs.size if config.layer_inputs else 0,
        "feed_forward_length": list(config.mlp_sizes or [config.intermediate_size] * count),
        "final_logit_softcapping": float(config.logits_softcap),
    }
    if streams := config.streams:
        deviations = [float("-inf") if each is None else each for each in config.gate_cutoffs or [None] * count]
        return found | {"activation_sparsity_scale": deviations, "altup.num_inputs": streams.count, "altup.active_idx": 0}
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        found |= {name: whole.head_dim, f"{name}_swa": config.head_dim}
    heads = [(config if window else whole).kv_head_count for window in config.windows]
    return found | {"attention.head_count_kv": heads}


def _recurrent_members(config: ModelConfig, recurrent: Recurrent) -> dict[str, object]:
    """Of short convolutions, or of delta nets. llama.cpp takes every so many layers of the latter for those that attend. Raises
    ModelError where that is not so."""
    attending = [layer for layer in range(config.layer_count) if layer not in recurrent.layers]
    if not recurrent.key_dim:
        return {"shortconv.l_cache": recurrent.width, "attention.head_count_kv": _by_layer(config, recurrent)}
    interval = attending[0] + 1 if attending else config.layer_count + 1
    if attending != list(range(interval - 1, config.layer_count, interval)):
        raise ModelError(f"layers {attending} attend, and a GGUF file of this architecture can state only every so many; {REMEDY}")
    pairs = int(config.head_dim * config.rope.share) // 2
    return {
        "full_attention_interval": interval, "rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0],
        "ssm.conv_kernel": recurrent.width, "ssm.state_size": recurrent.key_dim, "ssm.group_count": recurrent.key_heads,
        "ssm.time_step_rank": recurrent.value_heads, "ssm.inner_size": recurrent.values,
    }  # fmt: skip


def require_same(
    config: ModelConfig, members: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], stretches: np.ndarray
) -> None:
    """Raise ModelError unless a file of these members and tensors has this configuration. `stretches`: the numbers of the tensor
    STRETCHES."""
    tensors = {name: Tensor("BF16", shape, 0, 0) for name, shape in shapes.items()}
    read = {name: _array(value) if isinstance(value, list) else value for name, value in members.items()}
    header = Header(read, tensors, 0)  # type: ignore[arg-type]  # all are such values
    found = parse_config(config_of(header, {STRETCHES: stretches.tolist()} if len(stretches) else {}), {})
    both = (msgspec.structs.asdict(each) for each in (config, found))
    one, other = ({key: value for key, value in each.items() if key not in UNCOMPARED} for each in both)
    if wrong := [f"{key} {_shown(one[key])} as {_shown(other[key])}" for key in one if one[key] != other[key]]:
        raise ModelError(f"a GGUF file of this architecture would state {', '.join(wrong)}; {REMEDY}")


def _array(value: list[float]) -> array[float]:
    return array("d" if any(isinstance(each, float) for each in value) else "q", value)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
