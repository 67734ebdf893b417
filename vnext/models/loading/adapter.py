"""Adapters: reads one rank's part of a LoRA adapter from PEFT's files.

Owns the match between an adapter's modules and the model's packed weights, and the slicing by the sharding table: `down` is
cut as the weight's inputs are, `up` as its outputs. Modules that the model fuses become blocks beside each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vnext.kernels.arrays import as_tensor
from vnext.kernels.cpu.memory import huge
from vnext.kernels.thin import ThinBlocks, thin_block, thin_bytes
from vnext.models.config.adapter_config import WEIGHTS_NAME, AdapterSettings, adapter_digest, read_adapter_settings
from vnext.models.config.adapter_header import COPIES, AdaptedModule, check_adapter_header
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.layers.adapted import Adapter
from vnext.models.layers.sharding import AnyAxis, LayoutTable, Parallel, Target, axis_part, axis_size, layout_of, weight_axes
from vnext.models.loading.checkpoint import COMPARED_ROWS, Checkpoint, open_checkpoint
from vnext.models.loading.sources.safetensors import stored_tensors

log = logging.getLogger(__name__)
Pair = tuple[torch.Tensor, torch.Tensor]
"""down [rank, in] and up [out, rank] of one module on one rank."""


class Base(NamedTuple):
    """What an adapter is fitted to: the model on this rank, with its targets, and the folder of its checkpoint."""

    config: ModelConfig
    parallel: Parallel
    targets: Sequence[Target]
    path: Path

    @property
    def layouts(self) -> LayoutTable:
        return weight_axes(self.config)

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each layer that an adapter may change, on all ranks together, by its module's name."""
        return {name.removesuffix(".weight"): self._size(name) for target in self.targets for name in target.names}

    def _size(self, name: str) -> tuple[int, int]:
        layout = layout_of(name, self.layouts)
        assert layout.inner is not None, "a target is a matrix"
        return axis_size(layout.inner, self.config), sum(axis_size(axis, self.config) for axis in layout.out)


def huge_tensor(size_bytes: int) -> torch.Tensor:
    """uint8 zeros in huge pages, if there are some."""
    found: torch.Tensor = as_tensor(huge(size_bytes))
    return found


def load_adapter(
    folder: Path, digest: str, base: Base, rank_max: int, make_memory: Callable[[int], torch.Tensor] = huge_tensor
) -> Adapter:
    """This rank's part of the adapter in `folder`, whose files must have this digest. Raises ModelError.

    Its matrices lie side by side in what `make_memory` gives for their size in bytes, uint8 zeros.
    """
    settings, file = read_adapter_settings(folder, rank_max), folder / WEIGHTS_NAME
    if settings.unread and base.parallel.rank == 0:
        names = ", ".join(settings.unread)
        log.warning("Of the adapter in %s some is not read, though elsewhere answers may depend on it: %s.", folder, names)
    modules, copies = check_adapter_header(folder, settings, base.linear_layers)
    files = Checkpoint(folder, {**stored_tensors(file)}, 0)
    if copies:
        require_copies(files, copies, base.path)
    pairs = {f"{layer}.weight": _pair(files, f"{layer}.weight", module, settings, base) for layer, module in modules.items()}
    targets = [target for target in base.targets if pairs.keys() & set(target.names)]
    sizes = [thin_bytes(*pairs[name], target.weight.dtype) for target in targets for name in target.names if name in pairs]
    memory = iter(make_memory(sum(sizes)).split(sizes))
    adapter = Adapter({id(target.weight): _blocks(target, pairs, base, memory) for target in targets})
    if (found := adapter_digest(folder)) != digest:
        raise ModelError(f"the adapter in {folder} has changed since it was named ({found} instead of {digest}): name it again")
    return adapter


