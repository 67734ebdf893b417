"""A step of the common decoder from token ids to sampled tokens in one call, where the CPU's kernels have the form for it.

Owns the question whether they have, and the angles of all positions so far. What it serves: the decoder of `decoder.py` whose
layers run as one call (`fused.py`), on one rank, with a head over the whole vocabulary. All else, and steps whose logits are
looked at, go through `forward` and `logits`, with the same bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from vnext.kernels.cpu import step as kernel
from vnext.kernels.cpu.operations import Packed
from vnext.kernels.cpu.stack import Angles
from vnext.models import decoder, fused
from vnext.models.batch import ForwardBatch
from vnext.models.config import ModelConfig
from vnext.models.kv_cache import KvCache
from vnext.models.rope import rotary_angles
from vnext.models.sharding import Parallel

LOGITS_MAX = 1 << 22
"""Of a step: its memory is kept, and with more of them nothing beside the kernels counts."""
POSITIONS_MIN = 1024


class WholeStep:
    """A model with its cache. Steps of the same batch object are described once: its tensors are read again each time."""

    def __init__(self, model: kernel.StepModel, frequencies: torch.Tensor, config: ModelConfig) -> None:
        self._model, self._frequencies, self._config = model, frequencies, config
        self._described = self._with_angles(POSITIONS_MIN)
        self._batch: ForwardBatch | None = None
        self._sampling: tuple[Any, ...] | None = None
        self._step: kernel.DescribedStep | None = None

    def takes(self, sample_count: int) -> bool:
        """Whether a step may sample so many tokens."""
        return sample_count * self._model.head.outputs <= LOGITS_MAX

    def run(self, batch: ForwardBatch, sampling: tuple[Any, ...]) -> np.ndarray:
        """The tokens sampled at batch.sample_at, int64 [S], to be read before the next call.

        `sampling` begins with temperature, top_k, top_p, min_p, seed and position, as `cpu.sampling.sample_rows` has them.
        """
        if batch is not self._batch or sampling is not self._sampling:
            self._step = kernel.describe_step(kernel.StepArrays(*batch[:7], *sampling[:6]))
            self._batch, self._sampling = batch, sampling
        while not kernel.run(self._described, self._step):
            self._described = self._with_angles(2 * (int(batch.positions.max()) + 1))
        return self._step.tokens

    def _with_angles(self, position_count: int) -> kernel.DescribedModel:
        angles = rotary_angles(torch.arange(position_count), self._frequencies, self._config.rope)
        return kernel.describe_model(self._model, Angles(*angles))


def whole_step(family: ModuleType, params: Any, kv: KvCache, config: ModelConfig, parallel: Parallel) -> WholeStep | None:
    """The one call for this model and cache; None where there is none."""
    if family.forward is not decoder.forward or family.logits is not decoder.logits or params.stack is None:
        return None
    if parallel.world_size > 1 or config.logits_softcap or not _has_plain_ends(params, config):
        return None
    caches = fused.caches_of(params.stack, params.norm, kv)
    if caches is None:
        return None
    _, kv_heads, block_size, head_dim = kv[0][0].shape
    model = kernel.StepModel(
        stack=params.stack,
        caches=caches,
        head_count=params.stack.joined // head_dim - 2 * kv_heads,
        kv_head_count=kv_heads,
        block_size=block_size,
        last_norm=params.norm,
        embedding=params.embedding.linear if isinstance(params.embedding, Packed) else params.embedding,
        head=params.head.linear,
        eps=config.rms_norm_eps,
        scale=head_dim**-0.5 if config.query_scale is None else config.query_scale,
        softcap=config.attention_softcap,
    )
    return WholeStep(model, params.frequencies, config)


def _has_plain_ends(params: Any, config: ModelConfig) -> bool:
    """Whether the kernels look up the embedding and multiply by the head as they are."""
    embedding, head, dtype = params.embedding, params.head, params.stack.dtype
    if not isinstance(head, Packed) or head.linear.gate or head.dtype is not dtype or head.shape[0] != config.vocab_size:
        return False
    if isinstance(embedding, torch.Tensor) and not embedding.is_contiguous():
        return False
    return isinstance(embedding, Packed | torch.Tensor) and embedding.dtype is dtype
