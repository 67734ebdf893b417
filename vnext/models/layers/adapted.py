"""Adapted products: the operations of a step in which some rows have a LoRA adapter.

The base product is computed as ever, for all rows at once. Then `add_thin` adds each adapter's part to its own rows, in
sums of a fixed order: a row's bits do not depend on the rows beside it nor on their adapters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch

from vnext.kernels.products import Change
from vnext.kernels.shards import shards_of
from vnext.kernels.table import Operations, operations, substituted
from vnext.kernels.thin import StackLines, StackParts, ThinBlocks, ThinParts, ThinRows, stack_lines, stack_parts, thin_rows
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.sharding import Parallel


class Adapter:
    """One adapter on one rank: blocks by the identity of the packed weights that they change. Immutable."""

    def __init__(self, blocks: Mapping[int, ThinBlocks]) -> None:
        self.blocks = blocks


class Slots(Protocol):
    """The adapters by slot."""

    def __getitem__(self, slot: int) -> Adapter: ...


Chosen = Sequence[tuple[Adapter, ThinRows]]
Made = TypeVar("Made")


class PerBatch(Generic[Made]):
    """What `make` makes of a batch's adapters and their rows, kept while they stay: a steady step has those of the one before."""

    def __init__(self, slots: Slots, make: Callable[[Chosen], Made]) -> None:
        self._slots, self._make = slots, make
        self._last: tuple[list[Adapter], list[bytes], Made] | None = None

    def of(self, batch: ForwardBatch) -> Made:
        adapters = [self._slots[rows.slot] for rows in batch.adapters]
        tokens = [rows.tokens.tobytes() for rows in batch.adapters]
        last = self._last
        if last is not None and tokens == last[1] and all(map(operator.is_, adapters, last[0])):
            return last[2]
        made = self._make([(adapter, thin_rows(rows.tokens)) for adapter, rows in zip(adapters, batch.adapters)])
        self._last = adapters, tokens, made
        return made


class AdaptedForward:
    """A family's forward for batches with adapters."""

    def __init__(self, forward: Callable[..., Any], slots: Slots, device: str) -> None:
        self._forward = forward
        self._operations = PerBatch(slots, lambda chosen: adapted(operations(device), chosen))

    def __call__(self, params: Any, kv: Any, batch: ForwardBatch, config: ModelConfig, parallel: Parallel) -> Any:
        whole = msgspec.structs.replace(parallel, begin_all_reduce=None)  # a product in parts would not see its tokens
        with substituted(self._operations.of(batch)):
            return self._forward(params, kv, batch, config, whole)


class AdaptedStack:
    """What adapters add to the products of a stack of layers; `weights` are those of the products, in their order."""

    def __init__(self, weights: Sequence[object], slots: Slots) -> None:
        self._products = {id(weight): place for place, weight in enumerate(weights)}
        self._lines: WeakKeyDictionary[Adapter, StackLines] = WeakKeyDictionary()
        self._parts = PerBatch(slots, self._make)

    def parts(self, batch: ForwardBatch) -> StackParts | None:
        """Of a batch; None where no token has an adapter."""
        return self._parts.of(batch) if batch.adapters else None

    def _make(self, chosen: Chosen) -> StackParts:
        for adapter, _ in chosen:
            if adapter not in self._lines:
                self._lines[adapter] = stack_lines(adapter.blocks, self._products)
        return stack_parts([(self._lines[adapter], rows) for adapter, rows in chosen], len(self._products))


class Addition(NamedTuple):
    """What adapters add to the product of x with one weight, by this `add_thin`. Called with the product, which it changes."""

    add_thin: Callable[[torch.Tensor, torch.Tensor, ThinParts], torch.Tensor]
    x: torch.Tensor
    parts: ThinParts

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        return self.add_thin(product, self.x, self.parts)


def adapted(base: Operations, chosen: Chosen) -> Operations:
    """The operations whose products of [T, in] add what the adapters do to their rows."""

    @cache
    def parts_of(weight: int) -> ThinParts | None:
        found = [(adapter.blocks[weight], rows) for adapter, rows in chosen if weight in adapter.blocks]
        return ThinParts(found) if found else None

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        product, parts = base.linear(x, weight, bias), parts_of(id(weight))
        return base.add_thin(product, x, parts, shards_of(weight)) if parts else product

    def row_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, join: Change) -> torch.Tensor:
        product, parts = base.row_linear(x, weight, bias, join), parts_of(id(weight))
        return base.add_thin(product, x, parts, shards_of(weight), join) if parts else product

    def gated_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if not (parts := parts_of(id(weight))):
            return base.gated_linear(x, weight, bias, activation)
        return base.gated_linear(x, weight, bias, activation, Addition(base.add_thin, x, parts))

    return base._replace(linear=linear, row_linear=row_linear, gated_linear=gated_linear)