def require_copies(files: Checkpoint, names: Sequence[str], base: Path) -> None:
    """Raise ModelError unless these tensors of an adapter are copies of the embedding and the head in folder `base`."""
    with open_checkpoint(base) as model:
        ends = {end: name for end in COPIES for name in model.names() if name.endswith(end)}
        embedding = ends.get(COPIES[0]) or ends.get(COPIES[2])
        for name in names:
            theirs = ends.get(next(end for end in COPIES if name.endswith(end))) or embedding  # which is a tied head too
            if theirs is None or not _is_copy(files, name, model, theirs):
                raise ModelError(
                    f"{name!r} of the adapter in {files.path} is not the base's: new embeddings and heads are not supported, so "
                    "merge the adapter into the weights"
                )


def _is_copy(files: Checkpoint, name: str, model: Checkpoint, theirs: str) -> bool:
    """Whether a tensor of the adapter is the model's, rounded to the adapter's dtype."""
    if (shape := model.shape(theirs)) != files.shape(name) or shape is None or files.dtype(name) is None:
        return False
    copy, whole = files.part(name, shape, ()), model.part(theirs, shape, ())
    rows = (slice(row, row + COMPARED_ROWS) for row in range(0, len(copy), COMPARED_ROWS))
    is_copy = all(np.array_equal(whole[each].astype(copy.dtype), copy[each]) for each in rows)
    files.release(name)
    model.release(theirs)
    return is_copy


def _pair(files: Checkpoint, name: str, module: AdaptedModule, settings: AdapterSettings, base: Base) -> Pair:
    """This rank's down and up of one module; up is scaled, in float32."""
    layout, (down, up) = layout_of(name, base.layouts), (_finite(files, each) for each in (module.down, module.up))
    assert layout.inner is not None
    return _cut(down.t(), (layout.inner,), base).t(), _cut(up.float() * settings.scale_of(module.name), layout.out, base)


def _finite(files: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of the adapter, whole. Raises ModelError for numbers that are not finite."""
    whole: torch.Tensor = as_tensor(files.part(name, files.shape(name) or (), ()))
    if not all(map(isfinite, whole.aminmax())):
        raise ModelError(f"{name!r} of the adapter in {files.path} holds numbers that are not finite")
    return whole


def _cut(rows: torch.Tensor, axes: Sequence[AnyAxis], base: Base) -> torch.Tensor:
    """This rank's rows, those of one axis below those of another; padding is zeros."""
    if base.parallel.world_size == 1:
        return rows
    parts, above = [], 0
    for axis in axes:
        part = axis_part(axis, base.config, base.parallel)
        piece = rows[above + part.start : above + part.stop]
        parts += [piece, rows.new_zeros((part.size - len(piece), rows.shape[1]))]
        above += axis_size(axis, base.config)
    return torch.cat(parts)


def adapted_products(base: Base) -> list[tuple[Any, tuple[tuple[int, int], ...]]]:
    """The packed weights that adapters may change, each with the columns of its modules."""
    return [(target.weight, module_columns(target, base)) for target in base.targets]


def _blocks(target: Target, pairs: Mapping[str, Pair], base: Base, memory: Iterator[torch.Tensor]) -> ThinBlocks:
    """One block for each of the target's modules that the adapter changes, beside the columns of its outputs; each takes the next
    piece of memory."""
    firsts = (first for first, _ in module_columns(target, base))
    found = [(pairs[name], first) for name, first in zip(target.names, firsts) if name in pairs]
    return ThinBlocks([thin_block(*pair, first, target.weight.dtype, next(memory)) for pair, first in found])


def module_columns(target: Target, base: Base) -> tuple[tuple[int, int], ...]:
    """The first column and the width of each of the target's modules in its product on this rank."""
    axes = [layout_of(name, base.layouts).out for name in target.names]
    widths = [sum(axis_part(axis, base.config, base.parallel).size for axis in each) for each in axes]
    return tuple((sum(widths[:at]), width) for at, width in enumerate(widths))
