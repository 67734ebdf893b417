"""Int4: whole numbers of 4 bits with a scale for each group of inputs, rounded as a weight of floats is loaded.

The numbers are those that `vnext quantize --scheme w4a16` writes with such groups. On a CPU they stay codes of few bits.
"""

from __future__ import annotations

import numpy as np

from vnext.kernels.codes import Codes
from vnext.kernels.format import Format
from vnext.kernels.formats.floats import Floats
from vnext.kernels.formats.rounding import to_integers
from vnext.kernels.formats.scales import coded

BITS, HALF = 4, 8
GROUPS = (64, 32)


class Rounded4(Format):
    """A weight of floats in a checkpoint, as if it were held in groups of so many inputs."""

    name = "int4"
    has_codes = True

    def __init__(self, group: int) -> None:
        self.group = group

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        return self.codes(part).floats()

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        weight = part[0].astype(np.float32)
        if not np.isfinite(weight).all():
            raise ValueError("it has weights that are not finite, which cannot be quantised")
        rounded = to_integers(weight, BITS, self.group, part[0].dtype)
        return coded((rounded.numbers + np.int8(HALF)).view(np.uint8), BITS, rounded.scales, HALF)


class Int4(Floats):
    """What the loader asks of products: `rounds` gives the format of a weight of floats."""

    def __init__(self) -> None:
        super().__init__("int4", keeps_codes=True)

    def rounds(self, inputs: int) -> Format | None:
        return next((Rounded4(group) for group in GROUPS if inputs % group == 0), None)


INT4 = Int4()
