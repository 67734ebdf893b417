"""A toy format of weights: 8 bits with a float32 scale for each group of 16 inputs. All that a format needs, in one file.

Checkpoints hold it as `<name>.qweight` and `<name>.group_scales`.
"""

from __future__ import annotations

import numpy as np

from vnext.kernels.codes import Codes, Scales
from vnext.kernels.format import Cut, Format, FormatRow, Shape

GROUP, HALF = 16, 128
ROW = FormatRow("toy8", "toy_format:TOY8", is_stored=True)


class Toy8(Format):
    name = "toy8"
    dtypes = ("I8", "F32")
    group = GROUP
    has_codes = True

    def tensors(self, weight: str) -> tuple[str, ...]:
        stem = weight.removesuffix("weight")
        return (f"{stem}qweight", f"{stem}group_scales")

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, inputs = shape
        if inputs % GROUP:
            raise ValueError(f"{inputs} inputs are no whole groups of {GROUP}")
        return shape, (outputs, inputs // GROUP)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        if columns.start % GROUP or columns.stop % GROUP:
            raise ValueError(f"inputs {columns.start} to {columns.stop} cut a group of {GROUP}")
        return (rows, columns), (rows, slice(columns.start // GROUP, columns.stop // GROUP))

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        return self.codes(part).floats()

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        values, scales = part
        return Codes(values.view(np.uint8) + np.uint8(HALF), 8, Scales(scales), HALF)


TOY8 = Toy8()
