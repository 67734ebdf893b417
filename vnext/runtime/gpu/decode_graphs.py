"""Whole steps of decodes as graphs: from the host's one block to sampled tokens in a single launch.

Owns a graph and its static memory for each triple of row count, room for splits, and sampling options. Rows are query rows: a
request's last token is one, and so is each draft behind it, at the next position with the same blocks. A graph does not know
which rows belong together; in the plan of attention, they share tiles. A replay copies the
block into static memory and launches once: the graph holds indices, forward, logits and sampling, and the write to `last`,
from which the next step takes its tokens. Where rows have adapters, the block says which, and any graph with adapters serves all
of them. Where rows are masked, it ends with the logits. Between replays only the batch's own
tables change besides the block, so nothing but the whole block can be stale. Where rows report log-probabilities, all graphs
leave the model's logits in one shared memory: one copy per size would fill gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.cuda.decode_plan import DecodeAttention, slot_count, tiles_of, word_count, write_plan
from vnext.kernels.cuda.plan import Tiles
from vnext.kernels.thin_tiles import ThinTiles
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, PreparedAttention
from vnext.runtime.gpu.buckets import unit_room
from vnext.runtime.gpu.device import Device, Graph, recording
from vnext.runtime.gpu.device_batch import DeviceBatch, HostStep, Samples, decode_slots
from vnext.runtime.gpu.model import DeviceModel
from vnext.runtime.gpu.sampling_updates import PLAIN, Wants
from vnext.runtime.gpu.staging import Layout, Staging
from vnext.runtime.gpu.unread import with_made
from vnext.sampling.inputs import BehindDrafts
from vnext.sampling.sampling import Adjust, Choose

Watch = Callable[[ForwardBatch, Samples], None]
"""Receives the tensors and the samples of a step right before the step runs."""
Forward = Callable[[ForwardBatch], tuple[torch.Tensor, torch.Tensor]]
Wrap = Callable[[Forward], Forward]
"""A compiler of what is captured."""
TAKE_LAST = -1
"""Stands for the row's last token in place of a token id."""


class Captured(NamedTuple):
    """A graph and its outputs, tokens int64 [B] and which rows hold a NaN, bool [B]. The graph reads `block` (uint8). `version` is
    that of the tables whose addresses the graph holds."""

    graph: Graph
    block: torch.Tensor
    tokens: torch.Tensor
    spoilt: torch.Tensor
    version: int


