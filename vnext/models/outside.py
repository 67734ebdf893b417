"""Outside: families that are no part of vnext, in a file that the user names or in an installed package.

A file takes the place of a family of ours; a package is looked for where no family of ours knows an architecture. Both run as the
user's own code: a checkpoint cannot name one.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import cast

from vnext.base.installed import InstalledError, NotOffered, first_line, load_entry
from vnext.models.errors import ModelError

GROUP = "vnext.families"
"""The entry points of packages: the architecture's name is the entry point's, the module its value."""
NAMES = "ARCHITECTURES"
FIELDS = ("parse", "assemble")
"""What a family has at least: the rest is Llama's where it does not say otherwise (registry.USUAL)."""
_from_files: dict[str, ModuleType] = {}  # by architecture


def use_file(file: Path) -> None:
    """Let this process take the architectures that a file names from it. Raises ModelError."""
    name = f"vnext_family_{file.stem}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ModelError(f"--family {file} is no Python file: name one that defines {NAMES}, {', '.join(FIELDS)}")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code may raise anything
        raise ModelError(f"--family {file} cannot be imported ({type(error).__name__}: {first_line(error)})") from error
    require_fields(module, f"--family {file}", (NAMES, *FIELDS))
    _from_files.update(dict.fromkeys(getattr(module, NAMES), module))


def require_fields(module: object, what: str, fields: tuple[str, ...] = FIELDS) -> None:
    """Raise ModelError for a module that lacks one of the names of a family."""
    if lacking := [name for name in fields if not hasattr(module, name)]:
        raise ModelError(f"{what} defines no {lacking[0]}: a family has {', '.join(fields)}")


def from_file(architecture: str) -> ModuleType | None:
    return _from_files.get(architecture)


@cache
def from_package(architecture: str) -> ModuleType | None:
    """The family that an installed package has for an architecture. Raises ModelError."""
    try:
        module = load_entry(GROUP, architecture, "family")
    except NotOffered:
        return None
    except InstalledError as error:
        raise ModelError(str(error)) from error
    require_fields(module, f"the family {architecture} of an installed package")
    return cast(ModuleType, module)


# ---- architectures that no family here computes ------------------------------------------------------------------
# What each would need, and which of them the installed transformers has. Those in neither list are unknown. The package is asked
# by its files alone: an import takes seconds and loads torch. Names are those of `architectures` in config.json, without the
# ending that says what the model is used for.

NEEDS = MappingProxyType(
    {
        "a decoder with parts of its own": """
            Baichuan BioGpt BitNet Bloom ChatGLM CodeGen CpmAnt CTRL DiffLlama Doge Exaone Falcon
            GPTBigCode GPTJ GPTNeo GPTNeoXJapanese HrmText InternLM InternLM2 Jais
            MiniCPM ModernBertDecoder Mpt MPT NanoChat Olmo OpenAIGPT OPT Orion Persimmon Phi QWen
            XGLM XLM XLNet Yi""",
        "experts, or a choice of experts, that no family here has": """
            AriaText Beam Dbrx Grok1 JetMoe Kolibri1""",
        "several streams (hyper-connections) and attention to keys that are compressed": "DeepseekV4",
        "residuals with gates, embeddings of n-grams and keys that are chosen by blocks": "Qwen4Exp",
        "patches of bytes in the place of tokens": "Blt",
        "layers with a state (Mamba, linear attention, recurrence)": """
            Rwkv RWKV xLSTM Zamba Zaya""",
        "images or sound": """
            Dots3Note Emu3 Fuyu Gemma4Assistant Gemma4UnifiedAssistant Git Inkling
            Inkling2 MiniMaxM3VL Moshi Musicgen MusicgenMelody Phi4MM Phi4Multimodal TrOCR Whisper""",
        "experts for the tokens of images beside those for texts": "Ernie4_5_VLMoe Ernie4_5_VL_Moe",
        "a text that attends to images by layers of its own (cross-attention)": "Mllama",
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
SEES, HEARS = "def get_image_features(", "def get_audio_features("
"""In the code of models with a tower."""
PLUS = "+"
"""Behind the name of a model whose tower transformers computes, before that of its decoder."""
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
    return tuple(_CLASS.findall(modeling(model_type)))



def parts_seen(architecture: str) -> tuple[str, str]:
    """The names of the whole model and of its decoder, "" where transformers computes no tower."""
    name, _, decoder = architecture.removeprefix(PREFIX).partition(PLUS)
    return name, decoder


def has_tower_of(name: str, model_type: str) -> bool:
    """Whether the installed package has a model of this name whose images, or sounds, become embeddings of its decoder."""
    text = modeling(model_type)
    return f"class {name}(" in text and (SEES in text or HEARS in text)


@cache
def modeling(model_type: str) -> str:
    """The installed package's code of a model type, as config.json has it, "" where it has none, or is not here. That of a text
    model lies with the model that it is part of."""
    folder, name = package(), re.sub(r"\W", "_", model_type)
    names = (name, name.removesuffix("_text")) if folder is not None and name else ()
    files = [file for each in names if (file := Path(str(folder), "models", each, f"modeling_{each}.py")).is_file()]
    return files[0].read_text(encoding="utf-8") if files else ""
