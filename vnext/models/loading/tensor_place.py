"""Where weights go as tensors of torch: on a device, and packed by the operations of its kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vnext.kernels.arrays import as_tensor, torch_dtype
from vnext.kernels.codes import CodesForm
from vnext.kernels.format import Format
from vnext.kernels.table import operations
from vnext.models.loading.host_place import HostPlace, ReadCodes


class TensorPlace:
    """Tensors on one device, by the contract of Place."""

    takes_blocks = False

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._operations, self._host = operations(self._device.type), HostPlace()
        self.is_host = self._device.type == "cpu"

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
        if not self.is_host:
            return torch.zeros(shape, dtype=torch_dtype(dtype), device=self._device)
        found: torch.Tensor = as_tensor(self._host.zeros(shape, dtype))
        return found

    def copy(self, target: torch.Tensor, piece: np.ndarray) -> None:
        target.copy_(as_tensor(piece))

    def take(self, array: np.ndarray) -> Any:
        return array if self.is_host else self.integers(array)

    def integers(self, array: np.ndarray) -> torch.Tensor:
        found: torch.Tensor = as_tensor(array).to(self._device)
        return found

    def pack(self, parts: tuple[Any, ...], gate: str, format: Format, shards: int) -> Any:
        tensors = tuple(map(as_tensor, parts))
        weight = tensors if len(tensors) > 1 or isinstance(parts[0], np.ndarray) else tensors[0]
        if gate:
            return self._operations.pack_gated_weight(weight, gate, format)
        return self._operations.pack_weight(weight, format, shards)

    def pack_codes(self, forms: tuple[CodesForm, ...], read: ReadCodes, dtype: np.dtype, gate: str, shards: int) -> object:
        codes = tuple(read(part, slice(0, form.shape[0])) for part, form in enumerate(forms))
        found = self._operations.pack_codes(codes, torch_dtype(dtype), gate, shards, forms[0].activations)
        return found if self.is_host else moved(found, self._device)

    def pack_experts(self, weights: torch.Tensor, gate: str, format: Format, shards: int) -> Any:
        return self._operations.pack_experts(weights, gate, format, shards)


def moved(weight: Any, device: torch.device) -> Any:
    """A tensor, or a tree of tuples with tensors, on a device."""
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    if not isinstance(weight, tuple):
        return weight
    parts = [moved(each, device) for each in weight]
    return tuple(parts) if type(weight) is tuple else type(weight)(*parts)
