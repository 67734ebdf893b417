"""Loading weights: from the files of a checkpoint to one rank's parameters, straight and without detours.

Owns slicing by the sharding table, fusing, conversion of dtypes and the report of progress. Each target tensor is made
once at its final size, dtype and place, and filled part by part from memory-mapped files: the whole model is never
held twice, and a rank reads its own part only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vnext.models.checkpoint import Checkpoint, fingerprint, open_checkpoint
from vnext.models.config import DTYPES, ModelConfig
from vnext.models.errors import ModelError
from vnext.models.registry import family
from vnext.models.sharding import Parallel, axes_of, axis_part, axis_size, check_world_size

__all__ = ["Progress", "choose_dtype", "fingerprint", "load_params"]

Progress = Callable[[int, int], None]
"""Called with (bytes dealt with, bytes of all files) as loading goes on; the last call has both equal."""


def load_params(
    path: Path | str,
    config: ModelConfig,
    parallel: Parallel,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Any:
    """This rank's parameters of the checkpoint in folder `path`, as its family's tree of tensors. Raises ModelError."""
    check_world_size(config, parallel.world_size)
    with open_checkpoint(Path(path)) as checkpoint:
        loader = Loader(checkpoint, config, parallel, dtype, torch.device(device), progress)
        params = family(config.architecture).assemble(loader, config)
        loader.finish()
    return params


def choose_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype of an option's value; "auto" is the checkpoint's own. Raises ModelError."""
    chosen = config.dtype if name == "auto" else name
    if chosen not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; choose auto, {', '.join(DTYPES)}")
    return getattr(torch, chosen)


class Loader:
    """A family's source of weights: this rank's part of named tensors, in the wanted dtype and place."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._parallel = parallel
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._done_bytes = 0

    def fused(self, names: tuple[str, ...]) -> torch.Tensor:
        """This rank's parts of the tensors, one below the other. A padded axis is filled with zeros."""
        heights = [self._local_shape(name)[0] for name in names]
        target = torch.zeros((sum(heights), *self._local_shape(names[0])[1:]), dtype=self._dtype, device=self._device)
        for name, place in zip(names, target.split(heights)):
            part = self._read(name)
            place[: part.shape[0]].copy_(part)
        return target

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A computed tensor on the device, its dtype kept."""
        return tensor.to(self._device)

    def finish(self) -> None:
        """Report the end, which also covers tensors that nobody asked for."""
        self._report(self._checkpoint.size_bytes)

    def _local_shape(self, name: str) -> tuple[int, ...]:
        return tuple(axis_part(axis, self._config, self._parallel).size for axis in axes_of(name))

    def _read(self, name: str) -> torch.Tensor:
        axes = axes_of(name)
        parts = [axis_part(axis, self._config, self._parallel) for axis in axes]
        shape = tuple(axis_size(axis, self._config) for axis in axes)
        tensor = self._checkpoint.part(name, shape, tuple(slice(part.start, part.stop) for part in parts))
        whole_bytes = tensor.itemsize
        for size in shape:
            whole_bytes *= size
        self._report(self._done_bytes + whole_bytes)
        return tensor

    def _report(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes
        if self._progress is not None:
            self._progress(done_bytes, self._checkpoint.size_bytes)
