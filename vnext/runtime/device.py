"""Devices: all that a rank's step needs of a GPU beside computing, as one small face.

Owns the words: streams are not named, only their order. What is asked for is done later, in order ("the work"); copies to
the device go beside it until the work joins them. `device_cuda.py` is the GPU; the tests' twin does the same on a CPU, late on
purpose, so that everything above this face runs and is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A point in the work, or a copy beside it."""

    def is_reached(self) -> bool:
        """Whether it is, without waiting."""

    def wait(self) -> None:
        """Until it is."""


class Graph(Protocol):
    """Work recorded once, with its addresses and sizes, to be done again as one."""

    def begin(self) -> None:
        """From here on work is recorded, not done. No kernel may be loaded and nothing may wait for the device."""

    def end(self) -> None:
        """Recording is over."""

    def replay(self) -> None:
        """Do it, on what lies at its addresses then."""


class Memory(NamedTuple):
    """Bytes of one device: all of it, what nobody has taken, and what this process's tensors took at most since `begin_peak`.

    `cached` is what the allocator holds in all, tensors or not; `peak` and `cached` are this process's.
    """

    total: int
    free: int
    cached: int
    peak: int


class Device(Protocol):
    """One rank's device."""

    torch_device: torch.device

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """uint8 memory of the host that copies to and from the device leave from and arrive at by themselves."""

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        """Copy a host buffer to the device beside the work, once `after` is reached. Nobody may write the source before
        the mark is reached, nor read the target before the work has joined it."""

    def join(self, mark: Mark) -> None:
        """What is asked for from now on comes after the mark."""

    def mark(self) -> Mark:
        """The point where all work that was asked for is done."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Mark]:
        """Copies on the host, to be read once the mark is reached."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor as one of the device, without waiting: for what is sent now and then."""

    def graph(self) -> Graph:
        """A new one."""

    def begin_peak(self) -> None:
        """Forget the peak so far."""

    def memory(self) -> Memory:
        """The figures now, after all work is done."""
