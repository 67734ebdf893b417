"""A draft head of a rank: one layer that reads the target's hidden states, whole on every rank.

Owns the head's keys and values and the states that it reads, all under the target's page numbers. A step of the target writes
the states of its tokens, as it writes keys and values: what holds for these, after a hit in the prefix cache or a preemption,
holds for the states. Behind the tokens that the target has computed, the head writes states of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.arrays import as_tensor, torch_dtype
from vnext.kernels.cpu.memory import huge
from vnext.kernels.cpu.stack import AuxStates
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.models.layers.head_layer import HeadBatch
from vnext.models.layers.kv_cache import KvCache, kv_bytes_per_page, make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.runtime.batch.tensors import tensors_of_batch, tensors_of_sampling
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.sampling import sample

TIMED_STEPS = 9
NOTHING = np.empty(0, dtype=np.int64)


class Functions(NamedTuple):
    """What a head computes. `embed`: token ids [T] -> [T, hidden]. `combine`: the target's states [T, n, width] -> [T, hidden].
    `forward`: (normed hidden states, states for the next), [S, hidden] each. `logits`: hidden states -> float32 [S, V]."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    combine: Callable[[torch.Tensor], torch.Tensor]
    forward: Callable[[KvCache, HeadBatch], tuple[torch.Tensor, torch.Tensor]]
    logits: Callable[[torch.Tensor], torch.Tensor]


class DraftHead:
    """A head with its cache. Call `make_cache` before the first `run`."""

    def __init__(self, functions: Functions, config: ModelConfig, layers: Sequence[int], target: ModelRunner) -> None:
        """`config`: of one layer. `layers`: of the target, as in AuxStates."""
        self._do, self.config, self._target = functions, config, target
        self._dtype, self._device = torch_dtype(target.dtype), target.device
        self._layers, self._layers_array = tuple(layers), np.array(layers, dtype=np.int64)
        self._roomy: tuple[ForwardBatch, ForwardBatch] | None = None

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one page: keys and values of one layer, and states."""
        states = block_size * self.config.hidden_size * self._dtype.itemsize
        return kv_bytes_per_page(self.config, block_size, self._dtype, alone()) + states

    @property
    def query_group(self) -> int:
        """Query heads that share a key-value head."""
        return self.config.head_count // self.config.kv_head_count

    @property
    def kv_head_count(self) -> int:
        return self.config.kv_head_count

    def make_cache(self, page_count: int, block_size: int) -> None:
        """Allocate keys, values and states. Raises MemoryError (RuntimeError on CUDA)."""
        dtype, width, slots = self._dtype, self.config.hidden_size, page_count * block_size
        self._kv = make_kv_cache(self.config, slots, 1, dtype, self._device, alone())
        if self._device == "cpu":
            self._states = as_tensor(huge(slots * width * dtype.itemsize)).view(dtype).view(slots, width)
        else:
            self._states = torch.zeros((slots, width), dtype=dtype, device=self._device)

    def with_room(self, batch: ForwardBatch) -> ForwardBatch:
        """The target's batch with room for the states; the same one for the same batch."""
        if self._roomy is None or self._roomy[0] is not batch:
            self._roomy = batch, batch._replace(aux=self.room(len(batch.token_ids))._replace(layers=self._layers_array))
        return self._roomy[1]

    def room(self, token_count: int) -> AuxStates:
        """Room for the states of so many tokens."""
        sizes = (token_count, len(self._layers), self._target.config.hidden_size)
        return AuxStates(self._layers, torch.empty(sizes, dtype=self._dtype, device=self._device))

    @torch.inference_mode()
    def keep(self, batch: ForwardBatch) -> None:
        """Write the states of a batch that the target has computed."""
        assert batch.aux is not None
        self.write(as_tensor(batch.slots), batch.aux)

    def write(self, slots: torch.Tensor, aux: AuxStates) -> None:
        """Write the states of tokens whose slots are int64 [T]."""
        self._states.index_copy_(0, slots, self._do.combine(aux.states))

    @torch.inference_mode()
    def run(self, rows: ForwardBatch, before: np.ndarray, sampling: SamplingInputs | None) -> np.ndarray:
        """Compute tokens, of which those `before` (slots, int64 [T]) have states; sample what follows those at sample_at
        (int64 [S]), whose own states become the head's. Rows as in HeadBatch."""
        logits = self.logits(tensors_of_batch(rows), as_tensor(before))
        if sampling is None or logits is None:
            return NOTHING
        drawn: np.ndarray = sample(logits, tensors_of_sampling(sampling)).tokens.numpy()
        return drawn

    def logits(self, rows: ForwardBatch, before: torch.Tensor) -> torch.Tensor | None:
        """As `run`, of tensors: float32 [S, V], None where nothing is sampled. Waits for no device."""
        batch = HeadBatch(rows, self._do.embed(rows.token_ids), self._states.index_select(0, before))
        hidden, states = self._do.forward(self._kv, batch)
        if not len(rows.sample_at):
            return None
        self._states.index_copy_(0, rows.slots.index_select(0, rows.sample_at), states)
        return self._do.logits(hidden)

    @torch.inference_mode()
    def step_seconds(self) -> float:
        """The shortest time of a greedy draft."""
        one, zero = (torch.full((1,), number, device=self._device) for number in (1, 0))
        host = HostBatch(np.array([0, 1], dtype=np.int32), np.array([1], dtype=np.int32))
        starts = torch.cat((zero, one)).int()
        rows = ForwardBatch(one, one, one, starts, one.int(), one.int()[None], zero, host)
        seconds = []
        for _ in range(TIMED_STEPS):
            began_s = time.perf_counter()
            found = self.logits(rows, zero)
            assert found is not None
            int(found.argmax())
            seconds.append(time.perf_counter() - began_s)
        return min(seconds)
