"""Model runner: one rank's parameters and cache, and the execution of its steps.

Owns the tensors of a rank. Knows arrays, not requests; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from vnext.kernels.cpu.operations import serves_all
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.layers.adapted import AdaptedForward
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache, cache_dtype, kv_bytes_per_page, make_kv_cache
from vnext.models.layers.layers import embed
from vnext.models.layers.sharding import Parallel
from vnext.models.layers.traffic import token_bytes
from vnext.models.layers.whole_step import WholeStep, whole_step
from vnext.models.loading.adapter import Base, Target
from vnext.models.loading.weights import Progress, choose_dtype, load_params
from vnext.models.registry import family
from vnext.runtime.batch.prompts import PromptSums, compute, places_of
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs, reported
from vnext.runtime.gpu.device import Device
from vnext.runtime.gpu.model import DeviceModel
from vnext.runtime.processes.determinism import Invariance, cpu_flags, gpu_invariance, has_strict_path, invariance
from vnext.runtime.rank.adapters import AdapterSlots
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.inputs import SamplingInputs, is_plain
from vnext.sampling.sampling import sample


class Head(Protocol):
    """A draft head (draft_head.py)."""

    def block_bytes(self, block_size: int) -> int: ...

    def make_cache(self, page_count: int, block_size: int) -> None: ...

    def with_room(self, batch: ForwardBatch) -> ForwardBatch: ...

    def keep(self, batch: ForwardBatch) -> None: ...

    def run(self, rows: ForwardBatch, before: torch.Tensor, sampling: SamplingInputs | None) -> np.ndarray: ...

    def step_seconds(self) -> float: ...


class ModelRunner:
    """Parameters and cache of one rank. Call `make_cache` before the first `run`."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        device: torch.device | str,
        parallel: Parallel,
        progress: Progress | None = None,
        quantization: str = "none",
        deterministic: bool | None = None,
        config: ModelConfig | None = None,
        max_lora_rank: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """`config` defaults to the folder's own; `max_lora_rank` 0 means no adapters. Raises ModelError, and SettingsError where
        `deterministic` is impossible."""
        self.path = path
        self.config = config or load_config(path)
        self.device = torch.device(device)
        self.dtype = choose_dtype(dtype, self.config, quantization, self.device.type)
        self.kv_dtype = cache_dtype(kv_cache_dtype, self.dtype, self.device.type)
        self.parallel = parallel
        self._family = family(self.config.architecture)
        self.invariance = self._invariance(deterministic, quantization)
        targets: list[Target] = []
        self._params = load_params(
            path, self.config, parallel, self.dtype, self.device, progress, quantization, self.invariance.form, targets
        )
        base = Base(self.config, parallel, targets)
        self.adapters = AdapterSlots(parallel.rank, base, max_lora_rank) if max_lora_rank else None
        self._adapted = AdaptedForward(self._family.forward, self.adapters, self.device.type) if self.adapters else None
        self._kv = None
        self._whole: WholeStep | None = None
        self._sums = PromptSums()
        self.draft: ModelRunner | None = None  # computes drafts, under the same page numbers
        self.head: Head | None = None  # does, and reads hidden states of this model
        self.steps_device: Device | None = None  # the interface of `gpu/steps.py` to a device other than the CPU

    def _invariance(self, asked: bool | None, quantization: str) -> Invariance:
        if self.device.type != "cpu":
            return gpu_invariance(asked, quantization)
        return invariance(
            asked,
            str(self.dtype).removeprefix("torch."),
            compiled=serves_all(self.config.head_dim),
            strict_mkl=torch.backends.mkl.is_available() and has_strict_path(cpu_flags()),
        )

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one page of the cache on this rank, the draft model's and the head's too."""
        drafts = sum(drafter.block_bytes(block_size) for drafter in (self.draft, self.head) if drafter)
        return kv_bytes_per_page(self.config, block_size, self.kv_dtype, self.parallel) + drafts

    def token_bytes(self) -> int:
        """Bytes of weights that this rank reads for a decoded token."""
        return token_bytes(self._params, self.config)

    def vocabulary(self, end_tokens: Sequence[int]) -> Vocabulary:
        """What constraints are matched with."""
        return Vocabulary(self.path, self.config.vocab_size, end_tokens)

    def make_cache(self, page_count: int, block_size: int) -> None:
        """Allocate the cache and that of what drafts. Raises MemoryError (RuntimeError on CUDA) if memory does not suffice."""
        together = self.device.type == "cpu"
        self._kv = make_kv_cache(self.config, page_count, block_size, self.kv_dtype, self.device, self.parallel, together)
        self._whole = (
            whole_step(self._family, self._params, self._kv, self.config, self.parallel, self.adapters) if together else None
        )
        for drafter in (self.draft, self.head):
            if drafter is not None:
                drafter.make_cache(page_count, block_size)

    def device_model(self, page_count: int, block_size: int) -> DeviceModel:
        """The model with a cache of its own for steps on a device: `page_count` pages and one null page for padding."""
        kv: KvCache = make_kv_cache(self.config, page_count + 1, block_size, self.dtype, self.device, self.parallel)
        return DeviceModel(self._family, self._params, kv, self.config, self.parallel)

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Compute one step: write its keys and values to the cache and sample a token for each sampled row.

        The next step may overwrite the outputs.
        """
        if self.head is None:
            return self._run(inputs)
        batch = self.head.with_room(inputs.forward)
        outputs = self._run(inputs._replace(forward=batch))
        self.head.keep(batch)
        return outputs

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding [T, hidden]; every rank asks for the same."""
        return embed(self._params.embedding, token_ids, self.parallel)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [S, hidden] -> float32 [S, V]; every rank asks for the same."""
        found: torch.Tensor = self._family.logits(self._params, hidden, self.config, self.parallel)
        return found

    def _run(self, inputs: StepInputs) -> StepOutputs:
        whole, sampling = self._whole, inputs.sampling
        if whole is None or inputs.prompts is not None:
            return self.run_by_parts(inputs)
        if sampling is None or not is_plain(sampling) or not whole.takes(len(inputs.logprobs)):
            return self.run_by_parts(inputs)
        return StepOutputs(whole.run(inputs.forward, sampling), ())

    @torch.inference_mode()
    def run_by_parts(self, inputs: StepInputs) -> StepOutputs:
        """As `run`, with the same bits, for every model, device and kind of sampling; not fused."""
        if inputs.prompts is None:
            return self._sampled(self._hidden(inputs.forward), inputs)
        prompts, forward = inputs.prompts, inputs.forward
        places = places_of(forward.sample_at.cpu().numpy(), prompts, lambda tensor: tensor.to(self.device))
        hidden = self._hidden(forward._replace(sample_at=places.at))
        outputs = self._sampled(hidden[places.samples], inputs)
        computed = compute(prompts, hidden[places.prompts], self.logits, lambda tensor: tensor.to(self.device))
        return replace(outputs, prompts=self._sums.results(prompts, [tensor.cpu() for tensor in computed]))

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        forward = self._adapted if batch.adapters else self._family.forward
        hidden, self._kv = forward(self._params, self._kv, batch, self.config, self.parallel)
        return hidden

    def _sampled(self, hidden: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        if inputs.sampling is None:
            return NOTHING_SAMPLED
        sampled = sample(self.logits(hidden), inputs.sampling)
        tokens = sampled.tokens if self.device.type == "cpu" else sampled.tokens.cpu()
        return StepOutputs(tokens.numpy(), reported(sampled, inputs.logprobs))
