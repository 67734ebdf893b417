"""Whole steps of decodes as graphs: from the host's one block to sampled tokens in a single launch.

Owns a graph and its static memory for each triple of row count, room for splits, and sampling options. A replay copies the
block into static memory and launches once: the graph holds indices, forward, logits and sampling, and the write to `last`,
from which the next step takes its tokens. Where rows are masked, it ends with the logits. Between replays only the batch's own
tables change besides the block, so nothing but the whole block can be stale. Where rows report log-probabilities, all graphs
leave the model's logits in one shared memory: one copy per size would fill gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.cuda.decode_plan import DecodeAttention, slot_count, tiles_of, word_count, write_plan
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, PreparedAttention
from vnext.runtime.gpu.buckets import unit_room
from vnext.runtime.gpu.device import Device, Graph
from vnext.runtime.gpu.device_batch import DeviceBatch, HostStep, Samples, decode_slots
from vnext.runtime.gpu.model import DeviceModel
from vnext.runtime.gpu.sampling_updates import PLAIN, Wants
from vnext.runtime.gpu.staging import Layout, Staging
from vnext.sampling.sampling import Adjust, Choose

Watch = Callable[[ForwardBatch, Samples], None]
"""Receives the tensors and the samples of a step right before the step runs."""
TAKE_LAST = -1
"""Stands for the row's last token in place of a token id."""


class Captured(NamedTuple):
    """A graph and its output, tokens int64 [B]. The graph reads `block` (uint8). `version` is that of the tables whose addresses
    the graph holds."""

    graph: Graph
    block: torch.Tensor
    tokens: torch.Tensor
    version: int


