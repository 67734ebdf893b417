"""Spellings: the notations of a value that the command line, a file, the environment and `LLM(...)` accept.

Owns sizes and counts with a unit, "auto" and -1, and vLLM's names for the same value. Turns a spelling into the plain value
that a field holds; settings_check.py decides whether the value can work. Unknown values pass unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from vnext.runtime.protocol.settings import SettingsError

SIZE_UNITS = {
    "": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""As in vLLM: 4k is 4,000 and 4K is 4,096."""
SIZES = ("kv_cache_memory", "log_max_bytes", "log_keep_bytes", "ipc_bytes_max", "body_bytes_max", "responses_bytes_max")
"""Fields in bytes, which accept a unit."""
OBJECTS = ("hf_overrides", "override_generation_config", "speculative_config")
"""Fields that hold a JSON object as text."""
SYNONYMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
        "generation_config": {"vllm": "none"},
        "device": {"gpu": "cuda"},
        "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_inc": "fp8", "fp8_e4m3fn": "fp8"},
        "log_level": {"warn": "warning", "critical": "error", "trace": "debug"},
    }
)
"""Field -> other engines' names of its values."""
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def plain_value(name: str, value: Any, hint: Any, default: Any) -> Any:
    """`value` as the field `name` of type `hint` holds it. Raises SettingsError for a text that is no size or no number."""
    if name == "root_path" and isinstance(value, str):
        if not re.fullmatch(r"/?([\w.~-]+(/[\w.~-]+)*)?/?", value):
            raise SettingsError(f"root_path is {value!r}: write a path such as /llm.")
        return f"/{value.strip('/')}".rstrip("/")
    if name in OBJECTS:
        return _object_text(name, value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch":  # recognises a torch.dtype without importing torch
        value = str(value)
    kinds = set(get_args(hint)) or {hint}
    if get_origin(hint) is Literal:
        return _choice(name, value, get_args(hint))
    if get_origin(hint) is tuple:
        if int in kinds and value in ("auto", ["auto"]):
            return default
        return tuple(plain_value(name, each, get_args(hint)[0], None) for each in _parts(value))
    if kinds & {int, float} and (value == "auto" or (name == "max_model_len" and value in (-1, "-1"))):
        return default
    if not isinstance(value, str):
        return value
    if bool in kinds:
        return default if value == "auto" and type(None) in kinds else _switch(value)
    if name in SIZES:
        return size_bytes(value)
    return _number(value, kinds)


def _object_text(name: str, value: Any) -> str:
    """A JSON object's text, from that text or from a dictionary; "" for an empty one. Raises SettingsError."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
        text = json.dumps(found, sort_keys=True) if found else ""
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingsError(f"""{name} is {str(value)[:80]!r}: write a JSON object, as '{{"key": 1}}'.""")
    return text


def size_bytes(text: str) -> int:
    """Bytes of "512M", "4GiB" or "1000". Raises SettingsError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in SIZE_UNITS:
        raise SettingsError(f"{text!r} is no amount of memory: write bytes, or a number with a unit, as 512M or 4GiB.")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def size_text(size: int) -> str:
    """A number of bytes that `size_bytes` reads, in its largest whole unit."""
    for unit in ("T", "G", "M", "K"):
        if size and size % SIZE_UNITS[unit] == 0:
            return f"{size // SIZE_UNITS[unit]}{unit}"
    return str(size)


def _number(text: str, kinds: set[Any]) -> Any:
    """A count with a unit, or a number; the text itself where it is neither, for the type check to refuse."""
    if int in kinds and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())):
        count = float(match[1]) * COUNT_UNITS[match[2]]
        return int(match[1]) if match[1].isdigit() and not match[2] else int(count) if count.is_integer() else text
    if kinds & {int, float}:
        try:
            return int(text) if int in kinds else float(text)
        except ValueError:
            return text
    return text


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """One of the choices, in any letter case, by a synonym, or as YAML reads `log: off`."""
    if isinstance(value, bool):
        return next((word for word in (YES if value else NO) if word in choices), value)
    if not isinstance(value, str) or value in choices:
        return value
    lower = value.lower().removeprefix("torch.")
    lower = SYNONYMS.get(name, {}).get(lower, lower)
    return lower if lower in choices else value


def _switch(text: str) -> Any:
    lower = text.strip().lower()
    return True if lower in YES else False if lower in NO else text


def _parts(value: Any) -> list[Any]:
    """A list from any notation: a list, JSON, a text with commas or blanks, or a single element."""
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, str) and text.startswith("["):
        try:
            found: list[Any] = json.loads(text)
            return found
        except ValueError as error:
            raise SettingsError(f"{text!r} is no JSON: write a list as a b c, or as [\"a\", \"b\"].") from error
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return list(value) if isinstance(value, (list, tuple)) else [value]
