"""Whole steps of decodes as graphs: from the host's one block to sampled tokens, nothing asked for one by one.

Owns a graph and its static memory for each pair of rows and room for splits. A replay is a copy of the block into static
memory and one launch: indices, forward, logits and plain sampling are inside, and so is the write to `last`, from which the
next step takes its tokens. Nothing else changes between replays, so nothing can be stale but the block as a whole. Rows
that need more than plain sampling are sampled again from the hidden states, by the caller: those are kept because they are
small, where logits of every size would fill gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.cuda.decode_plan import DecodeAttention, splits_of, word_count, write_plan
from vnext.models.batch import ForwardBatch, GroupPlaces, PreparedAttention
from vnext.runtime.batch_fed import PARAMETERS, FedBatch, HostStep, decode_slots
from vnext.runtime.batch_sampling import COLUMNS
from vnext.runtime.buckets import unit_room
from vnext.runtime.device import Device, Graph
from vnext.runtime.device_model import DeviceModel
from vnext.runtime.sampling import Choose
from vnext.runtime.sampling_inputs import SamplingInputs
from vnext.runtime.staging import Layout, Staging

NOBODY = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0}
"""PARAMETERS of a padded row: it is sampled greedily."""
TAKE_LAST = -1
"""In place of a token: the row's last one."""


class Captured(NamedTuple):
    """A graph and what it leaves: hidden states [B, hidden], tokens int64 [B]. `block` uint8 is what it reads."""

    graph: Graph
    block: torch.Tensor
    hidden: torch.Tensor
    tokens: torch.Tensor


class DecodeGraphs:
    """Graphs of one model, captured when they are first needed, or by `prepare`."""

    def __init__(
        self, device: Device, model: DeviceModel, batch: FedBatch, choose: Choose, wrap: Callable[..., Callable] | None = None
    ) -> None:
        """`wrap` is put around the forward before it is captured: a compiler."""
        self._device, self._model, self._batch, self._choose = device, model, batch, choose
        self._compute = wrap(self._forward) if wrap else self._forward
        self._captured: dict[tuple[int, int], Captured] = {}

    def prepare(self, rows: int, units: int) -> None:
        """Capture a size now. The engine must not be running a step."""
        if (rows, units) not in self._captured:
            self._captured[rows, units] = self._capture(rows, units)

    def run(self, step: HostStep, rows: int, staging: Staging) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of R decodes, padded to `rows`: hidden states [rows, hidden], and tokens [R], good until the next replay."""
        splits = max(int(splits_of(step.contexts, window).sum()) for window in self._model.windows)
        units = unit_room(rows, splits + rows - len(step.begins))
        self.prepare(rows, units)
        captured = self._captured[rows, units]
        block = self.block_of(step, rows, units)
        sent = staging.send({"block": block.view(np.int64)} | step.spans)
        self._batch.write_spans({name: sent[name] for name in step.spans})
        captured.block.copy_(sent["block"].view(torch.uint8))
        captured.graph.replay()
        return captured.hidden, captured.tokens[: len(step.begins)]

    def layout(self, rows: int, units: int) -> Layout:
        """Of a block for these sizes."""
        fields = [(name, np.int64, rows) for name in ("begins", "places", "tokens")]
        fields += [(name, COLUMNS[name], rows) for name in PARAMETERS]
        fields += [(f"plan {group}", np.int32, word_count(rows, units)) for group in range(len(self._model.windows))]
        return Layout(fields)

    def block_of(self, step: HostStep | None, rows: int, units: int) -> np.ndarray:
        """The block (uint8) of a step, or of padding alone."""
        layout = self.layout(rows, units)
        block = np.zeros(layout.size_bytes, dtype=np.uint8)
        fields, count = layout.arrays(block), 0 if step is None else len(step.begins)
        fields["places"][:] = self._batch.null_row
        for name, value in NOBODY.items():
            fields[name][count:] = value
        if step is not None:
            fields["begins"][:count], fields["places"][:count] = step.begins, step.places
            fields["tokens"][:count] = step.token_ids
            fields["tokens"][step.ahead] = TAKE_LAST
            for name, column in self._batch.columns.columns(step.places).items():
                fields[name][:count] = column
        for group, window in enumerate(self._model.windows):
            table_rows = fields["places"] if len(self._model.windows) == 1 else np.arange(rows)
            write_plan(fields[f"plan {group}"], units, fields["begins"] + 1, table_rows, window)
        return block

    def _capture(self, rows: int, units: int) -> Captured:
        """Once as it is, which loads every kernel, then recorded; padding alone, so no row of the cache is touched."""
        layout = self.layout(rows, units)
        block = self._device.upload(torch.from_numpy(self.block_of(None, rows, units)))
        fields = layout.tensors(block)
        self.body(fields, rows, units)
        graph = self._device.graph()
        graph.begin()
        hidden, tokens = self.body(fields, rows, units)
        graph.end()
        return Captured(graph, block, hidden, tokens)

    def body(self, fields: dict[str, torch.Tensor], rows: int, units: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole step over the fields of a block: what is captured. Hidden states [rows, hidden] and tokens [rows]."""
        last, places = self._batch.last, fields["places"]
        token_ids = torch.where(fields["tokens"] == TAKE_LAST, last.index_select(0, places), fields["tokens"])
        hidden, logits = self._compute(self._inputs(token_ids, fields, rows, units))
        columns = {name: fields[name] for name in PARAMETERS}
        tokens = self._choose(logits, SamplingInputs(**columns, position=fields["begins"] + 1))
        last.index_copy_(0, places, tokens)
        return hidden, tokens

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of every row, [rows, hidden] and [rows, V]."""
        hidden = self._model.hidden(batch)
        return hidden, self._model.logits(hidden)

    def _inputs(self, token_ids: torch.Tensor, fields: dict[str, torch.Tensor], rows: int, units: int) -> ForwardBatch:
        """The step's tensors, made of a block's fields."""
        begins, here = fields["begins"], self._device.torch_device
        places = [self._places(fields, group) for group in range(len(self._model.windows))]
        model = self._model
        attention = tuple(
            DecodeAttention(
                fields[f"plan {group}"], rows, units, place.block_table, model.block_size, model.kv_head_count, window
            )
            for group, (place, window) in enumerate(zip(places, model.windows, strict=True))
        )  # fmt: skip
        starts = torch.arange(rows + 1, dtype=torch.int32, device=here)
        return ForwardBatch(
            token_ids, begins, places[0].slots, starts, (begins + 1).int(), places[0].block_table, starts[:-1].long(),
            groups=tuple(places[1:]), attention=PreparedAttention(attention),
        )  # fmt: skip

    def _places(self, fields: dict[str, torch.Tensor], group: int) -> GroupPlaces:
        """Of one group alone the batch's own table serves, whose rows the plan names."""
        table, groups = self._batch.table, len(self._model.windows)
        slots = decode_slots(table, fields["places"], fields["begins"], self._model.block_size, group, groups)
        if groups == 1:
            return GroupPlaces(slots, table)
        return GroupPlaces(slots, table.index_select(0, fields["places"])[:, group::groups].contiguous())
