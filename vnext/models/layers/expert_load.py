"""Expert load: how many tokens each expert gets, counted where a step chooses experts.

Owns the counts of one rank, which sees the choices for all tokens, whichever ranks have the experts. The kernels count where a call
runs a stack of layers, a wrapped operation elsewhere; both without torch's knowledge. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from vnext.kernels.calls import Router
from vnext.kernels.cpu.experts import count_choices
from vnext.kernels.cpu.stack import Stack
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.sharding import Parallel, own_experts

if TYPE_CHECKING:
    import torch

    from vnext.kernels.table import Operations


class Loads(NamedTuple):
    """int64 sums over intervals, an entry for each of `layers`: the choices of `all` experts, of each interval's `busiest` expert,
    and of the rank whose whole experts were chosen most (`busiest_rank`)."""

    layers: tuple[int, ...]
    all: np.ndarray
    busiest: np.ndarray
    busiest_rank: np.ndarray


class ExpertLoad:
    """The counts. Mutable. `expert_count` and `rank_count` are those that share a layer's tokens."""

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        assert config.experts is not None, "a model without experts has none"
        self.expert_count = config.experts.count
        self.rank_count = parallel.world_size if parallel.by_expert else 1
        self._firsts = [own_experts(self.expert_count, replace(parallel, rank=rank)).start for rank in range(self.rank_count)]
        self._layers = tuple(at for at in range(config.layer_count) if at not in config.experts.dense_layers)
        self._counts = np.zeros((len(self._layers), self.expert_count), np.int64)
        self._sums = np.zeros((3, len(self._layers)), np.int64)

    def watch(self, stack: Stack) -> None:
        """Have the kernels count in this model's layers."""
        routers = (layer.router for layer in stack.layers if layer.router is not None)
        for router, counts in zip(routers, self._counts, strict=True):
            count_choices(router, counts)

    def watched(self, chosen: Operations) -> Operations:
        """These operations, of which `route` counts as well. For one forward, layer by layer."""
        layers = iter(self._counts)

        def route(scores: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            shares, ids = chosen.route(scores, router, bias)
            counts = next(layers)
            counts += np.bincount(ids.numpy().ravel(), minlength=len(counts))[: len(counts)]
            return shares, ids

        return chosen._replace(route=route)

    def end_interval(self) -> Loads:
        """The sums, with all that was counted since the last call as one interval."""
        ranks = np.add.reduceat(self._counts, self._firsts, axis=1)
        self._sums += (self._counts.sum(1), self._counts.max(1), ranks.max(1))
        self._counts[:] = 0
        return Loads(self._layers, *self._sums)
