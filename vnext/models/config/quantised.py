"""What a checkpoint says of its quantised weights: the settings that formats read, or one sentence for a scheme that none reads.

Which weights are quantised is not asked here: formats find them by their tensors, whatever lists of modules a configuration has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from vnext.models.config.json_keys import Json, read_optional_json, shown
from vnext.models.errors import ModelError

MEMBERS = ("quantization_config", "compression_config")
METHOD = "quant_method"
REMEDY = (
    "read are AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes, ModelOpt, MXFP4 and GGUF: take one of these of this model, or its "
    "float checkpoint, with --quantization int8 if memory is short"
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
