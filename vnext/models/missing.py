"""Architectures that no family here computes: what each would need, and which of them the installed transformers has.

Those in neither list are unknown. The package is asked by its files alone: an import takes seconds and loads torch. Names are
those of `architectures` in config.json, without the ending that says what the model is used for.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

NEEDS = MappingProxyType(
    {
        "a decoder with parts of its own": """
            Baichuan BioGpt BitNet Bloom Blt ChatGLM CodeGen CpmAnt CTRL Cwm DiffLlama Doge Exaone Falcon
            GPTBigCode GPTJ GPTNeo GPTNeoXJapanese HrmText InternLM InternLM2 Jais
            Jais2 MiniCPM ModernBertDecoder Mpt MPT NanoChat Olmo OpenAIGPT OPT Orion Persimmon Phi QWen VaultGemma
            XGLM XLM XLNet Yi""",
        "experts, or a choice of experts, that no family here has": """
            AriaText Beam Cohere2Moe Dbrx DeepseekV4 Flint
            Grok1 JetMoe Kolibri1 Laguna MiMoV2Flash""",
        "attention over a latent cache (MLA)": """
            AXK1 AXK2 DeepseekV32 GlmMoeDsa HYV4 LongcatFlash""",
        "layers with a state (Mamba, linear attention, recurrence)": """
            FalconMamba Mamba Mamba2
            Qwen4Exp RecurrentGemma Rwkv RWKV xLSTM Zamba Zamba2 Zaya""",
        "images or sound": """
            CohereCompass Dots3Note Emu3 Fuyu Gemma4Assistant Gemma4UnifiedAssistant Git Inkling
            Inkling2 MiniMaxM3VL Mllama Moshi Musicgen MusicgenMelody Phi4MM Phi4Multimodal TrOCR Whisper""",
        "an encoder": """
            Albert Bart Bert BertGeneration BertGenerationDecoder BigBird BigBirdPegasus Blenderbot BlenderbotSmall Camembert
            Data2VecText DebertaV2 DistilBert Electra Ernie Longformer Marian MBart MegatronBert MPNet MT5 Mvp Pegasus PLBart
            ProphetNet Reformer RemBert Roberta RobertaPreLayerNorm RoCBert RoFormer T5 UMT5 XLMRoberta XLMRobertaXL Xmod""",
    }
)
"""What is needed -> the architectures."""
DECODERS = ("", *tuple(NEEDS)[:2])
"""What decoders need whose layers have no state, and those that are in no list."""
PREFIX = "transformers/"
"""Of an architecture that transformers computes, as in "transformers/OPTForCausalLM"."""
REMEDY = "pip install 'vnext[transformers]'"
_CLASS = re.compile(r"^class (\w+(?:ForCausalLM|LMHeadModel))\(", re.MULTILINE)
_KNOWN = MappingProxyType({name: need for need, names in NEEDS.items() for name in names.split()})
_USE = re.compile(r"(For[A-Z]\w*|LMHeadModel|ModelWithLMHead|WithLMHeadModel|Model|LMHead)$")
_LABELS = re.compile(r"For(\w+Classification|QuestionAnswering|MultipleChoice|MaskedLM|PreTraining)$|RewardModel$")
_MEDIA = re.compile(r"ForConditionalGeneration$|ForBlockDiffusion$|ForVision|Vision|VL|Omni|Ocr|OCR|Text2Text$|VideoLl|PI0")


def what_it_needs(architecture: str) -> str:
    """What vnext lacks for an architecture that is known, "" for one that is not."""
    if _LABELS.search(architecture):
        return "a head that labels text or fills gaps, where vnext writes text and makes embeddings"
    base = _USE.sub("", architecture)
    if found := _KNOWN.get(base):
        return found
    return "images or sound" if _MEDIA.search(architecture) else ""


def is_decoder(architecture: str) -> bool:
    """Whether an architecture is a decoder whose layers have no state, as far as is known here."""
    return what_it_needs(architecture) in DECODERS


@cache
def package() -> Path | None:
    """The folder of the installed package; None without one."""
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def writers(model_type: str) -> tuple[str, ...]:
    """The classes that write text of a model type, as config.json has it; () where transformers has none, or is not here."""
    folder, name = package(), re.sub(r"\W", "_", model_type)
    if folder is None or not name:
        return ()
    file = folder / "models" / name / f"modeling_{name}.py"
    return tuple(_CLASS.findall(file.read_text(encoding="utf-8"))) if file.is_file() else ()
