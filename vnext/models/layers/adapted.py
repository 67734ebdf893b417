"""Adapted products: the operations of a step in which some rows have a LoRA adapter.

The base product is computed as ever, for all rows at once. Then `add_thin` adds each adapter's part to its own rows, in
sums of a fixed order: a row's bits do not depend on the rows beside it nor on their adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from vnext.kernels.table import Operations, operations, substituted
from vnext.kernels.thin import ThinBlock
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.sharding import Parallel

Adapter = Mapping[int, tuple[ThinBlock, ...]]
"""One adapter on one rank, by the identity of the packed weights that it changes."""


class AdaptedRows(NamedTuple):
    """The tokens of a step, int64 [n], that are computed with an adapter."""

    adapter: Adapter
    tokens: torch.Tensor


class Slots(Protocol):
    """The adapters by slot."""

    def __getitem__(self, slot: int) -> Adapter: ...


def adapted_forward(forward: Callable[..., Any], slots: Slots) -> Callable[..., Any]:
    """A family's forward for a batch with adapters."""

    def run(params: Any, kv: Any, batch: ForwardBatch, config: ModelConfig, parallel: Parallel) -> Any:
        rows = [AdaptedRows(slots[slot], tokens) for slot, tokens in batch.adapters]
        whole = msgspec.structs.replace(parallel, begin_all_reduce=None)  # a product in parts would not see its tokens
        with substituted(adapted(operations(batch.token_ids.device.type), rows)):
            return forward(params, kv, batch, config, whole)

    return run


def adapted(base: Operations, rows: Sequence[AdaptedRows]) -> Operations:
    """The operations whose products of [T, in] add what the adapters of the rows do."""

    def parts_of(weight: Any) -> list[tuple[ThinBlock, torch.Tensor]]:
        return [(block, each.tokens) for each in rows for block in each.adapter.get(id(weight), ())]

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        product, parts = base.linear(x, weight, bias), parts_of(weight)
        return base.add_thin(product, x, parts) if parts else product

    def gated_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if not (parts := parts_of(weight)):
            return base.gated_linear(x, weight, bias, activation)
        return base.gated_linear(x, weight, bias, activation, lambda product: base.add_thin(product, x, parts))

    return base._replace(linear=linear, gated_linear=gated_linear)