class Decoded(NamedTuple):
    """The outputs of a replay, valid until the next one: its samples and tokens int64 [R]; where some rows report or are masked,
    the model's logits float32 [R, V]. Masked rows are not sampled yet: their `tokens` mean nothing."""

    samples: Samples
    tokens: torch.Tensor
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """Graphs of one model, captured when first needed, or by `prepare`."""

    def __init__(
        self, device: Device, model: DeviceModel, batch: DeviceBatch, choose: Choose, adjust: Adjust,
        wrap: Callable[..., Callable] | None = None,
    ) -> None:  # fmt: skip
        """`wrap`, a compiler, wraps the forward before it is captured."""
        self._device, self._model, self._batch, self._choose, self._adjust = device, model, batch, choose, adjust
        self._compute = wrap(self._forward) if wrap else self._forward
        self._captured: dict[tuple[int, int, Wants], Captured] = {}
        self._logits: torch.Tensor | None = None

    def prepare(self, rows: int, units: int, wants: Wants = PLAIN) -> None:
        """Capture a size now, unless its graph exists and the tables it reads have not moved."""
        key, version = (rows, units, wants), self._batch.parameters.version if wants.adjusted else 0
        if key in self._captured and self._captured[key].version != version:
            del self._captured[key]
        if key not in self._captured:
            self._captured[key] = self._capture(rows, units, wants, version)

    def run(self, step: HostStep, rows: int, staging: Staging, watch: Watch | None = None) -> Decoded:
        """Run a step of R decodes, padded to `rows`. `watch` receives the graph's inputs before the replay."""
        tiles = tiles_of(np.ones(len(step.begins), dtype=np.int64), self._model.query_group)
        splits = max(slot_count(tiles, step.contexts, window) for window in self._model.windows)
        units = unit_room(rows, splits + rows - len(step.begins))
        block = self.block_of(step, rows, units)
        sent = staging.send({"block": block.view(np.int64)} | step.changes | step.reported)
        self._batch.bring(sent)
        self.prepare(rows, units, step.wants)
        captured, count = self._captured[rows, units, step.wants], len(step.begins)
        captured.block.copy_(sent["block"].view(torch.uint8))
        if watch is not None:
            watch(*self._fed(self.layout(rows, units).tensors(captured.block), count))
        captured.graph.replay()
        fields, wants = self.layout(rows, units).tensors(captured.block), step.wants
        samples = Samples(fields["places"][:count], fields["begins"][:count] + 1, sent.get("reported"))
        logits = self._logits[:count] if wants.reported or wants.masked else None
        return Decoded(samples, captured.tokens[:count], logits)

    def layout(self, rows: int, units: int) -> Layout:
        """The layout of a block for these sizes."""
        fields = [(name, np.int64, rows) for name in ("begins", "places", "tokens")]
        fields += [(f"plan {group}", np.int32, word_count(rows, units)) for group in range(len(self._model.windows))]
        return Layout(fields)

    def block_of(self, step: HostStep | None, rows: int, units: int) -> np.ndarray:
        """The block (uint8) of a step, or of padding alone."""
        layout = self.layout(rows, units)
        block = np.zeros(layout.size_bytes, dtype=np.uint8)
        fields, count = layout.arrays(block), 0 if step is None else len(step.begins)
        fields["places"][:] = self._batch.null_row
        if step is not None:
            fields["begins"][:count], fields["places"][:count] = step.begins, step.places
            fields["tokens"][:count] = step.token_ids
            fields["tokens"][step.ahead] = TAKE_LAST
        tiles = tiles_of(np.ones(rows, dtype=np.int64), self._model.query_group)
        for group, window in enumerate(self._model.windows):
            table_rows = fields["places"] if len(self._model.windows) == 1 else np.arange(rows)
            write_plan(fields[f"plan {group}"], units, fields["begins"] + 1, table_rows, window, tiles)
        return block

    def _capture(self, rows: int, units: int, wants: Wants, version: int) -> Captured:
        """Run once eagerly, which loads every kernel, then record. Uses padding alone, so no row of the cache is touched."""
        layout = self.layout(rows, units)
        block = self._device.upload(torch.from_numpy(self.block_of(None, rows, units)))
        fields = layout.tensors(block)
        self.body(fields, rows, units, wants)
        graph = self._device.graph()
        graph.begin()
        _, tokens = self.body(fields, rows, units, wants)
        graph.end()
        return Captured(graph, block, tokens, version)

    def body(
        self, fields: dict[str, torch.Tensor], rows: int, units: int, wants: Wants = PLAIN
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole step over the fields of a block, as captured, but for the sampling of masked rows. Returns hidden states
        [rows, hidden] and tokens [rows]."""
        batch, places, positions = self._batch, fields["places"], fields["begins"] + 1
        hidden, logits = self._compute(self._inputs(self._token_ids(fields), fields, rows, units))
        if wants.reported or wants.masked:
            self._kept(logits).copy_(logits)
        if wants.masked:
            return hidden, places
        if wants.adjusted:
            self._adjust(logits, batch.parameters.tables, places, positions)
        tokens = self._choose(logits, batch.parameters.inputs(places, positions))
        batch.remember(wants, places, tokens)
        return hidden, tokens

    def _token_ids(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        last = self._batch.last.index_select(0, fields["places"])
        return torch.where(fields["tokens"] == TAKE_LAST, last, fields["tokens"])

    def _fed(self, fields: dict[str, torch.Tensor], count: int) -> tuple[ForwardBatch, Samples]:
        """The first `count` rows of a block in the types of an uncaptured step, made of the same parts as `body`."""
        rows, begins, groups = fields["places"][:count], fields["begins"][:count], len(self._model.windows)
        starts = torch.arange(count + 1, dtype=torch.int32, device=self._device.torch_device)
        places = [self._places(fields, group) for group in range(groups)]
        tables = [each.block_table[:count] for each in places] if groups > 1 else [self._batch.table.index_select(0, rows)]
        found = [GroupPlaces(each.slots[:count], table) for each, table in zip(places, tables, strict=True)]
        forward = ForwardBatch(
            self._token_ids(fields)[:count], begins, found[0].slots, starts, (begins + 1).int(), found[0].block_table,
            starts[:-1].long(), groups=tuple(found[1:]),
        )  # fmt: skip
        return forward, Samples(rows, begins + 1, None)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """The memory for logits [rows, V]. Allocated at first use, which is never inside a capture."""
        if self._logits is None:
            self._logits = logits.new_empty((self._batch.null_row, logits.shape[1]))
        return self._logits[: logits.shape[0]]

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of every row, [rows, hidden] and [rows, V]."""
        hidden = self._model.hidden(batch)
        return hidden, self._model.logits(hidden)

    def _inputs(self, token_ids: torch.Tensor, fields: dict[str, torch.Tensor], rows: int, units: int) -> ForwardBatch:
        """The step's tensors, built from a block's fields."""
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
        """With one group of layers, the batch's own table serves; the plan names its rows."""
        table, groups = self._batch.table, len(self._model.windows)
        slots = decode_slots(table, fields["places"], fields["begins"], self._model.block_size, group, groups)
        if groups == 1:
            return GroupPlaces(slots, table)
        return GroupPlaces(slots, table.index_select(0, fields["places"])[:, group::groups].contiguous())
