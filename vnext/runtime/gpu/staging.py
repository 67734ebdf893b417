"""Staging: packs the host's part of a step into one block and copies it to the device beside the work.

Owns the layout of a block and a small ring of buffers, each a pinned half on the host and its counterpart on the device, so that
the next step's block is written and copied while the device still computes this one. Marks enforce two rules: the host's half
of a buffer is rewritten only after its copy, the device's half only after the work that reads it. A new device half may lie
where pending work still has tensors that this process has already dropped, so it is written after all of that work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vnext.runtime.gpu.device import Device, Mark

ALIGNMENT_BYTES = 16
BUFFER_BYTES_MIN = 2**16
TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class Layout:
    """Named runs of numbers in one block of bytes, each aligned. `fields`: name, numpy dtype, count."""

    def __init__(self, fields: Sequence[tuple[str, np.dtype | type[np.generic], int]]) -> None:
        self._places: dict[str, tuple[int, int, np.dtype]] = {}
        end = 0
        for name, dtype, count in fields:
            size = count * np.dtype(dtype).itemsize
            self._places[name] = (end, end + size, np.dtype(dtype))
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.size_bytes = end

    def arrays(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a block uint8 [size_bytes or more], as views."""
        return {name: block[begin:end].view(dtype) for name, (begin, end, dtype) in self._places.items()}

    def tensors(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """As `arrays`, for a tensor."""
        return {
            name: block[begin:end].view(TORCH_DTYPES[dtype]) for name, (begin, end, dtype) in self._places.items()
        }


class Buffer:
    """A pair of halves, and marks for the copy to it and the work that reads it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.host = self.here = torch.empty(0, dtype=torch.uint8)
        self.copied: Mark | None = None
        self.read: Mark | None = None

    def make_room(self, size_bytes: int) -> None:
        """Make both halves at least `size_bytes` large; afterwards the host's half may be written."""
        if self.copied is not None:
            self.copied.wait()
        if self.host.shape[0] < size_bytes:
            room = max(BUFFER_BYTES_MIN, 2 * size_bytes)
            here = torch.empty(room, dtype=torch.uint8, device=self._device.torch_device)
            self.host, self.here = self._device.host_buffer(room), here  # both halves, or none where memory lacks
            self.read = self._device.mark()


class Staging:
    """Blocks in transit: `send`, use the result in the work, then `release`. One thread."""

    def __init__(self, device: Device, buffer_count: int) -> None:
        """`buffer_count`: the steps that may be in transit at once, plus one that is being written."""
        self._device = device
        self._buffers = [Buffer(device) for _ in range(buffer_count)]
        self._next = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays (one dimension; int64, int32, float32) on the device, readable by the work until `release`."""
        layout = Layout([(name, array.dtype, array.size) for name, array in arrays.items()])
        buffer = self._buffers[self._next]
        buffer.make_room(layout.size_bytes)
        for name, place in layout.arrays(buffer.host.numpy()).items():
            place[:] = arrays[name]
        size = layout.size_bytes
        buffer.copied = self._device.copy_in(buffer.here[:size], buffer.host[:size], buffer.read)
        self._device.join(buffer.copied)
        return layout.tensors(buffer.here)

    def release(self) -> None:
        """All work that reads the last sent block has been requested."""
        self._buffers[self._next].read = self._device.mark()
        self._next = (self._next + 1) % len(self._buffers)
