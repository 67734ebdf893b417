"""Mixed steps in pieces: graphs between the layers' attentions; attention itself runs outside, where no shape is fixed.

Owns, for each number of tokens, a series of graphs and their static memory. A forward is recorded once: at each attention the
current graph ends and the next begins. A replay runs the graphs in order and, between them, attends for the step's real rows
with their own metadata. Padded tokens write to a null slot, and attention skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vnext.kernels.calls import AttentionCall
from vnext.kernels.thin_tiles import ThinTiles
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, PreparedAttention
from vnext.runtime.gpu.device import Device, Graph, recording
from vnext.runtime.gpu.model import DeviceModel


class Cut(NamedTuple):
    """An attention between two graphs: the first leaves `query` [T, heads, D], the second takes `seen`. The call's metadata is the
    number of its group of layers."""

    query: torch.Tensor
    call: AttentionCall
    seen: torch.Tensor


class Static(NamedTuple):
    """The inputs of one size's graphs: int64 [tokens] each, sample_at [samples], slots for each group, tiles of adapters."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_at: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    tiles: ThinTiles | None = None


class Recorder:
    """Records a forward as graphs and cuts: `attend` replaces the table's attention."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.graphs: list[Graph] = []
        self.cuts: list[Cut] = []

    def record(self, body: Callable[[Callable[..., torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """The result of `body`, which receives `attend`; the last graph leaves its result there."""
        self.graphs.append(self._device.graph())
        with recording(self.graphs[0], lambda: self.graphs[-1]):
            return body(self.attend)

    def attend(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """The memory for an attention's result."""
        self.graphs[-1].end()
        seen = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        self.cuts.append(Cut(query, call, seen))
        self.graphs.append(self._device.graph())
        self.graphs[-1].begin()
        return seen


class Pieces(NamedTuple):
    """All graphs and cuts of one size. They leave `hidden` [samples, hidden]."""

    static: Static
    graphs: list[Graph]
    cuts: list[Cut]
    hidden: torch.Tensor


class PiecewiseGraphs:
    """Pieces of one model, captured when a size is first needed."""

    def __init__(self, device: Device, model: DeviceModel, row_max: int, attend: Callable[..., torch.Tensor]) -> None:
        """`attend` is the table's paged_attention. `row_max`: the most samples of a step."""
        self._device, self._model, self._row_max, self._attend = device, model, row_max, attend
        self._pieces: dict[tuple[int, bool], Pieces] = {}

    def run(self, batch: ForwardBatch, metadata: Sequence[Any], size: int) -> torch.Tensor:
        """Hidden states [S, hidden] of a step padded to `size` tokens, valid until the next run. `metadata`: one per group."""
        key = (size, batch.tiles is not None)
        if key not in self._pieces:
            self._pieces[key] = self._capture(*key)
        pieces, count, samples = self._pieces[key], batch.token_ids.shape[0], batch.sample_at.shape[0]
        self._fill(pieces.static, batch)
        pieces.graphs[0].replay()
        for cut, graph in zip(pieces.cuts, pieces.graphs[1:], strict=True):
            seen = self._attend(cut.query[:count], cut.call._replace(metadata=metadata[cut.call.metadata]))
            cut.seen[:count].copy_(seen)
            graph.replay()
        return pieces.hidden[:samples]

    def _fill(self, static: Static, batch: ForwardBatch) -> None:
        count, samples = batch.token_ids.shape[0], batch.sample_at.shape[0]
        static.token_ids[:count].copy_(batch.token_ids)
        static.positions[:count].copy_(batch.positions)
        static.sample_at[:samples].copy_(batch.sample_at)
        for slots, found in zip(static.slots, (batch.slots, *(group.slots for group in batch.groups)), strict=True):
            slots[:count].copy_(found)
            slots[count:].fill_(self._model.null_slot)
        if static.tiles is not None and batch.tiles is not None:
            for tensor, found in zip(static.tiles, batch.tiles, strict=True):
                tensor[: found.shape[0]].copy_(found)
                tensor[found.shape[0] :].zero_()

    def _capture(self, size: int, adapted: bool) -> Pieces:
        """Run once eagerly, which loads every kernel, then record."""
        static = self._static(size, adapted)
        self._body(static, lambda query, _: torch.zeros_like(query))
        recorder = Recorder(self._device)
        hidden = recorder.record(lambda attend: self._body(static, attend))
        return Pieces(static, recorder.graphs, recorder.cuts, hidden)

    def _static(self, size: int, adapted: bool) -> Static:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device.torch_device)

        slots = tuple(zeros(size).fill_(self._model.null_slot) for _ in self._model.windows)
        room = self._model.tile_room(size)
        tiles = ThinTiles(zeros(size, dtype=torch.int32), zeros(room, 3, dtype=torch.int32)) if adapted else None
        return Static(zeros(size), zeros(size), zeros(min(size, self._row_max)), slots, tiles)

    def _body(self, static: Static, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The forward over static memory; only attention uses rows and tables."""
        none = static.slots[0].new_empty(0, dtype=torch.int32)
        prepared = PreparedAttention(tuple(range(len(static.slots))), attend)
        return self._model.hidden(
            ForwardBatch(
                static.token_ids, static.positions, static.slots[0], none, none, none, static.sample_at,
                groups=tuple(GroupPlaces(slots, none) for slots in static.slots[1:]), attention=prepared, tiles=static.tiles,
            )
        )  # fmt: skip
