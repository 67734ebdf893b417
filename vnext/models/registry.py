"""Registry: maps an architecture to the module of its family.

A family is a module of `families/` with the fields of `Family`. It is imported when a checkpoint needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from vnext.models.errors import ModelError
from vnext.models.missing import PREFIX, REMEDY, is_decoder, package, what_it_needs, writers
from vnext.models.outside import from_file, from_package


class Family(NamedTuple):
    """What a module of `families/` defines under these names.

    `WEIGHT_AXES`: which axes its weights have, see layers/sharding.py; or a function that gives them for a configuration
    `parse(raw, generation)`: config.json and generation_config.json -> ModelConfig; raises ModelError
    `assemble(source, config)`: a checkpoint's tensors -> its tree of parameters
    `forward(params, kv, batch, config, parallel)`: hidden states of the sampled tokens [S, hidden], and the cache
    `logits(params, hidden, config, parallel)`: float32 [S, V]
    """

    WEIGHT_AXES: Mapping[str, Any] | Callable[..., Any]
    parse: Callable[..., Any]
    assemble: Callable[..., Any]
    forward: Callable[..., Any]
    logits: Callable[..., Any]


FAMILIES = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "SmolLM3ForCausalLM": "smollm3",
        "MistralForCausalLM": "mistral",
        "MinistralForCausalLM": "mistral",
        "MixtralForCausalLM": "mixtral",
        "Qwen2ForCausalLM": "qwen2",
        "MiMoForCausalLM": "mimo",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
        "Phi3ForCausalLM": "phi3",
        "GPT2LMHeadModel": "gpt2",
        "Olmo2ForCausalLM": "olmo2",
        "Lfm2ForCausalLM": "lfm2",
        "Qwen3_5ForCausalLM": "qwen3_5",
        "Qwen3_5ForConditionalGeneration": "qwen3_5",
        "GraniteForCausalLM": "granite",
        "GraniteMoeHybridForCausalLM": "granite",
        "SeedOssForCausalLM": "llama",
        "InternLM3ForCausalLM": "llama",
        "Ernie4_5ForCausalLM": "llama",
        "Olmo3ForCausalLM": "olmo2",
        "Exaone4ForCausalLM": "exaone4",
        "Ministral3ForCausalLM": "mistral",
        "Mistral3ForConditionalGeneration": "mistral",
        "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm",
        "CohereForCausalLM": "cohere",
        "Cohere2ForCausalLM": "cohere",
        "HunYuanDenseV1ForCausalLM": "hunyuan",
        "ArceeForCausalLM": "arcee",
        "ApertusForCausalLM": "arcee",
        "NemotronForCausalLM": "arcee",
        "Starcoder2ForCausalLM": "starcoder2",
        "StableLmForCausalLM": "starcoder2",
        "GPTNeoXForCausalLM": "gpt_neox",
        "BambaForCausalLM": "granite",
        "Qwen2MoeForCausalLM": "qwen3_moe",
        "OlmoeForCausalLM": "olmo2",
        "GemmaForCausalLM": "gemma2",
        "HeliumForCausalLM": "llama",
    }
)


MODEL_TYPES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "mimo": "MiMoForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma3": "Gemma3ForConditionalGeneration",
        "phi3": "Phi3ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "olmo2": "Olmo2ForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "granite": "GraniteForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "internlm3": "InternLM3ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral3": "Mistral3ForConditionalGeneration",
        "glm": "GlmForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
        "arcee": "ArceeForCausalLM",
        "apertus": "ApertusForCausalLM",
        "nemotron": "NemotronForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
        "bamba": "BambaForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "gemma": "GemmaForCausalLM",
        "helium": "HeliumForCausalLM",
    }
)
"""config.json's model_type -> the architecture, for files that name none."""


