"""The registry: which file knows an architecture.

A family is a module of this package with
    WEIGHT_AXES                         which axes its weights have, see sharding.py
    parse(raw, generation)              config.json, generation_config.json -> ModelConfig
    assemble(source, config)            checkpoint tensors -> its tree of parameters
    forward(params, kv, batch, config, parallel), logits(params, hidden, config, parallel)
It is imported when a checkpoint asks for it.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType, ModuleType

from vnext.models.errors import ModelError

FAMILIES = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "SmolLM3ForCausalLM": "smollm3",
        "MistralForCausalLM": "mistral",
        "MixtralForCausalLM": "mixtral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
        "Phi3ForCausalLM": "phi3",
        "GPT2LMHeadModel": "gpt2",
        "Olmo2ForCausalLM": "olmo2",
    }
)


def require_family(architecture: str) -> None:
    """Raise ModelError for an architecture that is unknown."""
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(FAMILIES)}")


def family(architecture: str) -> ModuleType:
    """The module of an architecture. Raises ModelError for one that is unknown."""
    require_family(architecture)
    return import_module(f"vnext.models.{FAMILIES[architecture]}")
