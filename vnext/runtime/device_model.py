"""A rank's model as the forms of a step see it: parameters, cache and the two functions of its family, over tensors alone.

Owns nothing; says what a captured step must know of sizes. See `graph_decode.py`, `graph_pieces.py`, `device_steps.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vnext.kernels.cuda import experts
from vnext.models.batch import ForwardBatch
from vnext.models.config import ModelConfig
from vnext.models.kv_cache import KvCache, kv_groups
from vnext.models.sharding import Parallel


class DeviceModel(NamedTuple):
    """One rank's model with its cache, whose last page is nobody's."""

    family: Any
    params: Any
    kv: KvCache
    config: ModelConfig
    parallel: Parallel

    @property
    def windows(self) -> tuple[int, ...]:
        """What each group of layers sees, 0 for all."""
        return kv_groups(self.config).windows

    @property
    def block_size(self) -> int:
        return self.kv[0][0].shape[2]

    @property
    def kv_head_count(self) -> int:
        """Of this rank."""
        return self.kv[0][0].shape[1]

    @property
    def null_slot(self) -> int:
        """The first slot of the page that is nobody's."""
        return (self.kv[0][0].shape[0] - 1) * self.block_size

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Normed hidden states [S, hidden] of a step; the cache takes its keys and values."""
        return self.family.forward(self.params, self.kv, batch, self.config, self.parallel)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, vocab_size], whole on every rank."""
        return self.family.logits(self.params, hidden, self.config, self.parallel)


def why_not_captured(config: ModelConfig, parallel: Parallel, dtype: torch.dtype, is_fixed: bool) -> str:
    """Why steps of this model are never captured; "" where they may be. `is_fixed`: products have one shape."""
    if config.experts is not None:
        wide = config.experts.intermediate_size // parallel.world_size
        if is_fixed or not experts.serves(dtype, config.hidden_size, wide):
            return "the experts' products are cut by the host, which waits for their sizes"
    if parallel.world_size > 1 and not parallel.can_capture:
        return "the ranks' sums go through the host"
    return ""
