"""Adapters in a device's memory: a region for each slot and one more, into which the next adapter is copied beside the work.

Owns the regions, and the one buffer from which they are filled. An adapter lies in its region as on a CPU, behind a header that
says what is where; graphs hold the memory's address, and a step says which of its tokens belong to which region. So any graph
serves any adapters. No region is read half written: a copy begins after all work that was requested before it, which may read
what the region held, and a step that names the region has joined the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.products import Change, completed
from vnext.kernels.table import Operations
from vnext.kernels.thin import LANES, thin_bytes
from vnext.kernels.thin_tiles import ThinLines, ThinTiles, header_bytes, write_header
from vnext.models.layers.adapted import Adapter
from vnext.runtime.gpu.device import Device, Mark


class AdaptedProduct(NamedTuple):
    """A product that adapters change: its packed `weight` [out, in], and (first column, width) of each of its modules."""

    weight: Any
    modules: tuple[tuple[int, int], ...]


class Region(NamedTuple):
    """Where an adapter is, and the copy that brought it."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    mark: Mark


class Regions(Protocol):
    """The regions by slot."""

    def __getitem__(self, slot: int) -> Region: ...


class AdapterRegions:
    """`adapters_max` adapters of at most `rank_max`, and one that waits for its slot. `memory` is uint8 [regions, bytes]. One
    thread, but for what `room` returns."""

    def __init__(self, device: Device, products: Sequence[AdaptedProduct], adapters_max: int, rank_max: int) -> None:
        self._device, self._products = device, tuple(products)
        rank_room, first = -(-rank_max // LANES) * LANES, 0
        self._lines: dict[int, ThinLines] = {}
        for weight, modules in products:
            self._lines[id(weight)] = ThinLines(first, len(modules), max(width for _, width in modules), rank_room)
            first += len(modules)
        self._begin = header_bytes(first)
        size = self._begin + sum(product_bytes(each, rank_max) for each in products)
        self.memory = torch.zeros((adapters_max + 1, size), dtype=torch.uint8, device=device.torch_device)
        self._buffer = device.host_buffer(size)
        self._copied: Mark | None = None
        self._free = list(range(adapters_max, -1, -1))

    def room(self) -> Callable[[int], torch.Tensor]:
        """Makes the memory of the next adapter: uint8 zeros, on the host. Waits until the adapter before has been copied."""
        if self._copied is not None:
            self._copied.wait()
        matrices = self._buffer[self._begin :]
        return lambda size_bytes: matrices[:size_bytes].zero_()

    def begin(self, digest: str, adapter: Adapter) -> Region:
        """Begin to copy the adapter that was read into `room` last."""
        blocks = [(weight, adapter.blocks.get(id(weight))) for weight, _ in self._products]
        firsts = [[first for first, _ in modules] for _, modules in self._products]
        write_header(self._buffer, digest, list(zip(firsts, (found for _, found in blocks), strict=True)))
        size = self._begin + sum(found.size_bytes for _, found in blocks if found is not None)
        index = self._free.pop()
        self._copied = self._device.copy_in(self.memory[index, :size], self._buffer[:size], self._device.mark())
        return Region(index, self._copied)

    def is_there(self, region: Region) -> bool:
        return region.mark.is_reached()

    def use(self, region: Region) -> None:
        """Work that is requested from here on may compute with the adapter."""
        self._device.join(region.mark)

    def free(self, region: Region) -> None:
        """Work that is requested from here on does not."""
        self._free.append(region.index)

    def adapted(self, tiles: ThinTiles) -> Callable[[Operations], Operations]:
        """Operations whose products of [T, in] add what the adapters of `tiles` do to their tokens."""
        return lambda base: self._adapted(base, tiles)

    def _adapted(self, base: Operations, tiles: ThinTiles) -> Operations:
        def change(product: torch.Tensor, x: torch.Tensor, weight: Any) -> torch.Tensor:
            lines = self._lines.get(id(weight))
            return product if lines is None else base.add_tiled(product, x, self.memory, *tiles, lines)

        def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
            return change(base.linear(x, weight, bias), x, weight)

        def row_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, join: Change) -> torch.Tensor:
            """Each rank adds its part of the change, rounded: rows with an adapter have the bits of their number of ranks."""
            return completed(join(linear(x, weight, None)), x.dtype, bias)

        def gated_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
            return base.gated_linear(x, weight, bias, activation, lambda product: change(product, x, weight))

        return base._replace(linear=linear, row_linear=row_linear, gated_linear=gated_linear)


def product_bytes(product: AdaptedProduct, rank: int) -> int:
    """Bytes of the matrices that an adapter of all modules has for a product."""
    weight, modules = product
    down, dtype = torch.empty((rank, weight.shape[1]), device="meta"), torch_dtype(weight.dtype)
    return sum(thin_bytes(down, torch.empty((width, rank), device="meta"), dtype) for _, width in modules)
