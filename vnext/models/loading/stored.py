"""Weights that a checkpoint holds in a format: parts of them as floats, and as codes of few bits where these stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from vnext.kernels.codes import INPUTS, BlockRows, Codes, CodesForm, FloatRows
from vnext.kernels.cpu.linear import HALF
from vnext.kernels.cpu.native import BLOCK_TYPES, is_built
from vnext.kernels.cpu.packed import codes_bytes
from vnext.kernels.format import Format
from vnext.kernels.formats.floats import FLIPPED, PLAIN
from vnext.kernels.formats.rounded import Rounded
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import (
    AnyAxis,
    Axis,
    Layout,
    LayoutTable,
    Parallel,
    Part,
    axis_part,
    axis_size,
    layout_of,
    shard_count,
    shards_of_layout,
    whole_shape,
)
from vnext.models.loading.checkpoint import Checkpoint
from vnext.models.loading.recording import is_of_layer

Read = TypeVar("Read")

KEYS, VALUES = ".k_proj.weight", ".v_proj.weight"
QUERIES_KEYS_VALUES = Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS
"""The outputs of a weight that makes them all."""

PROBED_ROWS = 32
"""Enough to see what the codes of a weight are made of."""
SHARED_ROWS = 128
"""Outputs that a format may hold in one word or under one scale: no row of others is needed at a multiple of it."""
PIECE_ROWS = 1024
"""As many outputs as become floats at once."""


class StoredPart(NamedTuple):
    """Outputs `rows` and `inputs` of a weight of this whole shape [out, in], which the checkpoint holds in `format`; `size` counts
    the outputs with those that are padding."""

    checkpoint: Checkpoint
    name: str
    format: Format
    shape: tuple[int, ...]
    rows: slice
    inputs: slice
    size: int

    def floats(self) -> np.ndarray:
        """Its numbers, without the padding. Raises ModelError."""
        return self._read(self.format.to_float)[:, self._inside()]

    def codes(self, run: int) -> Codes:
        """The same as codes, with the padding, each `run` inputs with scales of their own. Raises ModelError, and ValueError where
        a group would be divided."""
        return self._read(self.format.codes).inputs(self._inside(), run).padded(self.size)

    def outputs(self, rows: slice, run: int) -> Codes:
        """Some outputs of `codes`, read with those that share words or scales with them."""
        first, end = self.rows.start, self.rows.stop
        start = min(end, max(first, (first + rows.start) // SHARED_ROWS * SHARED_ROWS))
        stop = max(start, min(end, -(-(first + rows.stop) // SHARED_ROWS) * SHARED_ROWS))
        found = self._replace(rows=slice(start, stop), size=max(stop, first + rows.stop) - start).codes(run)
        return found.outputs(slice(first + rows.start - start, first + rows.stop - start))

    def blocks(self, rows: slice, run: int) -> BlockRows | FloatRows | None:
        """The same as the file has it, which the kernels make codes of; None where they cannot, where a block or a group would be
        divided, and for padding."""
        first, last = self.rows.start + rows.start, self.rows.start + rows.stop
        is_cut = self.inputs.start % self.format.group or self.inputs.stop % self.format.group or run % INPUTS
        if not (isinstance(self.format, Rounded) or self.format.name in BLOCK_TYPES) or is_cut or last > self.rows.stop:
            return None
        some = self._replace(rows=slice(first, last))
        if isinstance(self.format, Rounded):
            return some._read(self.format.rows)
        return some._read(lambda part: BlockRows(part[0], self.format.name))

    def probed(self) -> StoredPart:
        """The first few of the outputs."""
        stop = min(self.rows.stop, self.rows.start + PROBED_ROWS)
        return self._replace(rows=slice(self.rows.start, stop), size=stop - self.rows.start)

    def in_pieces(self) -> Iterator[StoredPart]:
        """Some outputs after the others, the last ones with the padding."""
        for first in range(self.rows.start, self.rows.stop, PIECE_ROWS):
            stop = min(self.rows.stop, first + PIECE_ROWS)
            padding = self.size - (self.rows.stop - self.rows.start) if stop == self.rows.stop else 0
            yield self._replace(rows=slice(first, stop), size=stop - first + padding)

    def _wide(self) -> slice:
        """The inputs with those that share a scale with them."""
        group = self.format.group
        return slice(self.inputs.start // group * group, min(-(-self.inputs.stop // group) * group, self.shape[1]))

    def _inside(self) -> slice:
        first = self._wide().start
        return slice(self.inputs.start - first, self.inputs.stop - first)

    def _read(self, read: Callable[[tuple[np.ndarray, ...]], Read]) -> Read:
        name, format = self.name, self.format
        try:
            cuts = format.slices(self.rows, self._wide())
        except ValueError as error:
            raise ModelError(f"{name} in the format {format.name} cannot be cut so for this many ranks: {error}") from error
        tensors = zip(format.tensors(name), format.shapes(self.shape), cuts)
        part = tuple(self.checkpoint.raw(each, shape, cut) for each, shape, cut in tensors)
        try:
            return read(part)
        except ValueError as error:
            raise ModelError(f"{name} in {self.checkpoint.path} cannot be read: {error}; download the model again") from error


class StoredWeights:
    """Where one rank's parts of a checkpoint's weights lie."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, parallel: Parallel, layouts: LayoutTable) -> None:
        """`layout`: of a tensor of this name; `part`: this rank's part of an axis. Both are asked for again and again, and found
        once: `cut`: into how many shards this rank's inputs of a weight of this layout are cut; `whole`: the shape of a whole
        tensor of it. `values`: in what the last outputs of a rounded weight count as held."""
        self._checkpoint, self._config, self._parallel = checkpoint, config, parallel
        self.layout: Callable[[str], Layout] = cache(lambda name: layout_of(name, layouts))
        self.part: Callable[[AnyAxis], Part] = cache(lambda axis: axis_part(axis, config, parallel))
        self._forms: dict[tuple[str, int, int, int], CodesForm] = {}
        self._values: dict[str, Format] = {}
        self._alike: dict[tuple[object, ...], tuple[CodesForm, ...]] = {}
        self._cut: Callable[[Layout], int] = cache(lambda layout: shards_of_layout(layout, config, parallel))
        self._whole: Callable[[Layout], tuple[int, ...]] = cache(lambda layout: whole_shape(layout, config))

    def rows(self, layout: Layout) -> Iterator[tuple[Part, slice]]:
        """This rank's part of each output axis, and its rows of the tensor."""
        if layout.by_state:
            yield from self._rows_by_state(layout)
            return
        above = 0
        for axis in layout.out:
            part = self.part(axis)
            yield part, slice(above + part.start, above + part.stop)
            above += axis_size(axis, self._config)

    def _rows_by_state(self, layout: Layout) -> Iterator[tuple[Part, slice]]:
        """As `rows`, of axes that take turns: of each axis one part for each of this rank's heads of keys."""
        recurrent = self._config.recurrent
        assert recurrent is not None
        sizes = [axis_size(axis, self._config) // recurrent.key_heads for axis in layout.out]
        own = recurrent.key_heads // self._parallel.world_size
        for at, size in enumerate(sizes):
            for head in range(self._parallel.rank * own, (self._parallel.rank + 1) * own):
                start = head * sum(sizes) + sum(sizes[:at])
                yield Part(start=head * size, stop=(head + 1) * size, size=size), slice(start, start + size)

    def shards(self, name: str) -> int:
        """Into how many shards this rank's inputs of a weight are cut."""
        return self._cut(self.layout(name))

    def run(self, name: str) -> int:
        """How many inputs each of them has."""
        inner = self.layout(name).inner
        assert inner is not None
        return self.part(inner).size // self.shards(name)

    def whole_shape(self, name: str, layout: Layout) -> tuple[int, ...]:
        """A tensor's whole shape in its file; no format flips a weight."""
        shape = self._whole(layout)
        return shape[::-1] if layout.flipped and self._checkpoint.format_of(name) is not None else shape

    def parts(self, name: str) -> list[StoredPart]:
        """This rank's parts of a weight that the checkpoint holds in a format."""
        layout, format = self.layout(name), self._checkpoint.format_of(name)
        assert layout.inner is not None and format is not None
        inputs, shape = self.part(layout.inner), self.whole_shape(name, layout)
        some = slice(inputs.start, inputs.stop)
        found = [StoredPart(self._checkpoint, name, format, shape, rows, some, part.size) for part, rows in self.rows(layout)]
        return [*found[:-1], found[-1]._replace(format=self._values.get(name, format))]

    def size_bytes(self, name: str) -> int:
        """The bytes of a weight that the checkpoint holds in a format."""
        format = self._checkpoint.format_of(name)
        return sum(self._checkpoint.size_of(each) for each in (format.tensors(name) if format else ()))

    def round(self, names: tuple[str, ...], products: Format) -> None:
        """Count those of a weight's parts that have no codes as held in what the format of products rounds them to, if it does."""
        if not any(map(self._may_round, names)):
            return
        for name, takes_few in zip(names, self._take_few(names)):
            if self._may_round(name):
                self._round(name, takes_few, products)

    def _may_round(self, name: str) -> bool:
        """Whether it is a weight without codes."""
        held = self._checkpoint.format_of(name)
        has_floats = self._checkpoint.dtype(name) is not None if held is None else not held.has_codes
        return has_floats and self.layout(name).inner is not None

    def _round(self, name: str, takes_few: Sequence[bool], products: Format) -> None:
        held, layout = self._checkpoint.format_of(name), self.layout(name)
        assert layout.inner is not None
        inputs, floats = axis_size(layout.inner, self._config), FLIPPED if layout.flipped else PLAIN
        first, last = (products.rounds(held or floats, inputs, self.run(name), few) for few in (takes_few[0], takes_few[-1]))
        if first is not None:
            self._checkpoint.hold(name, first)
            self._values[name] = last or first

    def _take_few(self, names: tuple[str, ...]) -> list[list[bool]]:
        """Of each of a weight's parts, whether each of its outputs' axes bears the fewest bits: none where these would meet others
        off a multiple of HALF on one of the numbers of ranks that give the same bits, for which the kernels have no order."""
        layouts = [self.layout(name) for name in names]
        found = [[self._takes_few(name)] * len(layout.out) for name, layout in zip(names, layouts)]
        for few, layout in zip(found, layouts):
            if layout.out == QUERIES_KEYS_VALUES:
                few[-1] = False
        joined, axes = [each for few in found for each in few], [axis for layout in layouts for axis in layout.out]
        edges = [at for at, (one, other) in enumerate(pairwise(joined), 1) if one != other]
        count = shard_count(self._config) if edges else 0
        for ranks in (ranks for ranks in range(1, count + 1) if count % ranks == 0):
            rank = msgspec.structs.replace(self._parallel, rank=0, world_size=ranks)
            sizes = [axis_part(axis, self._config, rank).size for axis in axes]
            if any(sum(sizes[:edge]) % HALF for edge in edges):
                return [[False] * len(few) for few in found]
        return found

    def _takes_few(self, name: str) -> bool:
        """Whether a weight bears the fewest bits: a layer's, but what makes values, or keys that stand in for them."""
        stands_in = name.endswith(KEYS) and name.replace(KEYS, VALUES) not in self._checkpoint
        return is_of_layer(name) and not stands_in and not name.endswith(VALUES)

    def forms(self, names: tuple[str, ...], gate: str) -> tuple[CodesForm, ...]:
        """What the codes of a weight of these parts, one below the other, are made of; () where a group would be divided, or the
        kernels have no order for them."""
        kinds = [(self.layout(name), self._checkpoint.format_of(name), self._values.get(name)) for name in names]
        if not all(each.has_one_form for _, *formats in kinds for each in formats if each):
            return self._probed(names, gate)
        key = gate, *kinds
        if key not in self._alike:
            self._alike[key] = self._probed(names, gate)
        return self._alike[key]

    def _probed(self, names: tuple[str, ...], gate: str) -> tuple[CodesForm, ...]:
        run, parts = self.run(names[0]), [part for name in names for part in self.parts(name)]
        try:
            probed = [self._form(part, run) for part in parts]
        except ValueError:
            return ()
        forms = tuple(form._replace(shape=(part.size, form.shape[1])) for part, form in zip(parts, probed))
        return forms if not is_built() or codes_bytes(forms, gate, self.shards(names[0])) else ()

    def _form(self, part: StoredPart, run: int) -> CodesForm:
        key = (part.format.name, part.inputs.start, part.inputs.stop, run)
        if not part.format.has_one_form:
            return part.probed().codes(run).form
        if key not in self._forms:
            self._forms[key] = part.probed().codes(run).form
        return self._forms[key]
