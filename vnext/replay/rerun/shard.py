"""A shard: one rank's part of a model, loaded as the engine loads it, with caches that the caller passes in.

Owns the parameters and the choice of the kernels that they were made for. Knows arrays, no requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.cpu import native
from vnext.kernels.cpu.packed import serves_all
from vnext.kernels.format import QUANTIZATIONS, only_dtype, weight_formats
from vnext.kernels.table import Operations, operations, plain_operations, substituted
from vnext.models.config.model_config import load_config
from vnext.models.hosted.own_attention import OwnAttention
from vnext.models.layers.adapted import AdaptedForward, Adapter
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache, cache_dtype, make_kv_cache
from vnext.models.layers.recurrent import make_state_pools
from vnext.models.layers.sharding import Parallel
from vnext.models.loading.adapter import Base
from vnext.models.loading.checkpoint import Checkpoint
from vnext.models.loading.kept import Kept
from vnext.models.loading.weights import choose_dtype, load_params, refill_params
from vnext.models.registry import family
from vnext.replay.rerun.kept_inputs import KeptInputs
from vnext.replay.rerun.numerics import PLAIN, TORCH, CannotRun, Numerics
from vnext.runtime.batch.tensors import tensors_of_batch
from vnext.runtime.processes.determinism import cpu_flags, has_strict_path, invariance
from vnext.runtime.rank.by_parts import rests, spare_pages


class Shard:
    """Loaded under the kernels of `numerics`. Callers of `logits` must use the same kernels (`Kernels.used`)."""

    def __init__(self, path: Path, numerics: Numerics, parallel: Parallel) -> None:
        """Raises ModelError, SettingsError, CannotRun."""
        self.config = load_config(path, asked_length=numerics.model_length)
        self.parallel = parallel
        self.family = family(self.config.architecture)
        if numerics.quantization not in QUANTIZATIONS:
            known = " or ".join(QUANTIZATIONS)
            raise CannotRun(f"there are no weights in the form {numerics.quantization!r}: give --quantization {known}")
        self.dtype = torch_dtype(choose_dtype(numerics.dtype, self.config, numerics.quantization))
        self.kv_dtype = cache_dtype(numerics.kv_cache_dtype, self.dtype)
        if (only := only_dtype(numerics.quantization)) and self.dtype is not torch_dtype(only):
            raise CannotRun(f"{numerics.quantization} weights are multiplied in {only}: give --dtype {only}, or leave it out")
        products = weight_formats(numerics.quantization).products
        self.invariance = invariance(
            numerics.deterministic,
            str(self.dtype).removeprefix("torch."),
            compiled=numerics.kernels != TORCH and serves_all(self.config.head_dim_max, products),
            strict_mkl=torch.backends.mkl.is_available() and has_strict_path(cpu_flags()),
        )
        self.kept, self._formats = Kept(), weight_formats(numerics.quantization, self.invariance.form, numerics.activations)
        self.params = load_params(path, self.config, parallel, self.dtype, "cpu", self._formats, kept=self.kept)
        self.base, self.adapters = Base(self.config, parallel, self.kept.targets, path), list[Adapter]()
        self.inputs: KeptInputs | None = None  # where the model reads images or sounds

    def refill(self, tensors: Checkpoint) -> None:
        """Compute with these tensors, which update.py has checked, from now on. Raises ModelError."""
        refill_params(self.params, self.kept, tensors, self.config, self.parallel, self.dtype, "cpu", self._formats)

    def cache(self, pages: int, block_size: int) -> KvCache:
        """An empty cache. Raises MemoryError or OSError if there is not enough memory."""
        pages += spare_pages(self.config, block_size)
        return make_kv_cache(self.config, pages, block_size, self.kv_dtype, "cpu", self.parallel)

    def states(self, pages: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Pools of so many pages for the states of recurrent layers."""
        return make_state_pools(self.config, pages, self.dtype, self.parallel.world_size)

    def logits(self, batch: ForwardBatch, cache: KvCache, params: Any = None) -> torch.Tensor | None:
        """Run one step: writes keys and values to the cache; returns float32 [S, V] of the sampled rows, None if there
        are none."""
        params, batch = self.params if params is None else params, tensors_of_batch(batch)
        with torch.inference_mode():
            forward = AdaptedForward(self.family.forward, self.adapters, "cpu") if batch.adapters else self.family.forward
            again = []
            if batch.inputs and self.inputs is not None:
                batch = self.inputs.with_vectors(batch, params, self.parallel)
                again = list(rests(batch, cache, self.config, self.inputs.vectors))
            hidden, _ = forward(params, cache, batch, self.config, self.parallel)
            for each in again:
                forward(params, cache, each, self.config, self.parallel)
            if batch.sample_at.shape[0] == 0:
                return None
            logits: torch.Tensor = self.family.logits(params, hidden, self.config, self.parallel)
            return logits


class Kernels:
    """The active implementations: the process's compiled ones for one instruction set, or plain torch, as `operations`."""

    def __init__(self, name: str) -> None:
        """Raises CannotRun for an unknown name, or an instruction set that this machine lacks."""
        levels = {level.name.lower(): level for level in native.Level} if native.is_built() else {}
        if name not in ("", TORCH) and name not in levels:
            known = ", ".join((TORCH, *levels))
            raise CannotRun(f"there are no kernels {name!r} here: choose of {known} with --kernels")
        self._level = levels.get(name)
        if self._level is not None and self._level not in native.levels():
            best = native.best_level().name.lower()
            raise CannotRun(f"this machine cannot run the kernels {name!r}, at best {best}: give --kernels {best}")
        self.is_torch = name == TORCH or not native.is_built()
        self._others = plain_operations() if name == TORCH else None
        self.operations: Operations = self._others or operations("cpu")

    def attend_by(self, own: OwnAttention) -> None:
        """With a user's own attention from now on."""
        self._others = self.operations = own.among(self.operations)

    @property
    def name(self) -> str:
        return PLAIN if self.is_torch else (native.level() if self._level is None else self._level).name

    @contextmanager
    def used(self) -> Iterator[None]:
        """Activate these implementations in this thread until the block ends."""
        before = native.level() if self._level is not None else None
        if self._level is not None:
            native.set_level(self._level)
        try:
            with substituted(self._others) if self._others is not None else nullcontext():
                yield
        finally:
            if before is not None:
                native.set_level(before)
