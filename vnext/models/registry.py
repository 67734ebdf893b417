"""Registry: maps an architecture to the module of its family.

A family is a module of `families/` with the fields of `Family`, but those that it has from Llama. It is imported when a checkpoint
needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from vnext.models.errors import ModelError
from vnext.models.outside import (
    PLUS,
    PREFIX,
    REMEDY,
    from_file,
    from_package,
    has_tower_of,
    is_decoder,
    package,
    parts_seen,
    what_it_needs,
    writers,
)


class Family(NamedTuple):
    """What a module of `families/` defines under these names.

    `WEIGHT_AXES`: which axes its weights have beside the usual ones, see layers/sharding.py; or a function that gives them for a
    configuration
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


DECODER = "vnext.models.layers.decoder"
USUAL = MappingProxyType({"WEIGHT_AXES": "vnext.models.layers.sharding", "forward": DECODER, "logits": DECODER})
"""Where the fields are that a module need not define."""


class Row(NamedTuple):
    """An architecture's file in `families/`, the model_type of its config.json, and the name under which a model is saved without
    what makes it write, "" where none is read."""

    file: str
    model_type: str
    body: str = ""


ROWS = MappingProxyType(
    {
        "LlamaForCausalLM": Row("llama", "llama", "LlamaModel"),
        "SmolLM3ForCausalLM": Row("llama", "smollm3", "SmolLM3Model"),
        "MistralForCausalLM": Row("mistral", "mistral", "MistralModel"),
        "MinistralForCausalLM": Row("mistral", "ministral", "MinistralModel"),
        "CwmForCausalLM": Row("mistral", "cwm", "CwmModel"),
        "MixtralForCausalLM": Row("experts.mixtral", "mixtral", "MixtralModel"),
        "Qwen2ForCausalLM": Row("qwen2", "qwen2", "Qwen2Model"),
        "MiMoForCausalLM": Row("mimo", "mimo"),
        "MiMoV2FlashForCausalLM": Row("experts.mimo_v2", "mimo_v2_flash", "MiMoV2FlashModel"),
        "Qwen3ForCausalLM": Row("qwen2", "qwen3", "Qwen3Model"),
        "GptOssForCausalLM": Row("experts.gpt_oss", "gpt_oss", "GptOssModel"),
        "Qwen3MoeForCausalLM": Row("experts.qwen3_moe", "qwen3_moe", "Qwen3MoeModel"),
        "Gemma2ForCausalLM": Row("gemma2", "gemma2", "Gemma2Model"),
        "VaultGemmaForCausalLM": Row("gemma2", "vaultgemma", "VaultGemmaModel"),
        "Gemma3ForCausalLM": Row("gemma2", "gemma3_text", "Gemma3TextModel"),
        "Gemma3ForConditionalGeneration": Row("towers.gemma3_seeing", "gemma3"),
        "Gemma3nForCausalLM": Row("gemma3n", "gemma3n_text", "Gemma3nTextModel"),
        "Gemma3nForConditionalGeneration": Row("gemma3n", "gemma3n"),
        "Gemma4ForCausalLM": Row("gemma4", "gemma4_text", "Gemma4TextModel"),
        "Gemma4ForConditionalGeneration": Row("gemma4", "gemma4"),
        "Gemma4UnifiedForCausalLM": Row("gemma4", "gemma4_unified_text", "Gemma4UnifiedTextModel"),
        "Gemma4UnifiedForConditionalGeneration": Row("gemma4", "gemma4_unified"),
        "Phi3ForCausalLM": Row("phi3", "phi3", "Phi3Model"),
        "GPT2LMHeadModel": Row("gpt2", "gpt2", "GPT2Model"),
        "Olmo2ForCausalLM": Row("olmo2", "olmo2", "Olmo2Model"),
        "Lfm2ForCausalLM": Row("hybrids.lfm2", "lfm2", "Lfm2Model"),
        "Qwen3_5ForCausalLM": Row("hybrids.qwen3_5", "qwen3_5_text", "Qwen3_5TextModel"),
        "Qwen3_5ForConditionalGeneration": Row("towers.qwen3_vl", "qwen3_5"),
        "Qwen3_5MoeForCausalLM": Row("hybrids.qwen3_5", "qwen3_5_moe_text", "Qwen3_5MoeTextModel"),
        "Qwen3_5MoeForConditionalGeneration": Row("towers.qwen3_vl", "qwen3_5_moe"),
        "RecurrentGemmaForCausalLM": Row("hybrids.recurrent_gemma", "recurrent_gemma", "RecurrentGemmaModel"),
        "JambaForCausalLM": Row("hybrids.jamba", "jamba", "JambaModel"),
        "MambaForCausalLM": Row("hybrids.mamba", "mamba", "MambaModel"),
        "FalconMambaForCausalLM": Row("hybrids.mamba", "falcon_mamba", "FalconMambaModel"),
        "Mamba2ForCausalLM": Row("hybrids.mamba", "mamba2", "Mamba2Model"),
        "MiniMaxForCausalLM": Row("hybrids.minimax", "minimax", "MiniMaxModel"),
        "KimiLinearForCausalLM": Row("hybrids.kimi_linear", "kimi_linear", "KimiLinearModel"),
        "OlmoHybridForCausalLM": Row("hybrids.olmo_hybrid", "olmo_hybrid", "OlmoHybridModel"),
        "BailingHybridForCausalLM": Row("hybrids.ling_3", "bailing_hybrid", "BailingHybridModel"),
        "Lfm3ForCausalLM": Row("hybrids.lfm2", "lfm3", "Lfm3Model"),
        "FalconH1ForCausalLM": Row("hybrids.falcon_h1", "falcon_h1", "FalconH1Model"),
        "NemotronHForCausalLM": Row("hybrids.nemotron_h", "nemotron_h", "NemotronHModel"),
        "Qwen3NextForCausalLM": Row("hybrids.qwen3_5", "qwen3_next", "Qwen3NextModel"),
        "Lfm2MoeForCausalLM": Row("hybrids.lfm2", "lfm2_moe", "Lfm2MoeModel"),
        "GraniteForCausalLM": Row("granite", "granite", "GraniteModel"),
        "HyperCLOVAXForCausalLM": Row("granite", "hyperclovax", "HyperCLOVAXModel"),
        "GraniteMoeForCausalLM": Row("granite", "granitemoe", "GraniteMoeModel"),
        "GraniteMoeSharedForCausalLM": Row("granite", "granitemoeshared", "GraniteMoeSharedModel"),
        "GraniteMoeHybridForCausalLM": Row("granite", "granitemoehybrid", "GraniteMoeHybridModel"),
        "GraniteSWAForCausalLM": Row("granite", "granite_swa", "GraniteSWAModel"),
        "GraniteMoeSWAForCausalLM": Row("granite", "granitemoe_swa", "GraniteMoeSWAModel"),
        "SeedOssForCausalLM": Row("llama", "seed_oss", "SeedOssModel"),
        "InternLM3ForCausalLM": Row("llama", "internlm3", "InternLM3Model"),
        "Ernie4_5ForCausalLM": Row("llama", "ernie4_5", "Ernie4_5Model"),
        "Olmo3ForCausalLM": Row("olmo2", "olmo3", "Olmo3Model"),
        "Exaone4ForCausalLM": Row("exaone4", "exaone4", "Exaone4Model"),
        "ExaoneMoeForCausalLM": Row("exaone4", "exaone_moe", "ExaoneMoeModel"),
        "Ministral3ForCausalLM": Row("mistral", "ministral3", "Ministral3Model"),
        "Mistral3ForConditionalGeneration": Row("towers.mistral3", "mistral3"),
        "GlmForCausalLM": Row("glm", "glm", "GlmModel"),
        "Glm4ForCausalLM": Row("glm", "glm4", "Glm4Model"),
        "CohereForCausalLM": Row("cohere", "cohere", "CohereModel"),
        "Cohere2ForCausalLM": Row("cohere", "cohere2", "Cohere2Model"),
        "Cohere2MoeForCausalLM": Row("cohere", "cohere2_moe", "Cohere2MoeModel"),
        "CohereCompassForCausalLM": Row("cohere", "cohere_compass_text", "CohereCompassTextModel"),
        "HunYuanDenseV1ForCausalLM": Row("hunyuan", "hunyuan_v1_dense", "HunYuanDenseV1Model"),
        "AfmoeForCausalLM": Row("experts.afmoe", "afmoe", "AfmoeModel"),
        "MuseGlimmerForConditionalGeneration": Row("muse_glimmer", "muse_glimmer"),
        "ArceeForCausalLM": Row("arcee", "arcee", "ArceeModel"),
        "ApertusForCausalLM": Row("arcee", "apertus", "ApertusModel"),
        "NemotronForCausalLM": Row("arcee", "nemotron", "NemotronModel"),
        "Jais2ForCausalLM": Row("arcee", "jais2", "Jais2Model"),
        "Starcoder2ForCausalLM": Row("starcoder2", "starcoder2", "Starcoder2Model"),
        "StableLmForCausalLM": Row("starcoder2", "stablelm", "StableLmModel"),
        "GPTNeoXForCausalLM": Row("gpt_neox", "gpt_neox"),
        "BambaForCausalLM": Row("granite", "bamba", "BambaModel"),
        "Zamba2ForCausalLM": Row("hybrids.zamba2", "zamba2", "Zamba2Model"),
        "Glm4MoeForCausalLM": Row("experts.glm4_moe", "glm4_moe", "Glm4MoeModel"),
        "SolarOpenForCausalLM": Row("experts.glm4_moe", "solar_open", "SolarOpenModel"),
        "Dots1ForCausalLM": Row("experts.glm4_moe", "dots1", "Dots1Model"),
        "HYV3ForCausalLM": Row("experts.glm4_moe", "hy_v3", "HYV3Model"),
        "MiniMaxM2ForCausalLM": Row("experts.mixtral", "minimax_m2", "MiniMaxM2Model"),
        "Ernie4_5_MoeForCausalLM": Row("experts.ernie4_5_moe", "ernie4_5_moe", "Ernie4_5_MoeModel"),
        "DeepseekForCausalLM": Row("experts.deepseek", "deepseek", "DeepseekModel"),
        "BailingMoeForCausalLM": Row("experts.bailing", "bailing_moe"),
        "BailingMoeV2ForCausalLM": Row("experts.bailing", "bailing_moe_v2"),
        "Llama4ForCausalLM": Row("experts.llama4", "llama4_text", "Llama4TextModel"),
        "Llama4ForConditionalGeneration": Row("experts.llama4", "llama4"),
        "PhimoeForCausalLM": Row("experts.phimoe", "phimoe", "PhimoeModel"),
        "HunYuanMoEV1ForCausalLM": Row("hunyuan", "hunyuan_v1_moe", "HunYuanMoEV1Model"),
        "FlexOlmoForCausalLM": Row("olmo2", "flex_olmo", "FlexOlmoModel"),
        "Qwen2MoeForCausalLM": Row("experts.qwen3_moe", "qwen2_moe", "Qwen2MoeModel"),
        "MellumForCausalLM": Row("experts.qwen3_moe", "mellum", "MellumModel"),
        "FlintForCausalLM": Row("experts.flint", "flint", "FlintModel"),
        "LagunaForCausalLM": Row("experts.laguna", "laguna", "LagunaModel"),
        "OlmoeForCausalLM": Row("olmo2", "olmoe", "OlmoeModel"),
        "GemmaForCausalLM": Row("gemma2", "gemma", "GemmaModel"),
        "HeliumForCausalLM": Row("llama", "helium", "HeliumModel"),
        "BertModel": Row("encoders.bert", "bert"),
        "RobertaModel": Row("encoders.bert", "roberta"),
        "XLMRobertaModel": Row("encoders.bert", "xlm-roberta"),
        "CamembertModel": Row("encoders.bert", "camembert"),
        "ModernBertModel": Row("encoders.modernbert", "modernbert"),
        "NomicBertModel": Row("encoders.nomic_bert", "nomic_bert"),
        "MiniCPM3ForCausalLM": Row("latent.deepseek", "minicpm3", "MiniCPM3Model"),
        "DeepseekV2ForCausalLM": Row("latent.deepseek", "deepseek_v2", "DeepseekV2Model"),
        "DeepseekV3ForCausalLM": Row("latent.deepseek", "deepseek_v3", "DeepseekV3Model"),
        "DeepseekV32ForCausalLM": Row("latent.deepseek", "deepseek_v32", "DeepseekV32Model"),
        "GlmMoeDsaForCausalLM": Row("latent.deepseek", "glm_moe_dsa", "GlmMoeDsaModel"),
        "Glm4MoeLiteForCausalLM": Row("latent.deepseek", "glm4_moe_lite", "Glm4MoeLiteModel"),
        "Mistral4ForCausalLM": Row("latent.deepseek", "mistral4", "Mistral4Model"),
        "YoutuForCausalLM": Row("latent.deepseek", "youtu", "YoutuModel"),
        "AXK1ForCausalLM": Row("latent.deepseek", "axk1", "AXK1Model"),
        "AXK2ForCausalLM": Row("latent.deepseek", "axk2", "AXK2Model"),
        "HYV4ForCausalLM": Row("latent.hy_v4", "hy_v4", "HYV4Model"),
        "LongcatFlashForCausalLM": Row("latent.longcat", "longcat_flash", "LongcatFlashModel"),
        "Idefics3ForConditionalGeneration": Row("towers.idefics3", "idefics3"),
        "SmolVLMForConditionalGeneration": Row("towers.idefics3", "smolvlm"),
        "LlavaOnevisionForConditionalGeneration": Row("towers.llava_onevision", "llava_onevision"),
        "Qwen2_5_VLForConditionalGeneration": Row("towers.qwen2_5_vl", "qwen2_5_vl"),
        "Qwen3VLForConditionalGeneration": Row("towers.qwen3_vl", "qwen3_vl"),
        "Qwen3VLMoeForConditionalGeneration": Row("towers.qwen3_vl", "qwen3_vl_moe"),
        "CohereCompassForConditionalGeneration": Row("towers.cohere_compass", "cohere_compass"),
        "WhisperForConditionalGeneration": Row("towers.whisper", "whisper"),
        "Qwen2AudioForConditionalGeneration": Row("towers.qwen2_audio", "qwen2_audio"),
        "Qwen2_5OmniForConditionalGeneration": Row("towers.qwen2_5_omni", "qwen2_5_omni", "Qwen2_5OmniModel"),
    }
)
FAMILIES = MappingProxyType({architecture: row.file for architecture, row in ROWS.items()})
MODEL_TYPES = MappingProxyType({row.model_type: architecture for architecture, row in ROWS.items()})
"""config.json's model_type -> the architecture, for files that name none."""
TEXTS = MappingProxyType({"deepseek_ocr2_text": "DeepseekForCausalLM"})
"""The model_type of a decoder beside a tower, where it has one of its own -> the architecture."""
BODIES = MappingProxyType({row.body: architecture for architecture, row in ROWS.items() if row.body})
"""Models saved without what makes them write -> the architecture that they belong to."""


