"""Weights of few bits as plain torch multiplies by them: the plain form of the CPU kernels' products, by kernels/codes.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.arrays import as_array, as_tensor
from vnext.kernels.codes import Codes, sums
from vnext.kernels.format import INT8

if TYPE_CHECKING:
    import torch


class CodesWeight(NamedTuple):
    """Parts [out, in] one below the other, for activations of `dtype`, which are multiplied as `activations`."""

    parts: tuple[Codes, ...]
    dtype: torch.dtype
    activations: str = INT8

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of all parts."""
        return sum(len(part.codes) for part in self.parts), self.parts[0].codes.shape[1]

    def shard(self, inputs: slice) -> CodesWeight:
        """The weight of some inputs."""
        return self._replace(parts=tuple(part.inputs(inputs) for part in self.parts))

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> float32 [T, out]."""
        rows = as_array(x.float().contiguous())
        found: torch.Tensor = as_tensor(np.concatenate([sums(rows, part, self.activations) for part in self.parts], 1))
        return found

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of the weight -> [N, in] of its dtype."""
        found: torch.Tensor = as_tensor(np.concatenate([part.floats() for part in self.parts])[ids.numpy()]).to(self.dtype)
        return found
