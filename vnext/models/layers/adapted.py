"""Adapted products: the operations of a step in which some rows have a LoRA adapter.

The base product is computed as ever, for all rows at once. Then `add_thin` adds each adapter's part to its own rows, in
sums of a fixed order: a row's bits do not depend on the rows beside it nor on their adapters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import msgspec
import torch

from vnext.kernels.table import Operations, operations, substituted
from vnext.kernels.thin import ThinBlocks, ThinParts, ThinRows, thin_rows
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.sharding import Parallel

Adapter = Mapping[int, ThinBlocks]
"""One adapter on one rank, by the identity of the packed weights that it changes."""


class Slots(Protocol):
    """The adapters by slot."""

    def __getitem__(self, slot: int) -> Adapter: ...


class AdaptedForward:
    """A family's forward for batches with adapters. Keeps the parts of its last batch: a steady step has the same ones."""

    def __init__(self, forward: Callable[..., Any], slots: Slots) -> None:
        self._forward, self._slots = forward, slots
        self._adapters: list[Adapter] = []
        self._tokens: list[bytes] = []
        self._operations: Operations | None = None

    def __call__(self, params: Any, kv: Any, batch: ForwardBatch, config: ModelConfig, parallel: Parallel) -> Any:
        whole = msgspec.structs.replace(parallel, begin_all_reduce=None)  # a product in parts would not see its tokens
        with substituted(self._operations_for(batch)):
            return self._forward(params, kv, batch, config, whole)

    def _operations_for(self, batch: ForwardBatch) -> Operations:
        adapters = [self._slots[rows.slot] for rows in batch.adapters]
        tokens = [rows.tokens.numpy().tobytes() for rows in batch.adapters]
        same = tokens == self._tokens and all(map(operator.is_, adapters, self._adapters))
        if self._operations is None or not same:
            chosen = [(adapter, thin_rows(rows.tokens)) for adapter, rows in zip(adapters, batch.adapters)]
            self._operations = adapted(operations(batch.token_ids.device.type), chosen)
            self._adapters, self._tokens = adapters, tokens
        return self._operations


def adapted(base: Operations, chosen: Sequence[tuple[Adapter, ThinRows]]) -> Operations:
    """The operations whose products of [T, in] add what the adapters do to their rows."""

    @cache
    def parts_of(weight: int) -> ThinParts | None:
        found = [(adapter[weight], rows) for adapter, rows in chosen if weight in adapter]
        return ThinParts(found) if found else None

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        product, parts = base.linear(x, weight, bias), parts_of(id(weight))
        return base.add_thin(product, x, parts) if parts else product

    def gated_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if not (parts := parts_of(id(weight))):
            return base.gated_linear(x, weight, bias, activation)
        return base.gated_linear(x, weight, bias, activation, lambda product: base.add_thin(product, x, parts))

    return base._replace(linear=linear, gated_linear=gated_linear)
