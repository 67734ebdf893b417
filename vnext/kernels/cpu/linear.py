"""Matrix products with packed weights.

Owns packed weights: made once at loading, in the order in which the kernel reads them. A product accumulates each
output over the inputs in one order, so a row's result does not depend on how many rows there are, nor on the threads.
Inputs in shards are summed shard by shard and the sums added by one tree (kernels/shards.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from vnext.kernels.arrays import Array, address, dtype_name, host_dtype, strides_of, torch_dtype
from vnext.kernels.codes import INPUTS, SHORTEST, BlockRows, Codes, CodesForm, FloatRows, ScaleForm, Scales
from vnext.kernels.cpu.memory import Arena
from vnext.kernels.cpu.native import BLOCK_TYPES, GATES, KINDS, NUMBER_KINDS, PIECES_MAX, Kind, kernels
from vnext.kernels.format import BF16, INT8

if TYPE_CHECKING:
    import torch

CONTAINERS = (8, 6, 5, 4, 3, 2)
"""Bits of codes that the kernels multiply by."""
MULTIPLIED = {INT8: Kind.INT8, BF16: Kind.BFLOAT16}
HALF = 16
"""Outputs of half a panel, which are of one form."""
RANGE_CODES = 2**21
"""As many codes of a weight are unpacked at once, in whole outputs."""


class PackedLinear(NamedTuple):
    """A weight [outputs, inputs] with its bias in one buffer. `width` comes out: half the outputs of a gated one."""

    buffer: np.ndarray
    address: int
    inputs: int
    outputs: int
    width: int
    dtype: np.dtype
    gate: str
    shards: int


def pack(
    weight: Array | tuple[Array, ...],
    bias: Array | None = None,
    *,
    gate: str = "",
    shards: int = 1,
    arena: Arena | None = None,
) -> PackedLinear:
    """Pack weight [out, in] (float32 or bfloat16, rows dense) and bias [out] of the same dtype, dense.

    The weight may come in parts of one dtype, one below the other: they are read where they are.
    With a `gate` the weight holds gate, then up, [2 * I, in], and a product is act(gate) * up, [T, I]. `shards` divide the inputs
    evenly. Buffers come from `arena`.
    """
    parts = weight if isinstance(weight, tuple) else (weight,)
    places = np.array([(address(part), part.shape[0], strides_of(part)[0]) for part in parts], dtype=np.int64)
    outputs, inputs, given = int(places[:, 1].sum()), parts[0].shape[1], parts[0].dtype
    buffer = (arena or Arena()).take(packed_bytes((outputs, inputs), given, gate=gate, shards=shards))
    kernels.pack_linear(
        places.ctypes.data, KINDS[given], None if bias is None else address(bias), outputs, inputs, GATES[gate], shards,
        buffer.ctypes.data,
    )  # fmt: skip
    return packed_in(buffer, (outputs, inputs), given, gate=gate, shards=shards)


def packed_bytes(shape: tuple[int, int], dtype: Any, *, gate: str = "", shards: int = 1) -> int:
    """The size of the buffer of a weight of this shape [out, in], given in this dtype."""
    return int(kernels.packed_bytes(*shape, KINDS[dtype], GATES[gate], shards))


def packed_in(buffer: np.ndarray, shape: tuple[int, int], dtype: Any, *, gate: str = "", shards: int = 1) -> PackedLinear:
    """The weight of this shape [out, in] that `pack` or `pack_codes` has put into this buffer, uint8, with these arguments."""
    outputs, inputs = shape
    width = outputs // 2 if gate else outputs
    return PackedLinear(buffer, address(buffer), inputs, outputs, width, host_dtype(dtype_name(dtype)), gate, shards)


def pack_codes(
    codes: Codes | tuple[Codes, ...],
    *,
    gate: str = "",
    shards: int = 1,
    bias: Array | None = None,
    dtype: Any = "bfloat16",
    arena: Arena | None = None,
    activations: str = INT8,
) -> PackedLinear:
    """Pack a weight of few bits, or its parts one below the other, for activations of `dtype`, with bias [out] of the same dtype.

    Otherwise as `pack`. `activations`: what these become before they are multiplied, INT8 or BF16. Parts may differ in form; such
    ones meet at a multiple of 16 outputs, or where gate and up do. Raises ValueError where they do not, or where a form is none
    that the kernels have.
    """
    parts = (codes,) if isinstance(codes, Codes) else codes
    forms, together = tuple(part.form._replace(activations=activations) for part in parts), sum(len(part.codes) for part in parts)
    return pack_ranges(
        forms, lambda part, rows: parts[part].outputs(rows), gate=gate, shards=shards, bias=bias, dtype=dtype, arena=arena,
        together=together,
    )  # fmt: skip


def pack_ranges(
    forms: tuple[CodesForm, ...],
    read: Callable[[int, slice], Codes | BlockRows | FloatRows],
    *,
    gate: str = "",
    shards: int = 1,
    bias: Array | None = None,
    dtype: np.dtype | torch.dtype | str = "bfloat16",
    arena: Arena | None = None,
    together: int = 0,
) -> PackedLinear:
    """As `pack_codes` of parts of these forms, of which `read` gives the outputs of a part, about as many as `together` at a time,
    or RANGE_CODES numbers: memory holds the codes of those alone, and what is packed. Raises ValueError for a scale of blocks that
    is not finite."""
    fields, width = _fields(forms, gate, shards), HALF if gate else 2 * HALF
    outputs, inputs = sum(form.shape[0] for form in forms), forms[0].shape[1]
    buffer = (arena or Arena()).take(codes_bytes(forms, gate=gate, shards=shards))
    own, step = outputs // 2 if gate else outputs, max(1, (together or RANGE_CODES // inputs) // (2 * HALF))
    count, types = -(-own // width), np.zeros(len(forms), np.int64)
    for first in range(0, count, step):
        last = min(first + step, count)
        inside = slice(first * width, min(last * width, own))
        spans = (inside, slice(own + inside.start, own + inside.stop)) if gate else (inside,)
        kept = _read_into(fields, types, forms, spans, read)
        is_finite = kernels.pack_codes(
            fields.ctypes.data, types.ctypes.data, len(fields), None if bias is None else address(bias), KINDS[dtype], inputs,
            KINDS[dtype], MULTIPLIED[forms[0].activations], GATES[gate], shards, first, last, buffer.ctypes.data,
        )  # fmt: skip
        del kept
        if not is_finite:
            raise ValueError("it has a scale that is not finite")
    return packed_in(buffer, (outputs, inputs), dtype, gate=gate, shards=shards)


def _read_into(
    fields: np.ndarray,
    types: np.ndarray,
    forms: tuple[CodesForm, ...],
    spans: tuple[slice, ...],
    read: Callable[[int, slice], Codes | BlockRows | FloatRows],
) -> list[np.ndarray]:
    """Put into `fields` where the parts would begin of which the rows in `spans` of the weight are in memory, and into `types` the
    type of their blocks. These arrays must stay while the fields are used."""
    above, kept = 0, list[np.ndarray]()
    for part, (form, row) in enumerate(zip(forms, fields, strict=True)):
        height = form.shape[0]
        inside = [(max(span.start - above, 0), min(span.stop - above, height)) for span in spans]
        inside = [each for each in inside if each[0] < each[1]]
        above += height
        if not inside:
            continue
        rows = slice(min(start for start, _ in inside), max(stop for _, stop in inside))
        codes = read(part, rows)
        codes = rounded(codes) if isinstance(codes, FloatRows) else codes
        types[part] = BLOCK_TYPES[codes.type] if isinstance(codes, BlockRows) else 0
        if isinstance(codes, BlockRows):
            kept.append(codes.rows)
            row[0], row[2] = address(codes.rows) - rows.start * codes.rows.strides[0], codes.rows.strides[0]
            continue
        assert codes.form == form._replace(shape=codes.codes.shape, activations=INT8) and len(codes.codes) == rows.stop - rows.start
        for place, numbers in zip((0, 6, 8, 11, 13), (codes.codes, *codes.scales, *(codes.lows or ())), strict=False):
            if numbers is not None:
                kept.append(numbers if place == 0 and numbers.strides[1] == 1 else np.ascontiguousarray(numbers))
                stride = kept[-1].strides[0] if place == 0 else numbers.shape[1] * numbers.itemsize
                row[place] = address(kept[-1]) - rows.start * stride
                row[2] = stride if place == 0 else row[2]
    return kept


def rounded(floats: FloatRows) -> Codes:
    """The codes of such outputs. Raises ValueError for a scale that is not finite."""
    (count, inputs), bits = floats.rows.shape, floats.bits
    rows, codes = np.ascontiguousarray(floats.rows), np.empty((count, inputs), np.uint8)
    scales = np.empty((count, inputs // INPUTS), ml_dtypes.bfloat16)
    kernels.round_groups(KINDS[rows.dtype], rows.ctypes.data, scales.size, bits, codes.ctypes.data, scales.ctypes.data)
    if not np.isfinite(scales).all():
        raise ValueError("it has a number or a scale that is not finite")
    return Codes(codes, bits, Scales(scales), 2 ** (bits - 1))


def codes_bytes(forms: CodesForm | tuple[CodesForm, ...], *, gate: str = "", shards: int = 1) -> int:
    """The size of the buffer of a weight whose parts have these forms. Raises ValueError as `pack_codes` does."""
    forms = (forms,) if isinstance(forms, CodesForm) else forms
    fields = _fields(forms, gate, shards)
    return int(kernels.codes_bytes(fields.ctypes.data, len(fields), forms[0].shape[1], GATES[gate], shards))


def _fields(forms: tuple[CodesForm, ...], gate: str, shards: int) -> np.ndarray:
    """int64 [parts, 16]: a CodesPart of kernels.h for each, without addresses."""
    inputs, first, up = forms[0].shape[1], 0, sum(form.shape[0] for form in forms) // 2 if gate else 0
    for before, form in zip((forms[0], *forms), forms, strict=False):
        _check_form(form, inputs, shards)
        if before[1:] != form[1:] and (first - up if first >= up else first) % HALF:
            raise ValueError(f"parts of unlike forms meet at output {first} of a weight, which is no multiple of {HALF}")
        first += form.shape[0]
    if len(forms) > PIECES_MAX:
        raise ValueError(f"a weight has {len(forms)} parts; the kernels take {PIECES_MAX}")
    return np.array(
        [
            (0, form.shape[0], inputs, form.bits, form.zero, form.group, *_scale_fields(form.scales), *_scale_fields(form.lows))
            for form in forms
        ],
        dtype=np.int64,
    )


def _scale_fields(form: ScaleForm | None) -> tuple[int, ...]:
    return (0, -1, 0, 0, 0) if form is None else (0, NUMBER_KINDS[form.parts], 0, NUMBER_KINDS[form.spans], form.span)


def _check_form(form: CodesForm, inputs: int, shards: int) -> None:
    """Raises ValueError for what the kernels have no order for."""
    own, group = inputs // shards, form.group
    lengths = [group, *(scale.span for scale in (form.scales, form.lows) if scale is not None and scale.span)]
    is_whole = all(inputs % each == 0 and (own % each == 0 or each % own == 0) for each in lengths)
    if form.bits not in CONTAINERS or form.shape[1] != inputs or inputs % shards or not is_whole:
        raise ValueError(f"codes of {form} in {shards} shards of inputs have no place in the kernels' panels")
    if group != SHORTEST and group % INPUTS and group < own:
        raise ValueError(f"a group of {group} inputs is neither {SHORTEST} nor a multiple of {INPUTS}")


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    *,
    apart: bool = False,
) -> torch.Tensor:
    """x [T, inputs] of the packed dtype, rows dense -> [T, width] of `dtype`: the packed one, or float32 for logits.

    `bias` [width] of the result's dtype, dense, is added to the rounded product of a weight without gate, as `add_` would.
    `apart` leaves out the activation of a weight with a gate: gate, then up, [T, outputs].
    """
    rows, width = x.shape[0], packed.outputs if apart else packed.width
    result = x.new_empty((rows, width), dtype=dtype or x.dtype)
    kernels.linear(
        x.data_ptr(), x.stride(0), rows, packed.address, None if bias is None else bias.data_ptr(),
        result.data_ptr(), width, KINDS[dtype or x.dtype], apart,
    )  # fmt: skip
    return result


def head_products(x: torch.Tensor, weights: list[PackedLinear]) -> torch.Tensor:
    """x [T, H, inputs], its last axis dense, head by head by weights [out, inputs] of floats -> [T, H, out]."""
    result = x.new_empty((*x.shape[:2], weights[0].outputs))
    places = np.array([weight.address for weight in weights], dtype=np.int64)
    kernels.head_products(
        KINDS[x.dtype], x.data_ptr(), x.stride(0), x.stride(1), x.shape[0], places.ctypes.data, len(weights), result.data_ptr(),
        weights[0].outputs,
    )  # fmt: skip
    return result


def rows_of(packed: PackedLinear, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """[N, inputs]: rows `ids` int64 [N], counted from `first`, of a weight that is neither gated nor in shards; zeros outside it.

    Those of codes are the numbers that it stands for, rounded to the dtype of its activations.
    """
    result = ids.new_empty((ids.shape[0], packed.inputs), dtype=torch_dtype(packed.dtype))
    kernels.packed_rows(ids.data_ptr(), ids.shape[0], first, packed.address, result.data_ptr())
    return result
