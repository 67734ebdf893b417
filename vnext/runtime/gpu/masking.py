"""Masks on a device: made by the host while the device computes the forward, and sent before the step is sampled.

Owns what links a step to the one before: a mask depends on the token before it, which the host learns while the next forward
runs. So a step with masks is launched in two parts, and between them this thread waits for the step before, never for its own.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vnext.runtime.batch.masks import ConstrainedRow, RowMasks
from vnext.runtime.gpu.device import Device
from vnext.runtime.gpu.staging import Staging
from vnext.runtime.gpu.unread import StepSamples, Unread
from vnext.sampling.inputs import Allowed
from vnext.sampling.logits import Keep


class Masked(NamedTuple):
    """What a step's masks were: its constrained samples, the masks on the host, (index among the samples, why) of those that
    cannot be followed."""

    rows: list[ConstrainedRow]
    allowed: Allowed | None
    failed: list[tuple[int, str]]


NOT_MASKED = Masked([], None, [])


class Masking:
    """The masks of one rank's steps. One thread."""

    def __init__(self, device: Device, masks: RowMasks, unread: Unread, keep: Keep, buffer_count: int) -> None:
        """`buffer_count`: as Staging's."""
        self._masks, self._unread, self._keep = masks, unread, keep
        self._staging = Staging(device, buffer_count)
        self._masked = NOT_MASKED

    def apply(self, logits: torch.Tensor, places: np.ndarray) -> None:
        """Mask the logits float32 [S, V] of a step's samples at batch rows `places` int64 [S], in place. Waits for the tokens of
        earlier steps, and for the masks."""
        self._unread.read()
        rows = self._masks.of(places)
        allowed = self._masks.allowed(rows)
        masks = allowed.masks_of_rows()
        sent = self._staging.send({"rows": allowed.rows, "masks": masks.reshape(-1)})
        here = torch.arange(len(rows), device=logits.device)
        self._keep(logits, Allowed(sent["rows"], here, sent["masks"].view(masks.shape)))
        self._staging.release()
        kept = Allowed(allowed.rows, np.arange(len(rows)), masks)
        self._masked = Masked(rows, kept, self._masks.failed(rows))

    def take(self) -> Masked:
        """The masks that were applied since the last call."""
        masked, self._masked = self._masked, NOT_MASKED
        return masked

    def expect(self, rows: list[ConstrainedRow], samples: StepSamples) -> None:
        """A step with constrained rows has been launched: they take their tokens when these are read."""
        self._unread.add(samples, partial(self._take, rows, samples))

    def _take(self, rows: list[ConstrainedRow], samples: StepSamples) -> None:
        kept = set(samples.kept.samples.tolist())
        self._masks.take([row for row in rows if row.at in kept], samples.tokens)
