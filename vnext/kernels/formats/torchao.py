"""torchao's numbers of 4 bits, and what else torchao writes that cannot be read, by name. Its int8 and FP8 are those of scaled.py.

    Int4Tensor     _weight_qdata [out, in / 2], of each byte the low half first, signed; _weight_scale and _weight_zero_point
                   [groups, out], floats: a number is `n * scale + zero_point`
Source: quantize_/workflows/int4/int4_tensor.py of torchao 0.18, and pack_int4 and int4_row_quantize_zp of mslk, which makes them.
"""

from __future__ import annotations

import numpy as np

from vnext.kernels.codes import Codes, Scales
from vnext.kernels.format import Cut, Format, Shape, StoredTensors
from vnext.kernels.formats.bits import nibbles
from vnext.kernels.formats.scales import FLOATS, Grid, Stored, finite, has, require

QDATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
SMALLEST = 8
"""What a code is more than its number."""
REFUSED = {
    "_weight_scale_and_zero": "Int4TilePackedTo4dTensor, which lies as one GPU's kernel reads it",
    "_weight_act_pre_scale": "a weight whose activations have a scale of their own",
    "_weight_per_tensor_scale": "NVFP4Tensor",
}
"""By a tensor that only they have."""
REFUSED_DTYPES = {
    (QDATA, "I32"): "Int4PlainInt32Tensor, which lies as one device's kernel reads it", (SCALE, "F8_E4M3"): "NVFP4Tensor",
    (SCALE, "F8_E8M0"): "MXTensor", (SCALE, "U8"): "MXTensor",
}  # fmt: skip
REMEDY = "save the model with Int4WeightOnlyConfig(int4_packing_format='plain') or Int8WeightOnlyConfig"


class TorchaoInt4(Stored):
    """Int4Tensor, for any way to round activations, which are not rounded here."""

    name = "torchao-int4"
    suffixes = (QDATA, SCALE, ZERO)
    has_codes = True

    def __init__(self, grid: Grid) -> None:
        self.grid, self.group = grid, grid.unit

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        if not has(tensors, weight, QDATA):
            return None
        dtypes = {suffix: tensors.stored_dtype(weight.removesuffix("weight") + suffix) for suffix in self.suffixes}
        kinds = [kind for suffix, kind in REFUSED.items() if has(tensors, weight, suffix)]
        if kinds := kinds + [REFUSED_DTYPES[each] for each in dtypes.items() if each in REFUSED_DTYPES]:
            raise ValueError(f"it is torchao's {kinds[0]}; {REMEDY}")
        if dtypes[ZERO] not in FLOATS:
            return None
        packed, scales, zeros = require(tensors, weight, {QDATA: ("I8", "U8"), SCALE: FLOATS, ZERO: FLOATS})
        inputs, (groups, outputs) = 2 * packed[1], scales
        if zeros != scales or outputs != packed[0]:
            which = f"scales {list(scales)} and zero points {list(zeros)}"
            raise ValueError(f"{which} are not of {packed[0]} outputs in groups; {REMEDY}")
        if inputs % (2 * groups):
            raise ValueError(f"{inputs} inputs are no {groups} whole groups")
        return TorchaoInt4(Grid(1, inputs // groups))

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, inputs = shape
        if inputs % self.grid.group:
            raise ValueError(f"{inputs} inputs are no whole groups of {self.grid.group}")
        scales = inputs // self.grid.group, outputs
        return (outputs, inputs // 2), scales, scales

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        if columns.start % 2 or columns.stop % 2:
            raise ValueError(f"inputs {columns.start} to {columns.stop} cut a byte of two")
        outputs, groups = self.grid.cut(rows, columns)
        return (rows, slice(columns.start // 2, columns.stop // 2)), (groups, outputs), (groups, outputs)

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        codes, scales, zeros = _numbers(part)
        groups = codes.reshape(len(codes), scales.shape[1], -1).astype(np.float32) - np.float32(SMALLEST)
        found: np.ndarray = groups * scales[:, :, None] + zeros[:, :, None]
        return found.reshape(codes.shape)

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        codes, scales, zeros = _numbers(part)
        stored = part[1].T if part[1].itemsize == 2 else scales
        return Codes(codes, 4, Scales(np.ascontiguousarray(stored)), lows=Scales(scales * np.float32(SMALLEST) - zeros))


def _numbers(part: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes uint8 [out, in]; scales and zero points float32 [out, groups]. Raises ValueError for those that are not finite."""
    packed, scales, zeros = part
    return nibbles(packed.view(np.uint8)) ^ np.uint8(SMALLEST), finite(scales).T, finite(zeros).T


TORCHAO_INT4 = TorchaoInt4(Grid(1, 128))
