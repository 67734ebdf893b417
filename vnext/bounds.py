"""Bounds: whether settings can work, and one sentence with the value and the remedy for each that cannot.

Used by the command line and by `LLM(...)`, so that both say the same. Knows fields and numbers; opens and starts
nothing: what depends on a model or a machine is judged where that is known.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from vnext.hints import ELSEWHERE
from vnext.runtime.settings import EngineSettings, SettingsError
from vnext.sched.policies import PolicyError, require_name

SIZE_UNITS = {
    "": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
SIZES = ("kv_cache_memory", "log_max_bytes", "ipc_bytes_max")
"""Fields in bytes, which may be given with a unit."""
LOG_BYTES_MIN = 2**20
COUNT_MAX = 2**31 - 1
BOUNDS = {
    "seed": (0, 2**64 - 1),
    "max_model_len": (2, COUNT_MAX),
    "max_num_seqs": (1, 2**20),
    "max_num_batched_tokens": (1, 2**24),
    "long_prefill_token_threshold": (0, COUNT_MAX),
    "block_size": (1, 2**12),
    "num_blocks_override": (1, COUNT_MAX),
    "kv_cache_memory": (1, 2**50),
    "log_max_bytes": (0, 2**50),
    "ipc_bytes_max": (0, 2**40),
    "log_max_age_s": (0, 10**9),
    "tensor_parallel_size": (1, 2**10),
    "gpu_memory_utilization": (0.01, 1.0),
    "graph_sizes": (1, 2**20),
    "digest_interval": (1, COUNT_MAX),
    "threads": (1, 2**12),
    "port": (0, 2**16 - 1),
    "drain_s": (0, 86_400),
}


def engine_settings(**values: Any) -> EngineSettings:
    """Settings from keywords, each checked. Raises SettingsError for the first that is unknown or cannot work."""
    hints = get_type_hints(EngineSettings)
    settings = EngineSettings(**{name: checked(name, value, hints) for name, value in values.items()})
    _check_together(settings)
    return settings


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


def checked(name: str, value: Any, hints: Mapping[str, Any]) -> Any:
    """The value as its field takes it. `hints`: types by field. Raises SettingsError for a wrong name, type or size."""
    if name not in hints:
        close = difflib.get_close_matches(name, hints, n=1)
        instead = ELSEWHERE.get("--" + name.replace("_", "-"), "see vnext serve --help")
        remedy = f"did you mean {close[0]}?" if close else f"{instead}."
        raise SettingsError(f"There is no setting {name}: {remedy}")
    if name in SIZES and isinstance(value, str):
        value = size_bytes(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        value = msgspec.convert(value, hints[name])
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name} is {value!r}: it must be {_expected(hints[name])}.") from error
    _check_bounds(name, value)
    if name == "scheduling_policy":
        _check_policy(value)
    return value


def _check_policy(name: str) -> None:
    """The form of the name; the engine core imports it, from where it runs."""
    try:
        require_name(name)
    except PolicyError as error:
        raise SettingsError(f"scheduling_policy: {error}.") from error


def _check_bounds(name: str, value: Any) -> None:
    low, high = BOUNDS.get(name, (None, None))
    for each in value if isinstance(value, tuple) else (value,):
        if low is not None and each is not None and not low <= each <= high:
            raise SettingsError(f"{name} is {each}: it must lie between {low} and {high}.")


def _expected(hint: Any) -> str:
    """A type in words: `one of 'a', 'b'`, `a whole number or None`."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_expected(part) for part in get_args(hint))
    words = {int: "a whole number", str: "a text", bool: "True or False", float: "a number", type(None): "None"}
    return words.get(hint, str(hint))


def _check_together(settings: EngineSettings) -> None:
    """Values that are good alone and cannot work together."""
    tokens, length = settings.max_num_batched_tokens, settings.max_model_len
    if not settings.enable_chunked_prefill and settings.long_prefill_token_threshold:
        raise SettingsError(
            f"long_prefill_token_threshold is {settings.long_prefill_token_threshold} and chunked prefill is off: "
            "a prompt is then never split, so leave one of the two out."
        )
    if not settings.enable_chunked_prefill and length is not None and length > tokens:
        raise SettingsError(
            f"max_model_len is {length} and without chunked prefill a prompt must fit into one step of "
            f"max_num_batched_tokens, which is {tokens}: raise that to {length}, or leave chunked prefill on."
        )
    if 0 < settings.log_max_bytes < LOG_BYTES_MIN:
        raise SettingsError(
            f"log_max_bytes is {settings.log_max_bytes}: a log of less than {size_text(LOG_BYTES_MIN)} forgets too "
            "much at once; give it more, or 0 for no such bound."
        )
    if settings.log_durable and settings.log == "off":
        raise SettingsError("log_durable is on and the log is off: leave one of the two out.")
    if settings.log_compress and settings.log == "off":
        raise SettingsError("log_compress is on and the log is off: leave one of the two out.")
    if settings.quantization == "int8" and settings.dtype not in ("auto", "bfloat16"):
        raise SettingsError(
            f"quantization is int8, which computes in bfloat16, and dtype is {settings.dtype}: leave one of the two out."
        )
    if settings.device == "cpu" and (given := gpu_settings_given(settings)):
        raise SettingsError(f"{given} is for a GPU, and device is cpu: use --device cuda, or leave it out.")
    if settings.executor == "inproc" and settings.tensor_parallel_size > 1:
        raise SettingsError(
            f"tensor_parallel_size is {settings.tensor_parallel_size} and the executor inproc has one rank: use mp."
        )


def gpu_settings_given(settings: EngineSettings) -> str:
    """The first setting for GPUs that is not at its default; "" for none."""
    names = ("gpu_memory_utilization", "enforce_eager", "graph_sizes", "compile", "attention")
    return next((name for name in names if getattr(settings, name) != getattr(EngineSettings(), name)), "")
