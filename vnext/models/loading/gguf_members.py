"""A configuration as the metadata of a GGUF file: what vnext/models/gguf/config.py reads, written."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from vnext.models.config.model_config import ModelConfig, Recurrent, parse_config
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
        "Qwen3_5ForCausalLM": "qwen35", "Lfm2ForCausalLM": "lfm2",
    }
)  # fmt: skip
"""Whose checkpoints are written, and llama.cpp's names of them."""
UNCOMPARED = frozenset({"architecture", "dtype", "pooling", "bos_token_id", "eos_token_ids"})
"""Fields that the arithmetic does not depend on."""


def config_members(config: ModelConfig) -> dict[str, object]:
    """The members by name. Raises ModelError for an architecture that is not written."""
    name = ARCHITECTURES.get(config.architecture)
    if name is None:
        names = ", ".join(ARCHITECTURES)
        raise ModelError(f"{config.architecture} is not written as GGUF, only {names}: {REMEDY}")
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
    if any(config.windows) and name in ("gemma2", "gemma3"):
        found["attention.sliding_window"] = max(config.windows)
    if config.local_rope:
        found["rope.freq_base_swa"] = float(config.local_rope.theta)
    if name == "gemma2":
        found |= {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logits_softcap}
    if experts := config.experts:
        counts = {"expert_count": experts.count, "expert_used_count": experts.per_token}
        found |= counts | {"expert_feed_forward_length": experts.intermediate_size}
    if config.recurrent:
        found |= _recurrent_members(config, config.recurrent)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def _recurrent_members(config: ModelConfig, recurrent: Recurrent) -> dict[str, object]:
    """Of short convolutions, or of delta nets. llama.cpp takes every so many layers of the latter for those that attend. Raises
    ModelError where that is not so."""
    attending = [layer for layer in range(config.layer_count) if layer not in recurrent.layers]
    if not recurrent.key_dim:
        counts = [config.kv_head_count if layer in attending else 0 for layer in range(config.layer_count)]
        return {"shortconv.l_cache": recurrent.width, "attention.head_count_kv": counts}
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
    read = {name: array("q", value) if isinstance(value, list) else value for name, value in members.items()}
    header = Header(read, tensors, 0)  # type: ignore[arg-type]  # all are such values
    found = parse_config(config_of(header, {STRETCHES: stretches.tolist()} if len(stretches) else {}), {})
    both = (msgspec.structs.asdict(each) for each in (config, found))
    one, other = ({key: value for key, value in each.items() if key not in UNCOMPARED} for each in both)
    if wrong := [f"{key} {_shown(one[key])} as {_shown(other[key])}" for key in one if one[key] != other[key]]:
        raise ModelError(f"a GGUF file of this architecture would state {', '.join(wrong)}; {REMEDY}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
