"""Products of few rows with weights of four bits (cuda/few_bits.cu), and such weights on a device.

Up to ROWS_MAX rows a product has the order of vnext/kernels/few_bits.py, bit for bit. For more rows the weight becomes floats of
their dtype each time, which torch multiplies by. No GPU has run it yet: `scripts/gpu_check.sh` on one would.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels import few_bits
from vnext.kernels.codes import Codes
from vnext.kernels.cuda.backends import kernel_for
from vnext.kernels.cuda.interface import SCALARS
from vnext.kernels.cuda.rows import CHUNK_BYTES, whole
from vnext.kernels.few_bits import BITS, FewBits

SOURCE = "few_bits.cu"
WARPS, OUTPUTS, ROWS = 4, 4, (1, 2, 4, 8)
ROWS_MAX = 64
WIDENED_ROWS = 4096
"""Outputs that become floats at once."""


def multiply(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, lows: torch.Tensor | None, zero: int, group: int
) -> torch.Tensor:
    """x [T, in] of 16 bits, rows dense, times the weight -> float32 [T, out]."""
    (rows, inputs), outputs = x.shape, words.shape[0]
    result = torch.empty((rows, outputs), dtype=torch.float32, device=x.device)
    if rows:
        together = next((each for each in ROWS if rows <= each), ROWS[-1])
        defines = (("SCALAR", SCALARS[x.dtype]), ("NUMBER", SCALARS[scales.dtype]), ("ROWS", str(together)))
        sizes = (np.int32(rows), np.int32(inputs), np.int32(outputs), np.int32(scales.shape[1]), np.int32(group.bit_length() - 1))
        kernel_for(x.device, SOURCE, "multiply_few_bits", defines)(
            (-(-outputs // (WARPS * OUTPUTS)), -(-rows // together)),
            (32 * WARPS,),
            (
                result, x, words, scales, lows, np.int64(x.stride(0)), *sizes, np.int32(0 if lows is not None else zero),
                whole(CHUNK_BYTES // x.element_size(), x),
            ),
        )  # fmt: skip
    return result


class DeviceFewBits(NamedTuple):
    """FewBits as tensors [out, ...], for activations of `dtype`."""

    words: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None
    zero: int
    inputs: int
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.inputs

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> [T, out]: float32, or of more than ROWS_MAX rows x's dtype."""
        if x.shape[0] <= ROWS_MAX:
            words, scales, lows = self.words, self.scales, self.lows
            found: torch.Tensor = torch.ops.vnext_cuda.multiply_few_bits(x, words, scales, lows, self.zero, self.group)
            return found
        parts = (self._floats(slice(first, first + WIDENED_ROWS)) for first in range(0, len(self.words), WIDENED_ROWS))
        return torch.cat([x.matmul(part.t()) for part in parts], 1)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of the weight -> [N, in] of its dtype."""
        return self._floats(ids)

    def _floats(self, rows: torch.Tensor | slice) -> torch.Tensor:
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=self.words.device)
        codes = (self.words[rows].swapaxes(2, 3)[..., None] >> shifts & 15).flatten(1)[:, : self.inputs].float()
        scales, zero = self.scales[rows].float(), float(self.zero)
        lows = scales * zero if self.lows is None else self.lows[rows].float()
        wide = [each.repeat_interleave(self.group, 1)[:, : self.inputs] for each in (scales, lows)]
        return (codes * wide[0] - wide[1]).to(self.dtype)


def on_host(weight: FewBits, dtype: torch.dtype) -> DeviceFewBits:
    """The same as tensors of the host, for activations of `dtype`."""
    words, scales = (torch.from_numpy(np.ascontiguousarray(each)) for each in (weight.words, weight.scales))
    lows = None if weight.lows is None else torch.from_numpy(np.ascontiguousarray(weight.lows))
    return DeviceFewBits(words, scales, lows, weight.zero, weight.inputs, weight.group, dtype)


def joined(weights: list[FewBits]) -> FewBits:
    """Weights of one form, one below the other."""
    first = weights[0]
    lows = None if first.lows is None else np.concatenate([each.lows for each in weights if each.lows is not None])
    return first._replace(
        words=np.concatenate([each.words for each in weights]), scales=np.concatenate([each.scales for each in weights]), lows=lows
    )


def packed_parts(parts: tuple[Codes, ...]) -> FewBits | None:
    """Codes one below the other; None where these are not all of four bits and of one form."""
    if not all(map(few_bits.is_packable, parts)):
        return None
    found = [few_bits.packed(part) for part in parts]
    forms = {(each.zero, each.group, each.scales.dtype, each.lows is None) for each in found}
    return joined(found) if len(forms) == 1 else None