BODIES = MappingProxyType(
    {
        "LlamaModel": "LlamaForCausalLM",
        "SmolLM3Model": "SmolLM3ForCausalLM",
        "MistralModel": "MistralForCausalLM",
        "MinistralModel": "MinistralForCausalLM",
        "MixtralModel": "MixtralForCausalLM",
        "Qwen2Model": "Qwen2ForCausalLM",
        "Qwen3Model": "Qwen3ForCausalLM",
        "Qwen3MoeModel": "Qwen3MoeForCausalLM",
        "Gemma2Model": "Gemma2ForCausalLM",
        "Gemma3TextModel": "Gemma3ForCausalLM",
        "Phi3Model": "Phi3ForCausalLM",
        "GPT2Model": "GPT2LMHeadModel",
        "Olmo2Model": "Olmo2ForCausalLM",
        "Lfm2Model": "Lfm2ForCausalLM",
        "Qwen3_5TextModel": "Qwen3_5ForCausalLM",
        "GraniteModel": "GraniteForCausalLM",
        "GraniteMoeHybridModel": "GraniteMoeHybridForCausalLM",
        "SeedOssModel": "SeedOssForCausalLM",
        "InternLM3Model": "InternLM3ForCausalLM",
        "Ernie4_5Model": "Ernie4_5ForCausalLM",
        "Olmo3Model": "Olmo3ForCausalLM",
        "Exaone4Model": "Exaone4ForCausalLM",
        "Ministral3Model": "Ministral3ForCausalLM",
        "GlmModel": "GlmForCausalLM",
        "Glm4Model": "Glm4ForCausalLM",
        "CohereModel": "CohereForCausalLM",
        "Cohere2Model": "Cohere2ForCausalLM",
        "HunYuanDenseV1Model": "HunYuanDenseV1ForCausalLM",
        "ArceeModel": "ArceeForCausalLM",
        "ApertusModel": "ApertusForCausalLM",
        "NemotronModel": "NemotronForCausalLM",
        "Starcoder2Model": "Starcoder2ForCausalLM",
        "StableLmModel": "StableLmForCausalLM",
        "BambaModel": "BambaForCausalLM",
        "Qwen2MoeModel": "Qwen2MoeForCausalLM",
        "OlmoeModel": "OlmoeForCausalLM",
        "GemmaModel": "GemmaForCausalLM",
        "HeliumModel": "HeliumForCausalLM",
    }
)
"""Models saved without what makes them write -> the architecture that they belong to."""


HEADS = MappingProxyType({"LlamaForCausalLMEagle3": "llama_eagle3"})
"""Heads that draft for a model and are none themselves."""


IMPLEMENTATION = "vnext_model_impl"
"""Member of a config.json: the value of --model-impl, where the user gave one."""
OUR_OWN, THEIRS = ("vnext", "vllm"), "transformers"
HOSTED = "vnext.models.hosted.family"


def computed_as(architecture: str, raw: Mapping[str, object]) -> str:
    """The architecture as it is computed: by a family of ours, or by transformers, if config.json asks for it or no family of ours
    knows it. Raises ModelError."""
    asked = raw.get(IMPLEMENTATION)
    if asked == THEIRS:
        if package() is None:
            raise ModelError(f"--model-impl transformers needs the package transformers: {REMEDY}")
        if architecture not in writers(str(raw.get("model_type"))):
            raise ModelError(f"the installed transformers has no decoder {architecture!r}: leave --model-impl transformers out")
        return PREFIX + architecture
    if asked in OUR_OWN or architecture in HEADS or is_known(architecture) or not is_decoder(architecture):
        return architecture
    return PREFIX + architecture if architecture in writers(str(raw.get("model_type"))) else architecture


def is_known(architecture: str) -> bool:
    """Whether there is a family for an architecture, ours or one from outside."""
    return architecture in FAMILIES or from_file(architecture) is not None or from_package(architecture) is not None


def require_family(architecture: str) -> None:
    """Raise ModelError for an architecture that is unknown."""
    if architecture.startswith(PREFIX) or is_known(architecture):
        return
    if architecture in HEADS:
        raise ModelError(f"{architecture!r} is a head that drafts for a model: name it in --speculative-config, method eagle3")
    need = what_it_needs(architecture)
    why = f"it is known and missing here, it needs {need}" if need else "no such name is known here, check it in config.json"
    if need and is_decoder(architecture) and package() is None:
        why += f", or transformers to compute it: {REMEDY}"
    raise ModelError(f"architecture {architecture!r} is not supported: {why}; supported are {', '.join(FAMILIES)}")


@cache
def family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelError for one that is unknown."""
    if architecture not in HEADS:
        require_family(architecture)
    return Family(*(getattr(_module(architecture), name) for name in Family._fields))


def assemble_mtp(architecture: str) -> Callable[..., Any] | None:
    """What puts together the layer that drafts of an architecture's checkpoints; None where they have none."""
    found: Callable[..., Any] | None = getattr(_module(architecture), "assemble_mtp", None)
    return found


def _module(architecture: str) -> Any:
    if architecture.startswith(PREFIX):
        return import_module(HOSTED)
    ours = (FAMILIES | HEADS).get(architecture)
    return from_file(architecture) or (import_module(f"vnext.models.families.{ours}") if ours else from_package(architecture))
