"""Model configuration: what a checkpoint's config.json says, checked once, in our words.

Owns the parsing and its errors. Keys that do not change the arithmetic of a Llama-style model are ignored; a key that
would (a sliding window, quantised weights, another activation) is refused with its value. Reads two files, no more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from vnext.models.errors import ModelError

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
ACTIVATIONS = ("silu",)
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base `theta` and how its frequencies are stretched. The last three are llama3's."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_position_count: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model. `dtype` is the checkpoint's own; `position_count_max` the longest context in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    position_count_max: int
    rms_norm_eps: float
    rope: Rope
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def load_config(path: Path) -> ModelConfig:
    """The configuration of the checkpoint in folder `path`. Raises ModelError."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; give a folder with a Hugging Face checkpoint")
    generation = path / "generation_config.json"
    return parse_config(read_json(path / "config.json"), read_json(generation) if generation.is_file() else {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError when it is unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object but holds {type(value).__name__}")
    return value


def parse_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """config.json and generation_config.json (may be empty) as one configuration. Raises ModelError."""
    refuse_unsupported(raw)
    head_count = positive(raw, "num_attention_heads")
    hidden_size = positive(raw, "hidden_size")
    config = ModelConfig(
        architecture=architecture(raw),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size"),
        layer_count=positive(raw, "num_hidden_layers"),
        head_count=head_count,
        kv_head_count=positive(raw, "num_key_value_heads", head_count),
        head_dim=positive(raw, "head_dim", hidden_size // head_count),
        position_count_max=positive(raw, "max_position_embeddings", 2048),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=parse_rope(raw),
        tie_embeddings=flag(raw, "tie_word_embeddings"),
        attention_bias=flag(raw, "attention_bias"),
        mlp_bias=flag(raw, "mlp_bias"),
        dtype=checkpoint_dtype(raw),
        bos_token_id=(token_ids(generation, "bos_token_id") or token_ids(raw, "bos_token_id") or (None,))[0],
        eos_token_ids=token_ids(generation, "eos_token_id") or token_ids(raw, "eos_token_id"),
    )
    check_heads(config)
    return config


def architecture(raw: dict[str, Any]) -> str:
    """The one architecture named, if it is supported."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("config.json names no architecture; add 'architectures' as the model's authors have it")
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {names[0]!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return names[0]


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raise ModelError for settings that would silently change the arithmetic."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    if raw.get("sliding_window") is not None:
        raise ModelError(f"sliding_window {raw['sliding_window']} is not supported; use a model with full attention")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(f"quantised weights ({method}) are not supported; use the float checkpoint of this model")
    partial = raw.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")


def parse_rope(raw: dict[str, Any]) -> Rope:
    """Both spellings: rope_theta beside rope_scaling, and the newer rope_parameters that holds all."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"rope scaling must be an object but is {scaling!r}; correct config.json")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    theta = number(scaling if "rope_theta" in scaling else raw, "rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=number(scaling, "factor"))
    return Rope(
        theta=theta,
        kind=kind,
        factor=number(scaling, "factor"),
        low_frequency_factor=number(scaling, "low_freq_factor"),
        high_frequency_factor=number(scaling, "high_freq_factor"),
        original_position_count=positive(scaling, "original_max_position_embeddings"),
    )


def checkpoint_dtype(raw: dict[str, Any]) -> str:
    """The dtype's plain name; older files say torch_dtype."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name


def check_heads(config: ModelConfig) -> None:
    """Raise ModelError when queries cannot share the key-value heads or the head size cannot be rotated."""
    if config.head_count % config.kv_head_count:
        raise ModelError(
            f"{config.head_count} attention heads cannot share {config.kv_head_count} key-value heads evenly; "
            "correct num_key_value_heads in config.json"
        )
    if config.head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary embedding but is {config.head_dim}; correct config.json")


def required(raw: dict[str, Any], key: str, default: Any) -> Any:
    """The value of a key; None stands for absent. Raises ModelError when there is no default either."""
    value = raw.get(key)
    if value is None and default is None:
        raise ModelError(f"config.json has no {key!r}; add it as the model's authors have it")
    return default if value is None else value


def positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    value = required(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a whole number of at least 1 but is {value!r}; correct config.json")
    return value


def number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0."""
    value = required(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{key} must be a number above 0 but is {value!r}; correct config.json")
    return float(value)


def flag(raw: dict[str, Any], key: str) -> bool:
    """true or false, false when absent."""
    value = required(raw, key, False)
    if not isinstance(value, bool):
        raise ModelError(f"{key} must be true or false but is {value!r}; correct config.json")
    return value


def token_ids(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    """One id or a list of ids as a tuple, () when absent."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise ModelError(f"{key} must be a token id or a list of them but is {value!r}; correct config.json")
    return tuple(ids)
