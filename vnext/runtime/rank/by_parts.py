"""By parts: steps as a family's forward, its logits and sampling, in torch. Serves every model, device and kind of sampling.

Owns nothing that steps change but the sums of prompts: parameters and cache are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from vnext.kernels.cpu.stack import AuxStates
from vnext.kernels.table import operations, substituted
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.layers.adapted import AdaptedForward, Slots
from vnext.models.layers.batch import AdapterRows, ForwardBatch, GroupPlaces, HostBatch, InputPart, host_batch
from vnext.models.layers.expert_load import ExpertLoad
from vnext.models.layers.kv_cache import KvCache, kv_groups
from vnext.models.layers.layers import embed
from vnext.models.layers.sharding import Parallel
from vnext.models.registry import Family
from vnext.runtime.batch.prompt_results import PromptSums, Tail
from vnext.runtime.batch.prompt_tensors import compute, places_of
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs, reported, spoilt_rows
from vnext.runtime.batch.tensors import tensors_of_batch, tensors_of_step
from vnext.runtime.rank.images import Inputs
from vnext.runtime.rank.routed_experts import RoutedExperts
from vnext.runtime.rank.together import Own
from vnext.sampling.sampling import sample


class ByParts:
    """A model whose parameters are tensors."""

    def __init__(
        self,
        family: Family,
        params: Any,
        config: ModelConfig,
        parallel: Parallel,
        slots: Slots | None,
        routed: RoutedExperts | None = None,
        tail: Tail | None = None,
    ) -> None:
        """`tail`: as PromptSums'."""
        self._family, self._config, self._parallel = family, config, parallel
        self._params = params._replace(stack=None) if routed else params  # layers as one call tell no expert ids
        self._adapted = AdaptedForward(family.forward, slots, "cpu") if slots else None
        self._sums, self._routed, self.own = PromptSums(tail), routed, Own()
        self.inputs: Inputs | None = None  # makes vectors of images or sounds, where the model reads them
        self.load: ExpertLoad | None = None  # counts where no kernel does

    @torch.inference_mode()
    def run(self, inputs: StepInputs, kv: KvCache) -> StepOutputs:
        """Compute one step of arrays or tensors on the CPU: write to the cache, sample a token for each sampled row."""
        inputs = tensors_of_step(inputs)
        if inputs.prompts is None:
            return self._sampled(self._hidden(inputs.forward, kv), inputs)
        prompts, forward = inputs.prompts, inputs.forward
        places = places_of(forward.sample_at.numpy(), prompts)
        hidden = self._hidden(forward._replace(sample_at=places.at), kv)
        outputs = self._sampled(hidden[places.samples], inputs)
        computed = compute(prompts, hidden[places.prompts], self.logits)
        return replace(outputs, prompts=self._sums.results(prompts, [tensor.numpy() for tensor in computed]))

    @torch.inference_mode()
    def states(self, batch: ForwardBatch, kv: KvCache, dtype: torch.dtype) -> torch.Tensor:
        """What the layers make of the tokens [T, hidden], of `dtype`, before any norm: a stage's part of a step."""
        batch, config = tensors_of_batch(batch), self._config
        states = torch.empty((len(batch.token_ids), 1, config.hidden_size), dtype=dtype)
        self._hidden(batch._replace(aux=AuxStates((config.layer_count,), states)), kv)
        return states[:, 0]

    def spare_pages(self, block_size: int) -> int:
        """Of the cache, beside those of requests."""
        return spare_pages(self._config, block_size)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding [T, hidden]; every rank asks for the same."""
        return embed(self._params.embedding, token_ids, self._parallel)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [S, hidden] -> float32 [S, V]; every rank asks for the same."""
        found: torch.Tensor = self._family.logits(self._params, hidden, self._config, self._parallel)
        return found

    def _hidden(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        if batch.inputs and batch.states is None:
            if self.inputs is None:
                raise ModelError("The prompt holds images or sounds, which this engine does not have: no step computes them.")
            batch = self.inputs.with_vectors(batch, self._params, self._parallel)
            again = list(rests(batch, kv, self._config, self.inputs.vectors))  # before the step uses its states up
        else:
            again = []
        forward = self._adapted if batch.adapters else self._family.forward
        assert forward is not None, "who computes with adapters has slots"
        hidden: torch.Tensor
        with self._operations():
            hidden, _ = forward(self._params, kv, batch, self._config, self._parallel)
            for each in again:
                forward(self._params, kv, each, self._config, self._parallel)
        return hidden

    def _operations(self) -> AbstractContextManager[None]:
        """Operations with attention from outside, which note where tokens go if someone wants to know what no kernel counts."""
        chosen = usual = operations("cpu")
        if self.own.attention is not None:
            chosen = self.own.attention.among(chosen)
        if self._routed is not None:
            chosen = self._routed.watched(chosen)
        if self.load is not None and self._params.stack is None:
            chosen = self.load.watched(chosen)
        return nullcontext() if chosen is usual else substituted(chosen)

    def _sampled(self, hidden: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        if inputs.sampling is None:
            return NOTHING_SAMPLED
        logits = self.logits(hidden)
        if inputs.guided is not None:
            logits = inputs.guided.combined(logits)
        sampled = sample(logits, inputs.sampling, own=self.own.sampler)
        tokens = sampled.tokens.numpy()
        return StepOutputs(tokens, reported(sampled, inputs.logprobs), spoilt=spoilt_rows(logits.numpy(), tokens))


# ---- rests of images ---------------------------------------------------------------------------------------------
# Keys and values of tokens that see each other to both sides depend on those behind a chunk's end. So a row that ends within such
# an image is computed once more with the rest of the image behind it, which overwrites what the step has kept of the row: a chunk
# may end anywhere, and bits are those of whole chunks. The rest is kept where the row's next tokens go, and in pages that no
# request has. Such a row has no samples.


def spare_pages(config: ModelConfig, block_size: int) -> int:
    """The pages that a cache has for rests, behind all others."""
    return len(kv_groups(config).windows) * _pages_of_rest(config, block_size)


def rests(
    batch: ForwardBatch, kv: KvCache, config: ModelConfig, vectors: Callable[[bytes], torch.Tensor]
) -> Iterator[ForwardBatch]:
    """A batch of one row for each row of a step that ends within such an image; `vectors` gives an image's [N, hidden]."""
    if config.tower is None or not config.tower.is_mutual:
        return
    starts, _ = host_batch(batch)
    rows = {int(end): row for row, end in enumerate(starts[1:]) if end > starts[row]}
    for part in batch.inputs:
        row = rows.get(part.at + part.count)
        rest = vectors(part.digest)[part.first + part.count :]
        if row is not None and len(rest):
            yield _with_rest(batch, row, rest, kv, config)


def _with_rest(batch: ForwardBatch, row: int, rest: torch.Tensor, kv: KvCache, config: ModelConfig) -> ForwardBatch:
    """The batch of one row, with the vectors [N, hidden] of the rest of an image behind it."""
    (starts, lengths), (pages, _, size, _) = host_batch(batch), kv[0][0].shape
    own, count, end = slice(int(starts[row]), int(starts[row + 1])), len(rest), int(lengths[row])
    total, each = own.stop - own.start + count, _pages_of_rest(config, size)
    behind = np.arange(end, end + count)

    def places(group: int, slots: torch.Tensor, table: torch.Tensor) -> GroupPlaces:
        held, first = -(-end // size), pages - spare_pages(config, size) + group * each
        blocks = torch.cat((table[row, :held], torch.arange(first, first + each, dtype=table.dtype)))
        new = blocks[behind // size].long() * size + torch.from_numpy(behind % size)
        return GroupPlaces(torch.cat((slots[own], new)), blocks[None])

    first, *others = (places(at, *each) for at, each in enumerate(((batch.slots, batch.block_table), *batch.groups)))
    parts = [part for part in batch.inputs if own.start <= part.at < own.stop]
    moved = [InputPart(part.at - own.start, part.count, part.digest, part.first) for part in parts]
    moved[-1] = moved[-1]._replace(count=moved[-1].count + count)
    assert batch.states is not None, "the step's vectors are made"
    return ForwardBatch(
        token_ids=torch.cat((batch.token_ids[own], batch.token_ids.new_zeros(count))),
        positions=torch.cat((batch.positions[own], torch.from_numpy(behind))),
        slots=first.slots, query_starts=torch.tensor([0, total], dtype=torch.int32),
        context_lengths=torch.tensor([end + count], dtype=torch.int32), block_table=first.block_table,
        sample_at=batch.sample_at[:0], host=HostBatch(np.array([0, total], np.int32), np.array([end + count], np.int32)),
        groups=tuple(others), inputs=tuple(moved), states=torch.cat((batch.states[own], rest)),
        adapters=tuple(AdapterRows(slot, np.arange(total)) for slot, tokens in batch.adapters if own.start in tokens),
    )  # fmt: skip


def _pages_of_rest(config: ModelConfig, block_size: int) -> int:
    """Of one group of layers: a rest begins anywhere in a block."""
    tower = config.tower
    return tower.vectors // block_size + 1 if tower is not None and tower.is_mutual else 0
