"""A rank's model as a step's implementations see it: parameters, cache and the two functions of its family, on tensors only.

Owns nothing. Gives the sizes that a captured step needs. See `decode_graphs.py`, `piecewise_graphs.py`, `steps.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from vnext.kernels.cpu.stack import AuxStates
from vnext.kernels.cuda import attention, experts
from vnext.kernels.thin_tiles import tile_room
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache, kv_groups
from vnext.models.layers.sharding import Parallel, local_heads
from vnext.models.registry import Family
from vnext.runtime.batch.prompt_results import Tail
from vnext.runtime.gpu.adapter_regions import AdapterRegions


class DeviceHead(Protocol):
    """A draft head with its cache, which has the target's pages (runtime/rank/draft_head.py)."""

    @property
    def query_group(self) -> int: ...

    @property
    def kv_head_count(self) -> int: ...

    def room(self, token_count: int) -> AuxStates: ...

    def write(self, slots: torch.Tensor, aux: AuxStates) -> None: ...

    def logits(self, rows: ForwardBatch, before: torch.Tensor) -> torch.Tensor | None: ...


class DeviceModel(NamedTuple):
    """One rank's model with its cache, whose last page is the null page: no request holds it. `adapters`: where adapters are, and
    how ranks sum in steps with them, whose products are not made in parts: a part would not see its tokens. `head`: what drafts
    by the states of its layers. `tail`: what a text's vector goes through."""

    family: Family
    params: Any
    kv: KvCache
    config: ModelConfig
    parallel: Parallel
    adapters: AdapterRegions | None = None
    adapted_parallel: Parallel | None = None
    head: DeviceHead | None = None
    tail: Tail | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """The attention window of each group of layers, 0 for unlimited."""
        return kv_groups(self.config).windows

    @property
    def block_size(self) -> int:
        return int(self.kv[0][0].shape[2])

    @property
    def kv_head_count(self) -> int:
        """Key-value heads of this rank."""
        return int(self.kv[0][0].shape[1])

    @property
    def query_group(self) -> int:
        """Query heads that share a key-value head on this rank."""
        return local_heads(self.config, self.parallel.world_size) // self.kv_head_count

    @property
    def null_slot(self) -> int:
        """The first slot of the null page."""
        return (int(self.kv[0][0].shape[0]) - 1) * self.block_size

    def tile_room(self, token_max: int) -> int:
        """The most tiles of adapters that a step of `token_max` tokens has."""
        return tile_room(token_max, self.adapters.memory.shape[0] if self.adapters else 0)

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Normed hidden states [S, hidden] of a step; writes its keys and values to the cache, and what a head reads of it."""
        parallel = self.parallel
        if self.adapters is not None and batch.tiles is not None:
            assert self.adapted_parallel is not None
            batch, parallel = batch._replace(adapted=self.adapters.adapted(batch.tiles)), self.adapted_parallel
        found: torch.Tensor
        if self.head is None:
            found, _ = self.family.forward(self.params, self.kv, batch, self.config, parallel)
            return found
        aux = self.head.room(batch.token_ids.shape[0])
        found, _ = self.family.forward(self.params, self.kv, batch._replace(aux=aux), self.config, parallel)
        self.head.write(batch.slots, aux)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, vocab_size], whole on every rank."""
        found: torch.Tensor = self.family.logits(self.params, hidden, self.config, self.parallel)
        return found


def why_not_captured(config: ModelConfig, parallel: Parallel, dtype: torch.dtype, is_fixed: bool) -> str:
    """Why steps of this model are never captured; "" where they may be. `is_fixed`: products have one shape."""
    if config.experts is not None:
        wide = config.experts.intermediate_size // parallel.world_size
        if is_fixed or not experts.serves(dtype, config.experts.input_size or config.hidden_size, wide):
            return "the experts' products are cut by the host, which waits for their sizes"
    if config.form.sees_runs and config.windows:
        return "rows are cut where the runs of its attention end, by the host"
    if torch.cuda.is_available() and not attention.serves(*heads_like(dtype, config.head_dim)):
        return "the GPU's kernel does not serve heads of this size and type, and the reference's attention waits for the device"
    if parallel.world_size > 1 and not parallel.can_capture:
        return "the ranks' sums go through the host"
    return ""


def heads_like(dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and a cache of no tokens on the GPU."""
    query, cache = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((0, 1, head_dim), (0, 1, 1, head_dim)))
    return query, cache
