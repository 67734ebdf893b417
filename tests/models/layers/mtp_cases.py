"""What the tests of draft layers share: the batch in which such a layer drafts behind each token of one request."""

from __future__ import annotations

import numpy as np
import torch

from vnext.models.layers.batch import ForwardBatch, HostBatch


def one_row(tokens: torch.Tensor) -> ForwardBatch:
    """All of one request's tokens, int64 [T], in blocks of one, each with a sample behind it."""
    count, places = len(tokens), torch.arange(len(tokens))
    starts, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
    return ForwardBatch(
        tokens, places, places, torch.from_numpy(starts), torch.from_numpy(lengths), places.int()[None], places,
        HostBatch(starts, lengths),
    )  # fmt: skip
