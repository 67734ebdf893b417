"""Watches a step: every call of the operations table with its arguments, its result and the weight that it uses.

Owns the names of weights (places in the tree of parameters) and of layers, and the list of arguments that have a row
for each token. Changes no result and no model: while a step is watched, models see another operations table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite
from vnext.kernels.table import Operations

ACTIVATIONS = MappingProxyType(
    {
        "paged_attention": (0,), "rotary_kv_write": (0,), "rms_norm": (0,), "add_rms_norm": (0, 1),
        "layer_norm": (0,), "activate": (0,), "linear": (0,), "gated_linear": (0,), "logits": (0,), "route": (0,),
        "experts": (0,), "embedding_rows": (), "add_thin": (0, 1),
    }  # fmt: skip
)
"""Arguments [rows, ...] in the model's dtype, by operation. Operations missing here are not part of a step."""
GIVEN: Mapping[str, Callable[..., tuple[Any, ...]]] = MappingProxyType(
    {"rotary_kv_write": RotaryWrite, "paged_attention": AttentionCall}
)
"""What these operations are given beside their first argument; a call has its fields as arguments."""
BESIDE = MappingProxyType({"rotary_kv_write": (4, 5, 8), "experts": (1, 2), "embedding_rows": (1,)})
"""Arguments with a row for each token, in a fixed dtype."""
CACHES = MappingProxyType({"paged_attention": (1, 2), "rotary_kv_write": (6, 7)})
SLOTS = 8  # index of this argument of rotary_kv_write
METADATA = 3  # index of this argument of paged_attention
OVERWRITTEN = frozenset({"rotary_kv_write", "add_thin"})
"""Operations that overwrite their first argument."""
PARTS = MappingProxyType(
    {"add_rms_norm": ("normed", "residual"), "route": ("shares", "experts"), "rotary_kv_write": ("query",)}
)
"""Names of results other than "output"."""


class Call(NamedTuple):
    """One call. `layer` is -1 outside of the layers; `weight` is a place in the parameters, "" where there is none."""

    operation: str
    layer: int
    weight: str
    arguments: tuple[Any, ...]
    result: Any

    @property
    def rows(self) -> int:
        """The number of tokens, or of samples."""
        first = (*ACTIVATIONS[self.operation], *BESIDE.get(self.operation, ()))[0]
        return len(self.arguments[first])


def of_fields(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an operation, taking the arguments of a Call."""
    given = GIVEN.get(operation)
    return function if given is None else lambda first, *fields: function(first, given(*fields))


class Names:
    """Places in a tree of parameters, such as "layers.1.attention.qkv.weight", and the values there."""

    def __init__(self, params: Any) -> None:
        self._places: dict[int, str] = {}
        self._values: dict[str, Any] = {}
        for place, value in _walked(params, ""):
            self._values[place] = value
            self._places.setdefault(id(value), place)

    def place(self, value: Any) -> str:
        """The place of a value, "" if it has none."""
        return self._places.get(id(value), "") if isinstance(value, (torch.Tensor, tuple)) else ""

    def place_of(self, identity: int) -> str:
        """The place of the value with this identity, "" if it has none."""
        return self._places.get(identity, "")

    def at(self, place: str) -> Any:
        return self._values[place]


def _walked(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, tuple):
        yield place, value
        names = getattr(value, "_fields", range(len(value)))
        for name, part in zip(names, value):
            yield from _walked(part, f"{place}.{name}" if place else str(name))


def layer_of(place: str) -> int:
    """The layer of a place in the parameters, -1 outside of the layers."""
    first, _, rest = place.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else -1


class Watch:
    """`operations` do what the given ones do, and pass each call of a step to `meet`. One step at a time."""

    def __init__(self, served: Operations, names: Names, meet: Callable[[Call], None]) -> None:
        self.operations = Operations(*(self._door(name, getattr(served, name)) for name in Operations._fields))
        self._names, self._meet = names, meet
        self._layer, self._weight = -1, ""
        self._described: dict[int, tuple[Any, AttentionStep]] = {}

    def begin(self) -> None:
        self._layer, self._weight = -1, ""
        self._described.clear()

    def described(self, metadata: Any) -> AttentionStep:
        """The step of which these metadata were made."""
        return self._described[id(metadata)][1]

    def _door(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "attention_metadata":
            return lambda step: self._describe(function, step)
        if name not in ACTIVATIONS:
            return function
        if name in GIVEN:
            return lambda first, given: self._call(name, of_fields(name, function), (first, *given))
        return lambda *arguments: self._call(name, function, arguments)

    def _describe(self, function: Callable[..., Any], step: AttentionStep) -> Any:
        metadata = function(step)
        self._described[id(metadata)] = metadata, step
        return metadata

    def _call(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        weight = self._weight if name == "add_thin" else next(filter(None, map(self._names.place, arguments)), "")
        if weight or name in ("logits", "embedding_rows"):
            self._layer, self._weight = layer_of(weight), weight
        layer, given = self._layer, arguments
        if name in OVERWRITTEN:
            given = (arguments[0].clone(), *arguments[1:])
        result = function(*arguments)
        self._meet(Call(name, layer, weight, given, result))
        return result
