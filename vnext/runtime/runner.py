"""Model runner: one rank's parameters and cache, and the step as a pure function made effective.

Owns the tensors of a rank. Knows arrays, not requests; decides nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch

from vnext.kernels.cpu.operations import serves_all
from vnext.models.config import ModelConfig, load_config
from vnext.models.kv_cache import KvCache, kv_bytes_per_page, make_kv_cache
from vnext.models.registry import family
from vnext.models.sharding import Parallel
from vnext.models.weights import Progress, choose_dtype, load_params
from vnext.models.whole_step import WholeStep, whole_step
from vnext.runtime.determinism import Invariance, cpu_flags, gpu_invariance, has_strict_path, invariance
from vnext.runtime.device import Device
from vnext.runtime.device_model import DeviceModel
from vnext.runtime.messages import TokenLogprobs
from vnext.runtime.sampling import sample
from vnext.runtime.sampling_inputs import Sampled, is_plain
from vnext.runtime.step_inputs import StepInputs


class StepOutputs(msgspec.Struct, frozen=True):
    """`tokens` int64[S]; `logprobs` one entry per sampled row (None where not asked for), empty if nobody asked."""

    tokens: np.ndarray
    logprobs: tuple[TokenLogprobs | None, ...]


NOTHING_SAMPLED = StepOutputs(np.empty(0, dtype=np.int64), ())


class ModelRunner:
    """Parameters and cache of one rank. `make_cache` comes before the first `run`."""

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
    ) -> None:
        """`config`: the folder's own, unless given. Raises ModelError; SettingsError where `deterministic` cannot be had."""
        self.config = config or load_config(path)
        self.device = torch.device(device)
        self.dtype = choose_dtype(dtype, self.config, quantization, self.device.type)
        self.parallel = parallel
        self._family = family(self.config.architecture)
        self.invariance = self._invariance(deterministic, quantization)
        self._params = load_params(
            path, self.config, parallel, self.dtype, self.device, progress, quantization, self.invariance.form
        )
        self._kv = None
        self._whole: WholeStep | None = None
        self.face: Device | None = None  # what `device_steps.py` asks of a device that is not the CPU

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
        """Bytes of one page of the cache on this rank."""
        return kv_bytes_per_page(self.config, block_size, self.dtype, self.parallel)

    def make_cache(self, block_count: int, block_size: int) -> None:
        """Take the memory of the cache. MemoryError (RuntimeError on CUDA) if there is not enough."""
        together = self.device.type == "cpu"
        self._kv = make_kv_cache(self.config, block_count, block_size, self.dtype, self.device, self.parallel, together)
        self._whole = whole_step(self._family, self._params, self._kv, self.config, self.parallel) if together else None

    def device_model(self, block_count: int, block_size: int) -> DeviceModel:
        """The model with a cache of its own, for steps on a device: `block_count` pages and one that is nobody's."""
        kv: KvCache = make_kv_cache(self.config, block_count + 1, block_size, self.dtype, self.device, self.parallel)
        return DeviceModel(self._family, self._params, kv, self.config, self.parallel)

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Compute one step: the cache takes its keys and values, sampled rows give their tokens.

        The outputs may be overwritten by the next step.
        """
        whole, sampling = self._whole, inputs.sampling
        if whole is None or sampling is None or not is_plain(sampling) or not whole.takes(len(inputs.logprobs)):
            return self.run_by_parts(inputs)
        return StepOutputs(whole.run(inputs.forward, sampling), ())

    @torch.inference_mode()
    def run_by_parts(self, inputs: StepInputs) -> StepOutputs:
        """As `run`, with the same bits, for every model, device and kind of sampling."""
        hidden, self._kv = self._family.forward(self._params, self._kv, inputs.forward, self.config, self.parallel)
        if inputs.sampling is None:
            return NOTHING_SAMPLED
        logits = self._family.logits(self._params, hidden, self.config, self.parallel)
        sampled = sample(logits, inputs.sampling)
        tokens = sampled.tokens if self.device.type == "cpu" else sampled.tokens.cpu()
        return StepOutputs(tokens.numpy(), reported(sampled, inputs.logprobs))


def reported(sampled: Sampled, asked: np.ndarray) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of the rows that asked for them, each with as many alternatives as it asked for."""
    if sampled.logprob is None:
        return ()
    logprobs, ranks = sampled.logprob.tolist(), sampled.rank.tolist()
    tokens, values = sampled.top_tokens.tolist(), sampled.top_logprobs.tolist()
    return tuple(
        TokenLogprobs(logprob=logprobs[at], rank=ranks[at], top=tuple(zip(tokens[at][:count], values[at][:count])))
        if count >= 0
        else None
        for at, count in enumerate(asked.tolist())
    )
