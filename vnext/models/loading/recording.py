"""Recording: which tensors a family takes, asked of the family itself: it puts its parameters together from names alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.sharding import layout_of, weight_axes
from vnext.models.registry import family


class _Nothing:
    """A weight without numbers."""

    def __add__(self, *others: object) -> _Nothing:
        return self

    __mul__ = __getitem__ = reshape = swapaxes = contiguous = __add__


class Recording:
    """A family's source of weights that notes their names, by the contract of models/layers/assembly.py.

    `has` says which tensors there are. `read` are those that the family asks for; `heads` those of them that are the embedding too.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, has: Callable[[str], bool]) -> None:
        self._has = has
        self.read, self.heads = set[str](), set[str]()

    def __contains__(self, name: str) -> bool:
        return self._has(name)

    def is_tied(self, embedding: str, head: str) -> bool:
        self.read |= {embedding, head}
        self.heads.add(head)
        return True

    def go_without(self, head: str) -> None:
        pass

    def fused(self, names: tuple[str, ...], **_: Any) -> Any:
        self.read.update(names)
        return _Nothing()

    packed = packed_gated = fused

    def wide(self, name: str) -> Any:
        return self.fused((name,))

    table = scalar = packed_wide = wide

    def stacked(self, groups: tuple[tuple[str, ...], ...], gated: bool) -> Any:
        return self.fused(tuple(name for group in groups for name in group))

    def by_head(self, names: tuple[str, ...], sizes: tuple[int, int]) -> Any:
        return self.packed(names, exact=True), _Nothing()

    def integers(self, name: str, count: int) -> Any:
        return self.fused((name,))

    def place(self, array: np.ndarray) -> np.ndarray:
        return array

    share = place


class _Products(Recording):
    """`products`: what the family multiplies by; `exact`: those of them that stay exact."""

    def __init__(self, has: Callable[[str], bool]) -> None:
        super().__init__(has)
        self.products, self.exact = set[str](), set[str]()

    def packed(self, names: tuple[str, ...], *, exact: bool = False) -> object:  # type: ignore[override]
        (self.exact if exact else self.products).update(names)
        return self.fused(names)

    packed_gated = packed  # type: ignore[assignment]

    def stacked(self, groups: tuple[tuple[str, ...], ...], gated: bool) -> object:
        return self.packed(tuple(name for group in groups for name in group))


def layer_products(tensors: Container[str], config: ModelConfig) -> tuple[list[str], list[str]]:
    """The weights that the layers multiply by, but those that stay exact; and the others of products, as routers and the head."""
    recording = _Products(lambda name: name in tensors)
    family(config.architecture).assemble(recording, config)
    layouts = weight_axes(config)
    known = sorted(name for name in recording.products if name in tensors)
    chosen = [name for name in known if is_of_layer(name) and not layout_of(name, layouts).flipped]
    return chosen, sorted((recording.exact | recording.products) - set(chosen))


def is_of_layer(name: str) -> bool:
    """Whether a weight is one of many layers', as its name says."""
    return re.search(r"\.\d+\.", name) is not None
