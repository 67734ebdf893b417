"""Matrix products with packed weights.

Owns packed weights: made once at loading, in the order in which the kernel reads them. A product accumulates each
output over the inputs in one order, so a row's result does not depend on how many rows there are, nor on the threads.
Inputs in shards are summed shard by shard and the sums added by one tree (kernels/shards.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, address, dtype_name, host_dtype, strides_of, torch_dtype
from vnext.kernels.cpu.memory import Arena
from vnext.kernels.cpu.native import GATES, KINDS, Kind, module
from vnext.kernels.format import Format
from vnext.kernels.formats.floats import PLAIN

if TYPE_CHECKING:
    import torch


class PackedLinear(NamedTuple):
    """A weight [outputs, inputs] with its bias in one buffer. `width` comes out: half the outputs of a gated one."""

    buffer: np.ndarray
    address: int
    inputs: int
    outputs: int
    width: int
    dtype: np.dtype
    gate: str
    format: Format
    shards: int


def pack(
    weight: Array | tuple[Array, ...],
    bias: Array | None = None,
    *,
    gate: str = "",
    format: Format = PLAIN,
    shards: int = 1,
    arena: Arena | None = None,
) -> PackedLinear:
    """Pack weight [out, in] (float32 or bfloat16, rows dense) and bias [out] of the same dtype, dense.

    The weight may come in parts of one dtype, one below the other: they are read where they are.
    With a `gate` the weight holds gate, then up, [2 * I, in], and a product is act(gate) * up, [T, I]. `format`: one that has
    panels for this dtype. `shards` divide the inputs evenly. Buffers come from `arena`.
    """
    parts = weight if isinstance(weight, tuple) else (weight,)
    places = np.array([(address(part), part.shape[0], strides_of(part)[0]) for part in parts], dtype=np.int64)
    outputs, inputs, given = int(places[:, 1].sum()), parts[0].shape[1], parts[0].dtype
    buffer = (arena or Arena()).take(packed_bytes((outputs, inputs), given, gate=gate, format=format, shards=shards))
    module().pack_linear(
        places.ctypes.data, KINDS[given], None if bias is None else address(bias), outputs, inputs, _kind(format, given),
        GATES[gate], shards, buffer.ctypes.data,
    )  # fmt: skip
    return packed_in(buffer, (outputs, inputs), given, gate=gate, format=format, shards=shards)


def packed_bytes(shape: tuple[int, int], dtype: Any, *, gate: str = "", format: Format = PLAIN, shards: int = 1) -> int:
    """The size of the buffer of a weight of this shape [out, in], given in this dtype."""
    return int(module().packed_bytes(*shape, _kind(format, dtype), GATES[gate], shards))


def packed_in(
    buffer: np.ndarray, shape: tuple[int, int], dtype: Any, *, gate: str = "", format: Format = PLAIN, shards: int = 1
) -> PackedLinear:
    """The weight of this shape [out, in] and dtype that `pack` has put into this buffer, uint8, with these arguments."""
    outputs, inputs = shape
    packed_dtype, width = host_dtype(format.activations(dtype_name(dtype))), outputs // 2 if gate else outputs
    return PackedLinear(buffer, address(buffer), inputs, outputs, width, packed_dtype, gate, format, shards)


def _kind(format: Format, dtype: Any) -> Kind:
    """How the module numbers the format's panels."""
    return Kind[format.panels(dtype_name(dtype)).upper()]


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
    module().linear(
        x.data_ptr(), x.stride(0), rows, packed.address, None if bias is None else bias.data_ptr(),
        result.data_ptr(), width, KINDS[dtype or x.dtype], apart,
    )  # fmt: skip
    return result


def rows_of(packed: PackedLinear, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """[N, inputs]: rows `ids` int64 [N], counted from `first`, of a weight that is neither gated nor in shards; zeros outside it.

    Those of an int8 one are scaled and rounded to bfloat16.
    """
    result = ids.new_empty((ids.shape[0], packed.inputs), dtype=torch_dtype(packed.dtype))
    module().packed_rows(ids.data_ptr(), ids.shape[0], first, packed.address, result.data_ptr())
    return result
