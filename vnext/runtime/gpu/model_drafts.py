"""Drafts of a model on a device: the draft model's steps, which the device computes as it does the model's own.

The draft model has the device batch's rows, tables and parameters, and a cache of its own under the same page numbers. Its steps
change neither a row's last token nor its counts. Each draft is read before the next one is computed, because the host sends it;
it is computed with the drafts before it, as query rows of one step, so that penalties count them. See `draft_batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vnext.models.layers.batch import PreparedAttention
from vnext.models.layers.layers import describe_attention
from vnext.runtime.batch.draft_batch import DraftBatch, DraftedRow, Run
from vnext.runtime.gpu.buckets import choose_variant
from vnext.runtime.gpu.decode_graphs import DecodeGraphs
from vnext.runtime.gpu.device import Device
from vnext.runtime.gpu.device_batch import DeviceBatch, HostSamples, HostStep
from vnext.runtime.gpu.model import DeviceModel
from vnext.runtime.gpu.piecewise_graphs import PiecewiseGraphs
from vnext.runtime.gpu.staging import Staging
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.state.config import SchedulerConfig
from vnext.state.drafting import most_drafts
from vnext.state.state import blocks_for
from vnext.state.store import extents

BUFFERS = 2
"""Of a step and of the next one: each is read before the one after it is sent."""


class ModelDrafts(DraftBatch):
    """Drafts for the rows of one batch, by the contract of DraftBatch. `table` is the host's copy of the batch's."""

    def __init__(
        self, device: Device, model: DeviceModel, variants: DeviceVariants, batch: DeviceBatch, table: np.ndarray,
        config: SchedulerConfig,
    ) -> None:  # fmt: skip
        super().__init__(table, config)
        self._device, self._on_device, self._variants, self._batch = device, model, variants, batch
        self._staging = Staging(device, BUFFERS)
        self._decodes = DecodeGraphs(
            device, model, batch, variants.choose, variants.adjust, variants.wrap, max(variants.shapes.rows, default=0)
        )
        samples_max = config.max_num_seqs * (1 + most_drafts(config))
        self._pieces = PiecewiseGraphs(device, model, samples_max, variants.operations.paged_attention)

    def _next_run(self, row: DraftedRow, drafts: np.ndarray) -> Run:
        return Run(row.place, np.concatenate((row.tokens[-1:], drafts)), len(row.tokens) + len(drafts))

    def _draw(self, runs: Sequence[Run], drafts: list[np.ndarray] | None) -> np.ndarray:
        step = self._host_step(runs, everywhere=drafts is not None or all(len(run.tokens) == 1 for run in runs))
        sampled = self._run_step(step)
        assert sampled is not None, "each run is sampled behind"
        (tokens,), mark = self._device.fetch([sampled])
        self._staging.release()
        self._note(runs)
        mark.wait()
        drawn: np.ndarray = tokens.numpy()[step.samples.at.searchsorted(step.query_starts[1:] - 1)]
        return drawn

    def _compute(self, runs: Sequence[Run]) -> None:
        if runs:
            self._run_step(self._host_step(runs, everywhere=None))
            self._staging.release()
            self._note(runs)

    def _host_step(self, runs: Sequence[Run], everywhere: bool | None) -> HostStep:
        """The step that computes the runs, and samples behind every token (`everywhere`), behind each run, or nowhere (None)."""
        counts = np.array([len(run.tokens) for run in runs], dtype=np.int64)
        places, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("place", "end"))
        starts = np.append(0, np.cumsum(counts))
        inside = extents.spans(np.zeros_like(counts), counts)
        at = {True: np.arange(starts[-1]), False: starts[1:] - 1, None: starts[:0]}[everywhere]
        rows, positions = places.repeat(counts)[at], extents.spans(ends - counts, counts)[at] + 1
        depths = inside[at] if everywhere else np.zeros_like(at)
        takers = np.full_like(at, self._batch.null_row)
        return HostStep(
            step=-1, begins=ends - counts, places=places, query_starts=starts.astype(np.int32), contexts=ends.astype(np.int32),
            token_ids=np.concatenate([run.tokens for run in runs]).astype(np.int64), ahead=at[:0],
            samples=HostSamples(rows, rows, positions, at, depths, takers), changes=self._batch.take_changes(),
            width=blocks_for(int(ends.max()), self._config.block_size), wants=self._batch.wants(rows, positions),
            asked=np.full_like(at, -1),
        )  # fmt: skip

    def _run_step(self, step: HostStep) -> torch.Tensor | None:
        """The samples (int64 [S]); None if there are none."""
        model, variants = self._on_device, self._variants
        variant, size = choose_variant(len(step.token_ids), step.is_decode, False, variants.shapes)
        if variant == "graph":
            return self._decodes.run(step, size, self._staging).tokens
        batch, samples = self._batch.forward(step, self._staging)
        metadata = describe_attention(model.kv, batch, variants.operations, model.windows, runs=model.config.form.sees_runs)
        if variant == "pieces":
            hidden = self._pieces.run(batch, metadata, size)
        else:
            hidden = model.hidden(batch._replace(attention=PreparedAttention(metadata, variants.operations.paged_attention)))
        if not len(step.samples.at):
            return None
        logits, parameters = model.logits(hidden), self._batch.parameters
        if step.wants.adjusted:
            variants.adjust(logits, parameters.tables, samples.rows, samples.positions, samples.drafts)
        return variants.choose(logits, parameters.inputs(samples.rows, samples.positions))
