"""The registry: which module knows an architecture. A family has assemble, forward, logits and the cache's making."""

from __future__ import annotations

from types import MappingProxyType, ModuleType

from vnext.models import llama
from vnext.models.errors import ModelError

FAMILIES = MappingProxyType({"LlamaForCausalLM": llama, "MistralForCausalLM": llama})


def family(architecture: str) -> ModuleType:
    """The module of an architecture. Raises ModelError for one that is unknown."""
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[architecture]