OTHER_NAMES = MappingProxyType(
    {
        "PhiMoEForCausalLM": "PhimoeForCausalLM",
        "MPTForCausalLM": "MptForCausalLM",
        "Qwen2_5OmniThinkerForConditionalGeneration": "Qwen2_5OmniForConditionalGeneration",
        **dict.fromkeys(("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), "MiniMaxForCausalLM"),
    }
)
"""Of architectures, by their authors, or of a part that is saved alone -> those of transformers."""


def whole_name(name: str) -> str:
    """The architecture of the family that computes a model, which may be saved without what makes it write, or with a head that
    scores, or under its authors' name."""
    name = OTHER_NAMES.get(name, name)
    base = name.removesuffix("ForSequenceClassification")
    bodies = (f"{base}ForCausalLM", f"{base}Model") if base != name else (BODIES.get(name, name),)
    return next((each for each in bodies if each in ROWS), name)


HEADS = MappingProxyType({"LlamaForCausalLMEagle3": "llama_eagle3"})
"""Heads that draft for a model and are none themselves."""


IMPLEMENTATION = "vnext_model_impl"
"""Member of a config.json: the value of --model-impl, where the user gave one."""
OUR_OWN, THEIRS = ("vnext", "vllm"), "transformers"
HOSTED, SEEING = "vnext.models.hosted.family", "vnext.models.hosted.seeing"

TURNING = MappingProxyType(
    {
        "qwen2_vl_text": "Qwen2ForCausalLM", "glm4v_text": "Glm4ForCausalLM", "glm_ocr_text": "Glm4ForCausalLM",
        "paddleocr_vl_text": "LlamaForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM",
    }
)  # fmt: skip
"""Decoders that turn tokens of images by rows and columns, section behind section -> the architectures that they are otherwise."""


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
    if asked in OUR_OWN or architecture in HEADS or is_known(architecture):
        return architecture
    if not is_decoder(architecture):
        return _as_seen(architecture, raw)
    return PREFIX + architecture if architecture in writers(str(raw.get("model_type"))) else architecture


def _as_seen(architecture: str, raw: Mapping[str, object]) -> str:
    """The architecture as it is computed where transformers has its tower, and a family of ours its decoder."""
    text, kind = raw.get("text_config"), str(raw.get("model_type"))
    decoder_type = str(text.get("model_type")) if isinstance(text, Mapping) else f"{kind}_text"
    decoder = (TURNING | TEXTS | MODEL_TYPES).get(decoder_type, "")
    return PREFIX + architecture + PLUS + decoder if decoder and has_tower_of(architecture, kind) else architecture


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
    module = _module(architecture)
    if parts_seen(architecture)[1]:
        found: Family = module.family_of(architecture)
        return found
    return Family(*(getattr(module if hasattr(module, name) else import_module(USUAL[name]), name) for name in Family._fields))


class Mtp(NamedTuple):
    """What the module of a family with a layer that drafts defines as assemble_mtp, forward_mtp and combine_mtp.

    `assemble(source, config)` puts the layer together, by the model's configuration; `forward(params, kv, batch, config)` gives
    (normed hidden states, states for the next), [S, hidden] each; `combine(params, states, config)` what it reads of the model's
    states [T, 1, hidden] before the last norm, [T, hidden].
    """

    assemble: Callable[..., Any]
    forward: Callable[..., Any]
    combine: Callable[..., Any]


def mtp(architecture: str) -> Mtp | None:
    """Those of an architecture; None where its checkpoints have no such layer."""
    module = _module(architecture)
    return Mtp(*(getattr(module, f"{name}_mtp") for name in Mtp._fields)) if hasattr(module, "assemble_mtp") else None


class TowerParts(NamedTuple):
    """What the module of a family that reads images or sounds defines as tower_config and assemble_tower: `config(config)` gives
    the tower as a model of its own; `assemble(source, tower)` puts its parameters together; and of images `project(params, passing,
    more, tower)`: what has passed the layers -> vectors [N, width]."""

    config: Callable[..., Any]
    assemble: Callable[..., Any]
    project: Callable[..., Any] | None


def tower_parts(architecture: str) -> TowerParts:
    """Those of an architecture whose configuration has a tower: of images, where it has two."""
    module = _module(architecture)
    return TowerParts(module.tower_config, module.assemble_tower, getattr(module, "project", None))


def sound_parts(architecture: str) -> TowerParts:
    """The same of sounds, which a family that reads images too defines as sound_config and assemble_sound."""
    module, own = _module(architecture), tower_parts(architecture)
    return own._replace(config=module.sound_config, assemble=module.assemble_sound) if hasattr(module, "sound_config") else own


def _module(architecture: str) -> Any:
    if architecture.startswith(PREFIX):
        return import_module(SEEING if parts_seen(architecture)[1] else HOSTED)
    ours = (FAMILIES | HEADS).get(architecture)
    return from_file(architecture) or (import_module(f"vnext.models.families.{ours}") if ours else from_package(architecture))
