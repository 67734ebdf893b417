"""A checkpoint's folder: the files that it must hold, and the errors for a folder without them.

Owns the names of these files and the check of a folder before any slow work starts. Reads config.json and the headers of
weight files but no weights, and imports no torch, because programs call it before they start an engine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import MappingProxyType

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import POINTER_BYTES, is_pointer, pointer_sentence
from vnext.models.config.json_keys import Json, read_json, read_optional_json, shown
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SUFFIX, linked_files, outline
from vnext.models.outside import PREFIX, writers
from vnext.models.registry import MODEL_TYPES, computed_as, require_family, whole_name

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DUMMY_NAME = "vnext_dummy_weights.json"
"""A folder with this file has no weights: they are drawn at random (loading/checkpoint.py)."""
OVERRIDDEN = "vnext_overridden"
"""Member of a generation_config.json: the names of its members that the user gave, which no other file adds to."""
DTYPES = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
"""The names of what can be read in a safetensors file, and in config.json."""
HEADER_SIZE_MAX = 100_000_000
OTHER_FORMS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")


def require_checkpoint(path: Path, is_head: bool = False) -> None:
    """Raise ModelError for a folder that cannot be loaded, as far as its configuration and its files' sizes say so.

    `is_head`: of a head that drafts, whose architecture may have any name.
    """
    try:
        raw = read_config(path)
        if not is_head:
            require_family(architecture(raw))
        settings_in(path, raw)
        for file in weight_files(path):
            read_header(file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({reason(error)}); give a folder that this user may read") from error


def read_config(path: Path) -> Json:
    """config.json of the folder `path`. Raises ModelError."""
    if not (path / CONFIG_NAME).is_file():
        others = found_forms(path)
        here = f", only {others[0]}, which is a form that is not read" if others else ""
        raise ModelError(f"{path} has no config.json{here}; give a folder with a Hugging Face checkpoint")
    return read_json(path / CONFIG_NAME)


def architecture(raw: Json) -> str:
    """The name of a configuration's family, by its model_type where it has no architectures. Raises ModelError."""
    names, model_type = raw.get("architectures"), raw.get("model_type")
    if not names and isinstance(model_type, str):
        names = [MODEL_TYPES[model_type]] if model_type in MODEL_TYPES else [*writers(model_type)]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError("config.json names no architecture; add 'architectures' as the model's authors have it")
    if names[0].startswith(PREFIX):
        return names[0]
    return computed_as(whole_name(names[0]), raw)


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, sorted: GGUF files, the single safetensors file, else those that the index names; none where
    weights are drawn at random. Raises ModelError."""
    if is_dummy(path):
        return []
    if files := linked_files(path):
        return files
    files = [path / name for name in sorted(set(assigned_files(path).values()))] or [path / SINGLE_NAME]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing; {_instead(path)}")
    return files


def is_dummy(path: Path) -> bool:
    """Whether the weights of the checkpoint in folder `path` are drawn at random."""
    return (path / DUMMY_NAME).is_file()


def assigned_files(path: Path) -> dict[str, str]:
    """The index: the name of each tensor's file; {} without one. Raises ModelError.

    A whole model.safetensors that the index does not name is newer than the index, which is then left unread.
    """
    if not (path / INDEX_NAME).is_file():
        return {}
    names = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
        raise ModelError(f"{path / INDEX_NAME} does not map tensors to files; download the model again")
    if SINGLE_NAME not in names.values() and (path / SINGLE_NAME).is_file():
        return {}
    return names


def stored_dtype(path: Path) -> str | None:
    """The name of the dtype that most numbers of a checkpoint have, None without any. Raises ModelError."""
    counts: Counter[str] = Counter()
    for file in weight_files(path):
        entries = (entry for name, entry in json.loads(read_header(file)).items() if name != "__metadata__")
        for entry in entries:
            counts[entry["dtype"]] += prod(entry["shape"])
    return next((DTYPES[name] for name, _ in counts.most_common() if name in DTYPES), None)


def found_forms(path: Path) -> list[str]:
    """Names of files in a folder that hold weights in a form which is not read."""
    return sorted(file.name for pattern in OTHER_FORMS for file in path.glob(pattern))


def _instead(path: Path) -> str:
    """What to do in a folder that lacks a weight file: it may hold the weights in a form that is not read."""
    others = found_forms(path)
    if others and others[0].endswith(SUFFIX):
        return f"here is {others[0]}: name this file to serve it"
    if not others or any(path.glob("*.safetensors")):
        return "vnext reads safetensors weights, download the whole model"
    return (
        f"vnext reads safetensors weights only, and here is {others[0]}: take a revision of this model that has them, or "
        "convert it with transformers (from_pretrained(...).save_pretrained(...))"
    )


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file, or the header of a GGUF file, checked against the file's size. Raises ModelError."""
    if file.suffix == SUFFIX:
        with file.open("rb") as stream:
            return stream.read(outline(file).size_bytes)
    broken = ModelError(f"{file} is truncated or corrupt; download it again")
    try:
        with file.open("rb") as stream:
            if is_pointer(stream.read(POINTER_BYTES)):
                raise ModelError(pointer_sentence(file))
            stream.seek(0)
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= min(HEADER_SIZE_MAX, file.stat().st_size - 8):
                raise broken
            header = stream.read(size)
        entries = json.loads(header)
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
        places = [0, *(place for start, stop in spans for place in (start, stop))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise broken from error
    if any(type(place) is not int for place in places) or places != sorted(places) or 8 + size + places[-1] != file.stat().st_size:
        raise broken
    return header


# ---- quantised weights -------------------------------------------------------------------------------------------
# The settings that formats read, or one sentence for a scheme that none reads. Which weights are quantised is not asked here:
# formats find them by their tensors, whatever lists of modules a configuration has.

MEMBERS = ("quantization_config", "compression_config")
METHOD = "quant_method"
REMEDY = (
    "read are AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes, ModelOpt, torchao, MXFP4 and GGUF: take one of these of this "
    "model, or its float checkpoint, with --quantization int8 if memory is short"
)
OTHER_FILES = MappingProxyType({"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"})
"""Files of older checkpoints whose config.json says nothing, and the method of each."""
AWQ_VERSIONS = frozenset({"gemm", "exllama", "ipex"})
GPTQ_FORMATS = frozenset({"gptq", "gptq_v2"})
COMPRESSED_FORMATS = frozenset(
    """
    dense pack-quantized int-quantized float-quantized naive-quantized nvfp4-pack-quantized mxfp4-pack-quantized mxfp8-quantized
    mixed-precision
    """.split()
)
MODELOPT_SCHEMES = frozenset({"FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION"})

Settings = Json
"""A JSON object: config.json, or what it says of this."""


def settings_of(raw: Settings) -> Settings:
    """What a config.json says of quantised weights, with a method by its one name, {} for nothing. Raises ModelError."""
    parts = [raw, text] if isinstance(text := raw.get("text_config"), dict) else [raw]
    found = next((value for part in parts for key in MEMBERS if (value := part.get(key)) is not None), None)
    if found is None:
        return {}
    if not isinstance(found, dict) or not isinstance(method := found.get(METHOD, "unnamed"), str):
        raise ModelError(f"quantised weights ({shown(found)}) are not supported; {REMEDY}")
    if method not in CHECKS:
        raise ModelError(f"quantised weights ({method}) are not supported; {REMEDY}")
    return CHECKS[method](found)


def settings_in(folder: Path, raw: Settings) -> Settings:
    """`settings_of`, or of the files of older checkpoints beside config.json. Raises ModelError."""
    if found := settings_of(raw):
        return found
    for name, method in OTHER_FILES.items():
        if given := read_optional_json(folder / name):
            return CHECKS[method]({**given, METHOD: method})
    return {}


def _require(method: str, key: str, value: object, known: frozenset[str]) -> None:
    """Raise ModelError for a variant of a method that is not read."""
    if value not in known:
        names = ", ".join(sorted(known))
        raise ModelError(f"quantised weights ({method}) of {key} {shown(value)} are not supported, only {names}; {REMEDY}")


def _as_is(given: Settings) -> Settings:
    return given


def _awq(given: Settings) -> Settings:
    _require("awq", "version", str(given.get("version") or "gemm").lower(), AWQ_VERSIONS)
    return given


def _gptq(given: Settings) -> Settings:
    _require("gptq", "checkpoint_format", given.get("checkpoint_format") or "gptq", GPTQ_FORMATS)
    return given


def _auto_round(given: Settings) -> Settings:
    packing = str(given.get("packing_format") or "auto_gptq")
    method = next((each for each in ("gptq", "awq") if each in packing), None)
    if method is None:
        raise ModelError(f"quantised weights (auto-round) of packing_format {shown(packing)} are not supported; {REMEDY}")
    return {**given, METHOD: method}


def _compressed(given: Settings) -> Settings:
    groups, sparsity = given.get("config_groups") or {}, given.get("sparsity_config") or {}
    formats = [each.get("format") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    for format in (given.get("format"), *formats, sparsity.get("format") if isinstance(sparsity, dict) else None):
        _require("compressed-tensors", "format", format or "dense", COMPRESSED_FORMATS)
    if transforms := (given.get("transform_config") or {}).get("config_groups"):
        which = f"(compressed-tensors) with transforms {shown(list(transforms))}"
        raise ModelError(f"quantised weights {which} are not supported; {REMEDY}")
    return given


def _modelopt(given: Settings) -> Settings:
    inner = given["quantization"] if isinstance(given.get("quantization"), dict) else given
    _require("modelopt", "quant_algo", inner.get("quant_algo"), MODELOPT_SCHEMES)
    return given


CHECKS: MappingProxyType[str, Callable[[Settings], Settings]] = MappingProxyType(
    {
        "awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "intel/auto-round": _auto_round, "compressed-tensors": _compressed,
        "fp8": _as_is, "fbgemm_fp8": _as_is, "bitsandbytes": _as_is, "modelopt": _modelopt, "torchao": _as_is,
        "mxfp4": _as_is,
    }
)  # fmt: skip
"""By the method's name: each returns the settings, or raises ModelError for a variant that is not read."""
