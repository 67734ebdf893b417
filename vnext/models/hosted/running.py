"""Running: a model of transformers with its weights, and the steps that it computes.

One call of the model's base with all tokens of a step, and one of what follows it with the sampled ones' states: whatever scales or
caps logits is the model's own too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from vnext.models.errors import ModelError
from vnext.models.hosted.modules import Replaced, Run
from vnext.models.hosted.skeleton import base_of, call_base
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Step
from vnext.models.layers.sharding import Parallel

COMPARED_ROWS = 5
POSITIONS_MAX = 1000


class GivenStates(BaseModelOutputWithPast):
    """What a base gives, of which all but the states is None under any name."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class Given:
    """Stands in the place of a model's base: its states are given."""

    hidden: torch.Tensor

    def __call__(self, *_: object, **__: object) -> GivenStates:
        return GivenStates(last_hidden_state=self.hidden)

    @property
    def decoder(self) -> Given:
        return self


class HostedModel:
    """A model whose weights lie among the parameters beside it, but for those in `packed_beside`."""

    def __init__(self, model: nn.Module, run: Run, is_replaced: bool, beside: tuple[object, ...]) -> None:
        """`beside`: packed weights that do not lie among the parameters."""
        self._whole, self._run, self._given, self._is_replaced, self.packed_beside = model, run, Given(), is_replaced, beside
        self._base = base_of(model)
        name = str(model.base_model_prefix)
        del model._modules[name]
        model.__dict__[name] = self._given

    @contextmanager
    def _of(self, steps: Sequence[Step], kv: KvCache, parallel: Parallel) -> Iterator[None]:
        run = self._run
        run.steps, run.kv, run.parallel = steps, kv, parallel
        try:
            yield
        finally:
            run.steps, run.kv = (), ()

    def states(self, batch: ForwardBatch, steps: Sequence[Step], kv: KvCache, parallel: Parallel) -> torch.Tensor:
        """The last layer's states of a step's tokens [T, hidden], normed."""
        with self._of(steps, kv, parallel):
            return self._states(batch.token_ids, batch.positions)

    def _states(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with Replaced() if self._is_replaced else nullcontext():
            return call_base(self._base, ids[None], positions[None])[0]

    def logits(self, hidden: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        """Those of states [S, hidden], as the model scales and caps them: float32 [S, V]."""
        self._run.parallel, self._given.hidden = parallel, hidden[None]
        found: torch.Tensor = self._whole(input_ids=None, use_cache=False).logits[0]
        return found.float()

    @torch.inference_mode()
    def require_rows(self, vocab_size: int, position_count: int, device: torch.device) -> None:
        """Raise ModelError unless tokens have the same bits alone and together, attention aside."""
        generator = torch.Generator().manual_seed(COMPARED_ROWS)
        sizes = (vocab_size, min(position_count, POSITIONS_MAX))
        ids, places = (torch.randint(size, (COMPARED_ROWS,), generator=generator).to(device) for size in sizes)
        together = self._states(ids, places)
        alone = torch.cat([self._states(ids[[row]], places[[row]]) for row in range(COMPARED_ROWS)])
        if not torch.equal(together.nan_to_num(), alone.nan_to_num()):
            raise ModelError(
                f"{type(self._whole).__name__} computes tokens otherwise alone than together, so --model-impl transformers "
                "cannot promise one answer in every batch and does not serve it"
            )