class Decoded(NamedTuple):
    """The outputs of a replay, valid until the next one: its samples, tokens int64 [R], and which rows hold a NaN, bool [R]; where
    some rows report or are masked, the model's logits float32 [R, V]. Masked rows are not sampled yet: their `tokens` and `spoilt`
    mean nothing."""

    samples: Samples
    tokens: torch.Tensor
    spoilt: torch.Tensor
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """Graphs of one model, captured when first needed, or by `prepare`."""

    def __init__(
        self, device: Device, model: DeviceModel, batch: DeviceBatch, choose: Choose, adjust: Adjust,
        wrap: Wrap | None = None, row_max: int = 0,
    ) -> None:  # fmt: skip
        """`wrap` wraps the forward before it is captured. `row_max`: the most rows of a graph."""
        self._device, self._model, self._batch, self._choose, self._adjust = device, model, batch, choose, adjust
        self._compute = wrap(self._forward) if wrap else self._forward
        self._row_max, self._has_drafts = row_max, batch.has_drafts
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
        """Run a step of R query rows, padded to `rows`. `watch` receives the graph's inputs before the replay."""
        tiles, contexts = self._tiles(step, len(step.token_ids)), step.samples.positions
        splits = max(slot_count(tiles, contexts, window) for window in self._model.windows)
        units = unit_room(rows, splits + rows - len(contexts))
        block = self.block_of(step, rows, units)
        sent = staging.send({"block": block.view(np.int64)} | step.changes | step.reported)
        self._batch.bring(sent)
        self.prepare(rows, units, step.wants)
        captured, count = self._captured[rows, units, step.wants], len(step.token_ids)
        captured.block.copy_(sent["block"].view(torch.uint8))
        fields, wants = self.layout(rows, units, step.wants.adapted).tensors(captured.block), step.wants
        if watch is not None:
            watch(*self._fed(fields, step))
        captured.graph.replay()
        samples = self._samples(fields, count)._replace(reported=sent.get("reported"))
        logits = self._logits[:count] if self._logits is not None and (wants.reported or wants.masked) else None
        return Decoded(samples, captured.tokens[:count], captured.spoilt[:count], logits)

    def layout(self, rows: int, units: int, adapted: bool = False) -> Layout:
        """The layout of a block for these sizes; `adapted`: with room for the tiles of adapters."""
        names = ("begins", "places", "tokens", *(("depths", "takers") if self._has_drafts else ()))
        fields: list[tuple[str, type[np.generic], int]] = [(name, np.int64, rows) for name in names]
        fields += [(f"plan {group}", np.int32, word_count(rows, units)) for group in range(len(self._model.windows))]
        if adapted:
            fields += [("tile_tokens", np.int32, rows), ("tiles", np.int32, 3 * self._model.tile_room(rows))]
        return Layout(fields)

    def block_of(self, step: HostStep | None, rows: int, units: int, adapted: bool = False) -> np.ndarray:
        """The block (uint8) of a step, or of padding alone. Tiles that are not used have no tokens."""
        layout = self.layout(rows, units, adapted or (step is not None and step.wants.adapted))
        block = np.zeros(layout.size_bytes, dtype=np.uint8)
        fields, count = layout.arrays(block), 0 if step is None else len(step.token_ids)
        fields["places"][:] = self._batch.null_row
        if self._has_drafts:
            fields["takers"][:] = self._batch.null_row
        if step is not None:
            fields["begins"][:count], fields["places"][:count] = step.samples.positions - 1, step.samples.rows
            fields["tokens"][:count] = step.token_ids
            fields["tokens"][step.query_starts[:-1][step.ahead]] = TAKE_LAST
            if self._has_drafts:
                fields["depths"][:count], fields["takers"][:count] = step.samples.depths, step.samples.takers
            for name, array in step.adapted.items():
                fields[name][: len(array)] = array
        tiles = self._tiles(step, rows)
        for group, window in enumerate(self._model.windows):
            table_rows = fields["places"] if len(self._model.windows) == 1 else np.arange(rows)
            write_plan(fields[f"plan {group}"], units, fields["begins"] + 1, table_rows, window, tiles)
        return block

    def _tiles(self, step: HostStep | None, rows: int) -> Tiles:
        """The tiles of a step's query rows and of padding, `rows` in all: one for each row of padding."""
        runs = np.empty(0, dtype=np.int64) if step is None else np.diff(step.query_starts).astype(np.int64)
        padding = np.ones(rows - int(runs.sum()), dtype=np.int64)
        return tiles_of(np.append(runs, padding), self._model.query_group)

    def _samples(self, fields: dict[str, torch.Tensor], count: int) -> Samples:
        """The samples of the first `count` rows of a block."""
        places, positions = fields["places"][:count], fields["begins"][:count] + 1
        if not self._has_drafts:
            return Samples(places, positions, None, places)
        drafts = BehindDrafts(self._token_ids(fields)[:count], fields["depths"][:count])
        return Samples(places, positions, None, fields["takers"][:count], drafts)

    def _capture(self, rows: int, units: int, wants: Wants, version: int) -> Captured:
        """Run once eagerly, which loads every kernel, then record. Uses padding alone, so no row of the cache is touched."""
        layout = self.layout(rows, units, wants.adapted)
        block = self._device.upload(torch.from_numpy(self.block_of(None, rows, units, wants.adapted)))
        fields = layout.tensors(block)
        self.body(fields, rows, units, wants)
        graph = self._device.graph()
        with recording(graph):
            _, tokens, spoilt = self.body(fields, rows, units, wants)
        return Captured(graph, block, tokens, spoilt, version)

    def body(
        self, fields: dict[str, torch.Tensor], rows: int, units: int, wants: Wants = PLAIN
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The whole step over the fields of a block, as captured, but for the sampling of masked rows. Returns hidden states
        [rows, hidden], tokens [rows] and which rows hold a NaN [rows]."""
        batch, samples = self._batch, self._samples(fields, rows)
        spoilt = torch.empty(rows, dtype=torch.bool, device=self._device.torch_device)
        hidden, logits = self._compute(self._inputs(self._token_ids(fields), fields, rows, units))
        if wants.reported or wants.masked:
            self._kept(logits).copy_(logits)
        if wants.masked:
            return hidden, samples.rows, spoilt
        if wants.adjusted:
            self._adjust(logits, batch.parameters.tables, samples.rows, samples.positions, samples.drafts)
        tokens = self._choose(logits, batch.parameters.inputs(samples.rows, samples.positions), spoilt=spoilt)
        batch.remember(wants, samples.takers, tokens)
        return hidden, tokens, spoilt

    def _token_ids(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        last = self._batch.last.index_select(0, fields["places"])
        token_ids = torch.where(fields["tokens"] == TAKE_LAST, last, fields["tokens"])
        return token_ids if self._batch.made is None else with_made(token_ids, self._batch.made)

    def _fed(self, fields: dict[str, torch.Tensor], step: HostStep) -> tuple[ForwardBatch, Samples]:
        """The rows of a step in the types of an uncaptured one, made of the same parts as `body`; those of a request become one."""
        count, groups = len(step.token_ids), len(self._model.windows)
        begins, starts = fields["begins"][:count], self._device.upload(torch.from_numpy(step.query_starts))
        firsts, lasts = starts[:-1].long(), starts[1:].long() - 1
        places = [self._places(fields, group) for group in range(groups)]
        if groups > 1:
            tables = [each.block_table.index_select(0, firsts) for each in places]
        else:
            tables = [self._batch.table.index_select(0, fields["places"].index_select(0, firsts))]
        found = [GroupPlaces(each.slots[:count], table) for each, table in zip(places, tables, strict=True)]
        forward = ForwardBatch(
            self._token_ids(fields)[:count], begins, found[0].slots, starts, (begins.index_select(0, lasts) + 1).int(),
            found[0].block_table, torch.arange(count, device=self._device.torch_device), groups=tuple(found[1:]),
            tiles=tiles_in(fields),
        )  # fmt: skip
        return forward, self._samples(fields, count)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """The memory for logits [rows, V]. Allocated at first use, which is never inside a capture."""
        if self._logits is None:
            self._logits = logits.new_empty((self._row_max, logits.shape[1]))
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
            groups=tuple(places[1:]), attention=PreparedAttention(attention), tiles=tiles_in(fields),
        )  # fmt: skip

    def _places(self, fields: dict[str, torch.Tensor], group: int) -> GroupPlaces:
        """With one group of layers, the batch's own table serves; the plan names its rows."""
        table, groups = self._batch.table, len(self._model.windows)
        slots = decode_slots(table, fields["places"], fields["begins"], self._model.block_size, group, groups)
        if groups == 1:
            return GroupPlaces(slots, table)
        return GroupPlaces(slots, table.index_select(0, fields["places"])[:, group::groups].contiguous())


def tiles_in(fields: dict[str, torch.Tensor]) -> ThinTiles | None:
    """The tiles of adapters among the fields of a block."""
    return ThinTiles(fields["tile_tokens"], fields["tiles"].view(-1, 3)) if "tiles" in fields else None
