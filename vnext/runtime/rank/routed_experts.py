"""Routed experts: the experts that each token of a step went to, for a trainer that repeats the routing.

A fold of a request's tokens like all else that a rank computes, so no state holds it. The ids of a token lie at its slot, beside
its key and value: a request finds those of its prefix hits there. Only `--enable-return-routed-experts` makes one of these.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import torch

from vnext.kernels.calls import Router
from vnext.kernels.table import Operations
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch, host_batch
from vnext.runtime.protocol.messages import PromptResult
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.state import StepInFlight

IDS = np.int16


class RoutedExperts:
    """The ids of one rank, by slot. Mutable. `shape` is (layers with experts, experts of a token)."""

    def __init__(self, config: ModelConfig, prefix_caching: bool) -> None:
        """Raises SettingsError for a model that cannot report them."""
        if config.experts is None:
            raise SettingsError("--enable-return-routed-experts: this model has no experts: leave the option out")
        if prefix_caching and any(config.windows):
            raise SettingsError(
                "--enable-return-routed-experts: a prefix hit of this model, which has attention windows, lacks the ids of tokens "
                "behind the window: add --no-enable-prefix-caching"
            )
        self.shape = config.layer_count - len(config.experts.dense_layers), config.experts.per_token
        self._ids = np.empty((0, *self.shape), IDS)
        self._block_size = 1
        self._layers: list[torch.Tensor] = []
        self._begun: dict[int, int] = {}  # request -> the preemption count of the row whose tokens were reported

    @property
    def slot_bytes(self) -> int:
        return IDS().itemsize * self.shape[0] * self.shape[1]

    def make(self, page_count: int, block_size: int) -> None:
        """Allocate memory for the slots."""
        self._ids, self._block_size = np.zeros((page_count * block_size, *self.shape), IDS), block_size

    def watched(self, chosen: Operations) -> Operations:
        """These operations, of which `route` notes the ids. For one forward."""
        self._layers.clear()

        def route(scores: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            shares, ids = chosen.route(scores, router, bias)
            self._layers.append(ids)
            return shares, ids

        return chosen._replace(route=route)

    def results(self, scheduled: StepInFlight, batch: ForwardBatch, live: Container[int]) -> tuple[PromptResult, ...]:
        """What the step that ran last tells each request: the ids of the tokens it computed, before them those of its hits.

        `batch` has a row for each entry of `scheduled`, with the drafts that were computed. `live`: the requests that go on.
        """
        ids = torch.stack(self._layers, 1).numpy().astype(IDS)
        self._ids[np.asarray(batch.slots)] = ids
        starts, rows = host_batch(batch).query_starts.tolist(), np.asarray(batch.block_table)
        found = []
        for row, (id_, count) in enumerate(zip(scheduled.ids.tolist(), scheduled.preemption_counts.tolist())):
            own, start = ids[starts[row] : starts[row + 1]], int(batch.positions[starts[row]])
            if self._begun.get(id_) != count:
                self._begun[id_], positions = count, np.arange(start)
                hits = rows[row, positions // self._block_size].astype(np.int64) * self._block_size
                own, start = np.concatenate((self._ids[hits + positions % self._block_size], own)), 0
            found.append(PromptResult(id=id_, first=start, experts=own.tobytes(), experts_shape=self.shape))
        self._begun = {id_: count for id_, count in self._begun.items() if id_ in live}
        return tuple(found)
