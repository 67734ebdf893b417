"""Drafts of a head on a device: the head's steps behind the steps of the model, whose states it reads there.

Each step of the model writes its tokens' states. The head's steps draft one token after another, and the device keeps the drafts:
the head's next step takes them from there, and so does the step that verifies them. So the host sends all steps without waiting; it
reads the drafts with the samples that verify them. Until then a number stands for a draft, below zero: where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.runtime.batch.draft_batch import SECOND, DraftBatch, DraftedRow, Run
from vnext.runtime.gpu.device import Device
from vnext.runtime.gpu.device_batch import DeviceBatch, decode_slots
from vnext.runtime.gpu.model import DeviceHead
from vnext.runtime.gpu.staging import Staging
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.gpu.unread import MADE, with_made
from vnext.sampling.inputs import BehindDrafts
from vnext.state.config import SchedulerConfig
from vnext.state.drafting import most_drafts
from vnext.state.state import blocks_for
from vnext.state.store import extents


class DeviceHeadDrafts(DraftBatch):
    """Drafts for the rows of one batch, by the contract of DraftBatch. `table` is the host's copy of the batch's. `made` int64
    [most drafts * rows]: the newest drafts."""

    FIRST = SECOND
    made: torch.Tensor

    def __init__(
        self, device: Device, head: DeviceHead, variants: DeviceVariants, batch: DeviceBatch, table: np.ndarray,
        config: SchedulerConfig,
    ) -> None:
        super().__init__(table, config)
        self._on_device, self._variants, self._batch = head, variants, batch
        self._row_count = config.max_num_seqs + 1
        most = most_drafts(config)
        self.made = torch.zeros(most * self._row_count, dtype=torch.int64, device=device.torch_device)
        self._staging = Staging(device, 1 + most)  # the steps of one step of the model, before which all others are read
        self._counted: list[torch.Tensor] = []

    def drafts(self, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        """As DraftBatch.drafts, but for the numbers that stand for tokens. Penalties count drafts only here."""
        self._counted.clear()  # of a step that lacked memory, whose rows were taken anew
        found = super().drafts(rows)
        for entries in self._counted:
            self._batch.parameters.uncount(entries)
        self._counted.clear()
        return found

    def _draw(self, runs: Sequence[Run], drafts: list[np.ndarray] | None) -> np.ndarray:
        depth = len(drafts[0]) if drafts else 0
        self._step(runs, depth)
        if depth == 0:
            self._note(runs)
        return MADE - depth * self._row_count - np.array([run.place for run in runs], dtype=np.int64)

    def _compute(self, runs: Sequence[Run]) -> None:
        if runs:
            self._step(runs, None)
            self._note(runs)

    def _step(self, runs: Sequence[Run], depth: int | None) -> None:
        """Compute the runs, and make the draft behind each that follows `depth` drafts; none for None."""
        arrays, ends = self._arrays(runs, depth), np.array([run.end for run in runs], dtype=np.int64)
        wants = self._batch.wants(arrays["sampled"], ends[: len(arrays["sampled"])])
        sent = self._staging.send(arrays | self._batch.take_changes())
        self._batch.bring(sent)
        host = HostBatch(np.arange(len(ends) + 1, dtype=np.int32), (ends - 1).astype(np.int32))
        rows, before = self._rows(sent, blocks_for(int(ends.max()), self._config.block_size))
        logits = self._on_device.logits(rows._replace(host=host), before)
        if logits is not None:
            parameters, places, positions = self._batch.parameters, sent["sampled"], sent["ends"]
            if wants.adjusted:
                self._variants.adjust(logits, parameters.tables, places, positions, BehindDrafts())
            tokens = self._variants.choose(logits, parameters.inputs(places, positions))
            self.made.index_copy_(0, sent["made_at"], tokens)
            if wants.adjusted:
                self._counted.append(parameters.count(places, tokens))
        self._staging.release()

    def _arrays(self, runs: Sequence[Run], depth: int | None) -> dict[str, np.ndarray]:
        """What a step sends, int64: of each token [T] its id, position and batch row; of each sample [S] its token's index, batch
        row, position, and where the draft goes."""
        counts = np.array([len(run.tokens) for run in runs], dtype=np.int64)
        places, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("place", "end"))
        last = slice(None) if depth is not None else slice(0)
        return {
            "token_ids": np.concatenate([run.tokens for run in runs]).astype(np.int64),
            "positions": extents.spans(ends - counts, counts), "places": places.repeat(counts),
            "sample_at": (np.cumsum(counts) - 1)[last], "sampled": places[last], "ends": ends[last],
            "made_at": ((depth or 0) * self._row_count + places)[last],
        }  # fmt: skip

    def _rows(self, sent: dict[str, torch.Tensor], width: int) -> tuple[ForwardBatch, torch.Tensor]:
        """The head's batch, without the host's copies, whose table covers `width` blocks; and the slots of the states that its
        tokens read (int64 [T]). As in HeadBatch, of tokens from the second of a text on."""
        table, size, positions, places = self._batch.table, self._config.block_size, sent["positions"], sent["places"]
        slots, before = (decode_slots(table, places, each, size, 0, 1) for each in (positions, positions - 1))
        offsets = torch.arange(size, dtype=torch.int32, device=table.device)
        pages = table.index_select(0, sent["sampled"])[:, :width, None] * size + offsets
        contexts = (sent["ends"] - 1).int()
        starts = torch.arange(contexts.shape[0] + 1, dtype=torch.int32, device=table.device)
        ids = with_made(sent["token_ids"], self.made)
        arrays = (ids, positions - 1, slots, starts, contexts, pages.flatten(1)[:, 1:].contiguous(), sent["sample_at"])
        return ForwardBatch(*arrays), before
