"""Weights: loads one rank's parameters from the files of a checkpoint.

Owns slicing by the sharding table, fusing, packing, conversion of dtypes and the report of progress. Makes each target tensor
once, with its final size, dtype and device, and fills it part by part from memory-mapped files. Packs weights that need no
conversion directly from the files, or takes them from a packed file (packed_file.py). Never holds the whole model twice, and a rank
reads only its own part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vnext.kernels.arrays import Array, dtype_name, host_dtype
from vnext.kernels.codes import BlockRows, Codes, CodesForm, FloatRows
from vnext.kernels.cpu.native import is_built
from vnext.kernels.cpu.packed import Packed, PackedExperts, codes_bytes, packed_bytes, packed_in
from vnext.kernels.format import AUTO, CODES, NO_FORMAT, Format, WeightFormats, only_dtype, weight_formats
from vnext.models.config.expert_keys import expert_activation
from vnext.models.config.model_config import DTYPES, ModelConfig
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Layout, Parallel, Target, check_world_size, may_be_target, own_experts, weight_axes
from vnext.models.loading.checkpoint import STORED, Checkpoint, fingerprint, open_checkpoint
from vnext.models.loading.host_place import HostPlace, Place
from vnext.models.loading.kept import Kept, Progress, Tie, copy_into
from vnext.models.loading.stored import StoredWeights
from vnext.models.registry import family

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
__all__ = ["Progress", "choose_dtype", "fingerprint", "load_params"]


def load_params(
    path: Path | str,
    config: ModelConfig,
    parallel: Parallel,
    dtype: Any,
    device: torch.device | str,
    formats: WeightFormats | None = None,
    assemble: Callable[..., Any] | None = None,
    kept: Kept | None = None,
) -> Any:
    """This rank's parameters of the checkpoint in folder `path`, as its family's tree. Raises ModelError.

    With a dtype of numpy these are arrays of the host and weights that the CPU kernels packed; with one of torch, tensors on
    `device` and what its operations packed.
    `formats`: those of kernels/format.py; None keeps all weights as floats. `assemble` takes the place of the family's, for other
    tensors of its checkpoints. `kept` gets what adapters and `refill_params` need.
    """
    check_world_size(config, parallel.world_size)
    with open_checkpoint(Path(path)) as checkpoint:
        tensors = checkpoint if config.head else checkpoint.rooted()
        loader = Loader(tensors, config, parallel, dtype, place_of(dtype, device), formats, kept)
        params = (assemble or family(config.architecture).assemble)(loader, config)
        loader.finish()
    return params


def refill_params(
    params: Any,
    kept: Kept,
    tensors: Checkpoint,
    config: ModelConfig,
    parallel: Parallel,
    dtype: Any,
    device: torch.device | str,
    formats: WeightFormats | None = None,
) -> None:
    """Give parameters, of which `load_params` made `kept`, the values of other `tensors` of the same names and shapes (update.py
    checks them), in the same memory. The other arguments are those of `load_params`."""
    kept.begin_refill()
    loader = Loader(tensors, config, parallel, dtype, place_of(dtype, device, passing=True), formats, kept)
    copy_into(params, family(config.architecture).assemble(loader, config))


def place_of(dtype: Any, device: torch.device | str, passing: bool = False) -> Place:
    """Where parameters of this dtype, numpy's or torch's, go; `passing` as of HostPlace."""
    if isinstance(dtype, np.dtype):
        return HostPlace(passing)
    from vnext.models.loading.tensor_place import TensorPlace  # its caller has loaded torch

    return TensorPlace(device)


def choose_numbers(name: str, config: ModelConfig, quantization: str, device: str) -> tuple[str, str]:
    """The dtype of `choose_dtype`, and the value of --quantization that "auto" stands for beside it: codes where the CPU's kernels
    multiply by them in the dtype that most have, else none. Without codes in the checkpoint the two are the same."""
    dtype = choose_dtype(name, config, quantization, device)
    keeps = device == "cpu" and dtype == "bfloat16" and is_built()
    return dtype, quantization if quantization != AUTO else CODES if keeps else NO_FORMAT


def choose_dtype(name: str, config: ModelConfig, quantization: str = "none", device: str = "cpu") -> str:
    """The dtype's name of an option's value; "auto" is the checkpoint's own, or the only one of its format. Raises ModelError.

    On a CPU "auto" is bfloat16 for a checkpoint in float16 too: the compiled kernels have no float16, and torch computes
    it 25 times slower.
    """
    own = only_dtype(quantization) or ("bfloat16" if device == "cpu" and config.dtype == "float16" else config.dtype)
    chosen = own if name == "auto" else name
    if chosen not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; choose auto, {', '.join(DTYPES)}")
    return chosen


class Loader:
    """A family's source of weights: this rank's part of named tensors, in the wanted dtype and place."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        parallel: Parallel,
        dtype: Any,
        place: Place,
        formats: WeightFormats | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._kept = kept = Kept() if kept is None else kept
        self._file, self._progress = (None, None) if kept.is_refilled else (kept.packed_file, kept.progress)
        self._checkpoint = checkpoint
        self._config = config
        self._parallel = parallel
        self.dtype = host_dtype(dtype_name(dtype))
        self._place = place
        self._formats = formats or weight_formats()
        self._stored = StoredWeights(checkpoint, config, parallel, weight_axes(config))
        self._done_bytes = 0
        self._known_shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._known_forms: dict[tuple[tuple[str, ...], str], tuple[CodesForm, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint or self._checkpoint.format_of(name) is not None

    def is_tied(self, embedding: str, head: str) -> bool:
        """Whether the head is the embedding: the file has no other one. A refill goes by what the first load found."""
        found = self._kept.ties.get(head)
        if found is None:
            both = embedding in self and head in self
            is_equal = not both or self._kept.is_refilled or self._are_equal(embedding, head)
            found = self._kept.ties[head] = Tie(embedding, is_equal)
            if not is_equal and self._parallel.rank == 0:
                where = self._checkpoint.path
                log.warning("config.json ties %s to %s, but %s has another one: the file's is used.", head, embedding, where)
        return found.is_equal

    def _are_equal(self, first: str, second: str) -> bool:
        """Whether two weights are the same numbers; those that are no floats in the file count as different."""
        return first in self._checkpoint and second in self._checkpoint and self._checkpoint.are_equal(first, second)

    def go_without(self, head: str) -> None:
        """There is no such head, and the embedding stands in for it. Raises ModelError for a checkpoint that should have one."""
        scores = self._config.pooling is not None and self._config.pooling.scores
        if not (self._checkpoint.is_bare or self._kept.is_refilled or scores):
            raise ModelError(
                f"the checkpoint has no {head} and config.json does not tie it to the embedding; if this model's authors "
                'did, add "tie_word_embeddings": true to config.json, else download the model again'
            )
        self._kept.has_head = False

    def fused(self, names: tuple[str, ...]) -> Array:
        """This rank's parts of the tensors, one below the other: all queries, say, then all keys.

        A padded axis is filled with zeros.
        """
        return self._kept.take(self._array(names, self.dtype))

    def wide(self, name: str) -> Array:
        """This rank's part of one tensor in float32, whatever the model's dtype: for weights applied before rounding."""
        return self._kept.take(self._array((name,), np.dtype(np.float32)))

    def packed(self, names: tuple[str, ...], *, exact: bool = False) -> Any:
        """`fused`, packed for the operations that multiply by it; `exact`: never quantised."""
        return self._kept.take(self._pack(names, self._formats.exact if exact else self._products(names), ""))

    def packed_wide(self, name: str) -> object:
        """One tensor's part, packed in float32 for products with float32."""
        parts = (self._array((name,), np.dtype(np.float32)),)
        return self._kept.take(self._place.pack(parts, "", self._formats.exact, self._stored.shards(name)))

    def table(self, name: str) -> Array:
        """`fused`, to look rows up in: of few bits where the checkpoint has it so and codes are kept."""
        if self._forms((name,), self._formats.products, ""):
            return self.packed((name,))
        return self.fused((name,))

    def packed_gated(self, names: tuple[str, ...]) -> Any:
        """`fused` gate and up, packed for the product that applies the model's activation."""
        return self._kept.take(self._pack(names, self._products(names), self._config.activation))

    def stacked(self, groups: tuple[tuple[str, ...], ...], gated: bool) -> Any:
        """The fused weights of each expert [E, out, in] that this rank holds, packed; `gated`: gate and up. Groups are of one
        shape."""
        own = own_experts(len(groups), self._parallel)
        groups = groups[own.start : own.stop]
        names = tuple(name for group in groups for name in group)
        format = self._products(names)
        shape, gate = [self._local_shape(group) for group in groups][0], expert_activation(self._config) if gated else ""
        found = [self._found_packed(group, shape, format, gate) for group in groups]
        if self._place.is_host and not all(found) and all(self._forms(group, format, gate) for group in groups):
            found = [self._pack_and_keep(group, format, gate) for group in groups]
        whole = tuple(each for each in found if each is not None)
        if len(whole) == len(found):
            outputs, inputs = shape
            return self._kept.take(PackedExperts(whole, (len(groups), outputs, inputs), own.start))
        target = self._place.zeros((len(groups), *shape), self.dtype)
        for place, group in zip(target, groups):
            self._fill(place, group)
        packed = self._place.pack_experts(target, gate, format, self._stored.shards(names[0]))
        for group, weight in zip(groups, packed.weights if self._file else ()):
            self._keep(self._key(group, format.name, gate), weight.linear.buffer)
        return self._kept.take(packed._replace(first=own.start) if isinstance(packed, PackedExperts) else packed)

    def by_head(self, names: tuple[str, ...], sizes: tuple[int, int]) -> tuple[Any, Any]:
        """This rank's heads of a tensor [heads * (K + V), in], or of two: [heads, in, K] and [heads, V, in], packed; of a tensor
        [heads, K, K] the first, turned about."""
        upper, *apart = (self._array((name,), self.dtype) for name in names)
        if not sizes[1]:
            return self._kept.take(self._packed_heads(upper.reshape(-1, sizes[0], sizes[0]).swapaxes(1, 2))), None
        if apart:
            keys, values = upper.reshape(-1, apart[0].shape[1], sizes[0]), apart[0].reshape(-1, sizes[1], apart[0].shape[1])
        else:
            heads = upper.reshape(-1, sum(sizes), upper.shape[1])
            keys, values = heads[:, : sizes[0]].swapaxes(1, 2), heads[:, sizes[0] :]
        return self._kept.take(self._packed_heads(keys)), self._kept.take(self._packed_heads(values))

    def _packed_heads(self, part: Array) -> Any:
        target = self._place.zeros(tuple(part.shape), self.dtype)
        target[...] = part
        return self._place.pack_experts(target, "", self._formats.exact, 1)

    def integers(self, name: str, count: int) -> Array:
        """A tensor of whole numbers, int64 [count]."""
        self._kept.names[name] = (count,)
        return self._kept.take(self._place.integers(self._checkpoint.integers(name, count)))

    def scalar(self, name: str) -> Array:
        """A tensor of one number and no axes, float32 [1]."""
        self._require(name, ())
        return self._kept.take(self._place.integers(self._checkpoint.values(name).astype(np.float32).reshape(1)))

    def share(self, whole: Array) -> Array:
        return whole.reshape(self._parallel.world_size, -1)[self._parallel.rank]

    def place(self, array: np.ndarray) -> Array:
        return self._place.take(array)

    def finish(self) -> None:
        """Report the end, which also covers tensors that no layer uses."""
        self._report(self._checkpoint.size_bytes)

    def _products(self, names: tuple[str, ...]) -> Format:
        """The format of products, to which these parts of a weight are rounded if it rounds."""
        self._stored.round(names, self._formats.products)
        return self._formats.products

    def _array(self, names: tuple[str, ...], dtype: np.dtype) -> Array:
        """`_fused`, from the packed file if it is there."""
        shape, key = self._local_shape(names), self._key(names, str(dtype), "")
        if self._file and (buffer := self._file.find(key, prod(shape) * dtype.itemsize)) is not None:
            return buffer.view(dtype).reshape(shape)
        fused = self._fused(names, dtype)
        self._keep(key, fused)
        return fused

    def _found_packed(self, names: tuple[str, ...], shape: tuple[int, ...], format: Format, gate: str) -> Packed | None:
        """A packed weight from the packed file; None where it is not there."""
        if self._file is None:
            return None
        outputs, inputs = shape
        shards, key = self._stored.shards(names[0]), self._key(names, format.name, gate)
        forms = self._forms(names, format, gate)
        size = codes_bytes(forms, gate, shards) if forms else packed_bytes((outputs, inputs), self.dtype, gate, shards)
        buffer = self._file.find(key, size)
        return None if buffer is None else packed_in(buffer, (outputs, inputs), self.dtype, gate, shards)

    def _keep(self, key: str, array: Array) -> None:
        if self._file is not None:
            self._file.keep(key, array.reshape(-1).view(np.uint8))

    def _key(self, names: tuple[str, ...], kind: str, gate: str) -> str:
        """What names in the packed file all that this loader's checkpoint, config and dtype do not say of a buffer. `kind`: the
        name of a format or of a dtype."""
        if self._file is None:
            return ""
        layouts = [self._stored.layout(name) for name in names]
        parts = [[self._stored.part(axis) for axis in (*layout.out, layout.inner) if axis is not None] for layout in layouts]
        cuts = [(layout.flipped, *[(part.start, part.stop, part.size) for part in cut]) for layout, cut in zip(layouts, parts)]
        return f"{' '.join(names)} {kind} {gate} {self._stored.shards(names[0])} {cuts}"

    def _fused(self, names: tuple[str, ...], dtype: np.dtype) -> Array:
        target = self._place.zeros(self._local_shape(names), dtype)
        self._fill(target, names)
        return target

    def _pack(self, names: tuple[str, ...], format: Format, gate: str) -> Any:
        """Take the weight from the packed file, or pack it; adapters may change it."""
        packed = self._found_packed(names, self._local_shape(names), format, gate) or self._pack_and_keep(names, format, gate)
        if not self._kept.is_refilled and may_be_target(map(self._stored.layout, names)):
            self._kept.targets.append(Target(names, packed))
        return packed

    def _pack_and_keep(self, names: tuple[str, ...], format: Format, gate: str) -> Packed:
        packed: Packed = self._packed_anew(names, format, gate)
        if self._file is not None:
            self._keep(self._key(names, format.name, gate), packed.linear.buffer)
        return packed

    def _packed_anew(self, names: tuple[str, ...], format: Format, gate: str) -> Any:
        """Pack the weight directly from the files where they hold it as packing needs it, else from an equally exact copy."""
        if self._forms(names, format, gate):
            return self._packed_codes(names, gate)
        in_files = self._place.is_host and all(self._is_in_file(name) for name in names)
        parts = tuple(piece for name in names for _, piece in self._pieces(name)) if in_files else (self._fused(names, self.dtype),)
        packed = self._place.pack(parts, gate, format, self._stored.shards(names[0]))
        for name in names if in_files else ():
            self._release(name)
        return packed

    def _packed_codes(self, names: tuple[str, ...], gate: str) -> object:
        forms, shards = self._known_forms[names, gate], self._stored.shards(names[0])
        run, parts = self._stored.run(names[0]), [part for name in names for part in self._stored.parts(name)]

        def read(index: int, rows: slice) -> Codes:
            self._release(parts[index].name)  # of the rows before these
            return parts[index].outputs(rows, run)

        def read_blocks(index: int, rows: slice) -> Codes | BlockRows | FloatRows:
            self._release(parts[index].name)
            return parts[index].blocks(rows, run) or parts[index].outputs(rows, run)

        self._report_read(names)
        try:
            return self._place.pack_codes(forms, read_blocks if self._place.takes_blocks else read, self.dtype, gate, shards)
        except ValueError:  # a scale is not finite; as codes it is refused by name
            return self._place.pack_codes(forms, read, self.dtype, gate, shards)
        finally:
            for name in names:
                self._release(name)

    def _forms(self, names: tuple[str, ...], format: Format, gate: str) -> tuple[CodesForm, ...]:
        """What the weight's codes are made of; () where it becomes floats: there are none, a rank or a shard would divide a group,
        or the kernels have no order for them."""
        stored = [self._checkpoint.format_of(name) for name in names]
        if not format.keeps_codes or not all(each is not None and each.has_codes for each in stored):
            return ()
        if (key := (names, gate)) not in self._known_forms:
            self._local_shape(names)
            forms = self._stored.forms(names, gate)
            self._known_forms[key] = tuple(each._replace(activations=self._formats.activations) for each in forms)
            for name, each in zip(names, stored if self._known_forms[key] else ()):
                self._kept.codes[each.name if each else ""] += self._stored.size_bytes(name)
        return self._known_forms[key]

    def _is_in_file(self, name: str) -> bool:
        """Whether a tensor's file has this rank's part of it in the wanted dtype, row by row and without padding."""
        layout = self._stored.layout(name)
        axes = layout.out if layout.inner is None else (*layout.out, layout.inner)
        whole = all((part := self._stored.part(axis)).stop - part.start == part.size for axis in axes)
        is_float = self._checkpoint.dtype(name) == self.dtype and self._checkpoint.format_of(name) is None
        return whole and not layout.flipped and is_float

    def _local_shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Of this rank's parts, one below the other. Raises ModelError before memory is taken for what is not there."""
        if names not in self._known_shapes:
            layouts = [self._stored.layout(name) for name in names]
            for name, layout in zip(names, layouts):
                self._require(name, self._stored.whole_shape(name, layout))
            height, inner = sum(self._stored.part(axis).size for layout in layouts for axis in layout.out), layouts[0].inner
            self._known_shapes[names] = (height,) if inner is None else (height, self._stored.part(inner).size)
        return self._known_shapes[names]

    def _fill(self, target: Array, names: tuple[str, ...]) -> None:
        """Copy this rank's parts of the tensors into `target`, one below the other."""
        row = 0
        for name in names:
            for size, piece in self._pieces(name):
                self._place.copy(target[row : row + piece.shape[0]], piece)
                row += size
            self._release(name)

    def _pieces(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """This rank's parts of a tensor in its file, each with its size, which padding makes larger."""
        if self._checkpoint.format_of(name) is not None:
            self._report_read((name,))
            yield from ((some.size, some.floats()) for part in self._stored.parts(name) for some in part.in_pieces())
            return
        layout = self._stored.layout(name)
        for part, rows in self._stored.rows(layout):
            yield part.size, self._read(name, layout, rows)

    def _read(self, name: str, layout: Layout, rows: slice) -> np.ndarray:
        """Rows of a tensor and this rank's columns, [out, in] or [out], in the checkpoint's dtype."""
        ranges: tuple[slice, ...] = (rows,)
        if layout.inner is not None:
            columns = self._stored.part(layout.inner)
            ranges += (slice(columns.start, columns.stop),)
        shape = self._stored.whole_shape(name, layout)
        is_deep = layout.depthwise or layout.kernel != ()
        piece = self._checkpoint.part(name, shape, (rows,) if is_deep else ranges[::-1] if layout.flipped else ranges)
        if is_deep:
            piece = piece.reshape(len(piece), -1)
        recurrent = self._config.recurrent
        share = prod(shape) // (len(layout.out) * (recurrent.key_heads if recurrent is not None and layout.by_state else 1))
        self._report(self._done_bytes + piece.itemsize * share)
        return piece.T if layout.flipped else piece

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless the checkpoint has the weight, of this whole shape."""
        format = self._checkpoint.format_of(name)
        if format is None:
            self._kept.names[name] = shape
            return self._checkpoint.require(name, shape)
        try:
            shapes = dict(zip(format.tensors(name), format.shapes(shape)))
        except ValueError as error:
            raise ModelError(f"{name} of the shape {list(shape)} cannot be in the format {format.name}: {error}") from error
        for each, its_shape in shapes.items():
            self._checkpoint.require(each, its_shape, STORED)
        if self._checkpoint.dtype(name) is None:  # else it is rounded here
            self._kept.stored.setdefault(name, self._checkpoint.stored_dtype(name))
        self._kept.names.update(shapes)

    def _release(self, name: str) -> None:
        format = self._checkpoint.format_of(name)
        for each in (name,) if format is None else format.tensors(name):
            self._checkpoint.release(each)

    def _report_read(self, names: tuple[str, ...]) -> None:
        """Report weights that the checkpoint holds in formats."""
        self._report(self._done_bytes + sum(map(self._stored.size_bytes, names)))

    def _report(self, done_bytes: int) -> None:
        self._done_bytes = min(done_bytes, self._checkpoint.size_bytes)
        if self._progress is not None:
            self._progress(self._done_bytes, self._checkpoint.size_bytes)
