"""Readers of JSON objects: a key's value of the right kind, or one sentence with the key, the value and the remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import is_pointer, pointer_sentence
from vnext.models.errors import ModelError

Json = dict[str, Any]
"""An object, whose members are looked at one by one."""
COUNT_MAX = 2**31 - 1
COUNTS_MAX = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "n_layer", "head_dim"), 2**14),
        **dict.fromkeys(("hidden_size", "n_embd"), 2**20),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_experts", "num_local_experts"), 2**16),
    }
)
"""Bounds of what is counted out or made before a weight is read: far above any model, far below any memory."""
SHOWN_MAX = 120
"""Characters of a value in a sentence."""


class Watched(Json):
    """A JSON object that knows which of its members were asked for; what it is joined with knows the same."""

    def __init__(self, members: Mapping[str, Any], asked: set[str] | None = None) -> None:
        super().__init__(members)
        self.asked: set[str] = set() if asked is None else asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: Mapping[str, Any]) -> Watched:  # type: ignore[override]
        return Watched({**self, **other}, self.asked)

    def __ror__(self, other: Mapping[str, Any]) -> Watched:  # type: ignore[override]
        return Watched({**other, **self}, self.asked)


def usual(*others: Mapping[str, object], **members: object) -> MappingProxyType[str, Any]:
    """What an object means that does not say it: its own members go before those of others."""
    return MappingProxyType({key: value for each in (*others, members) for key, value in each.items()})


def read_json(path: Path) -> Json:
    """A JSON object from a file. Raises ModelError when it is unreadable or something else."""
    try:
        data = path.read_bytes()
        if is_pointer(data):
            raise ModelError(pointer_sentence(path))
        value = json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({reason(error)}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object but holds {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> Json:
    """As `read_json`, but {} where the file does not exist."""
    return read_json(path) if path.is_file() else {}


def required(raw: Json, key: str, default: object) -> Any:
    """The value of a key; None stands for absent. Raises ModelError when there is no default either."""
    value = raw.get(key)
    if value is None and default is None:
        raise ModelError(f"config.json has no {key!r}; add it as the model's authors have it")
    return default if value is None else value


def positive(raw: Json, key: str, default: int | None = None) -> int:
    """A whole number of at least 1, and no larger than such a number is in any model."""
    value = required(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a whole number of at least 1 but is {shown(value)}; correct config.json")
    if value > (most := COUNTS_MAX.get(key, COUNT_MAX)):
        raise ModelError(f"{key} must be at most {most} but is {shown(value)}; correct config.json")
    return value


def shown(value: object) -> str:
    """A value, shortened for an error sentence."""
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def number(raw: Json, key: str, default: float | None = None) -> float:
    """A number above 0."""
    value = required(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ModelError(f"{key} must be a number above 0 but is {shown(value)}; correct config.json")
    return float(value)


def numbers(raw: Json, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers above 0."""
    values = required(raw, key, None)
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"{key} must be a list of {count} numbers; correct config.json")
    return tuple(number({key: value}, key) for value in values)


def flag(raw: Json, key: str, default: bool = False) -> bool:
    value = required(raw, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} must be true or false but is {shown(value)}; correct config.json")
    return value


def token_ids(raw: Json, key: str, file: str = "config.json") -> tuple[int, ...]:
    """One id or a list of ids, a member of `file`, as a tuple, () when absent. Some files write an id as text, and -1 for none."""
    value = raw.get(key)
    items = value if isinstance(value, list) else [] if value is None else [value]
    ids = [int(item) if isinstance(item, str) and item.isdecimal() and item.isascii() else item for item in items]
    if any(isinstance(item, bool) or not isinstance(item, int) or not -1 <= item <= COUNT_MAX for item in ids):
        raise ModelError(f"{key} must be a token id or a list of them but is {shown(value)}; correct {file}")
    return tuple(item for item in ids if item >= 0)


def refuse(raw: Json, key: str, *, unless: tuple[object, ...]) -> None:
    """Raise ModelError for a setting that would change the arithmetic; absent, null and `unless` are harmless."""
    value = raw.get(key)
    if value is not None and value not in unless:
        wanted = f"; supported is {' or '.join(map(str, unless))}" if unless else "; use a model without it"
        raise ModelError(f"{key} {shown(value)} is not supported{wanted}")
