"""Devices: everything a rank's step needs of a GPU besides computing, as one small interface.

Owns the terms: streams have no names here, only an order. Requests are carried out later, in order ("the work"); copies to the
device run beside the work until it joins them. `cuda.py` is the GPU. The tests' implementation does the same on a CPU, late on
purpose, so that everything above this interface runs and is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A point in the work, or a copy beside it."""

    def is_reached(self) -> bool:
        """Whether the point is reached, without waiting."""

    def wait(self) -> None:
        """Wait until the point is reached."""


class Graph(Protocol):
    """Work recorded once, with its addresses and sizes, to be repeated as a whole."""

    def begin(self) -> None:
        """Start recording: work is recorded, not done. No kernel may be loaded and nothing may wait for the device."""

    def end(self) -> None:
        """End recording."""

    def replay(self) -> None:
        """Do the recorded work on the current contents of its addresses."""


@contextmanager
def recording(graph: Graph, latest: Callable[[], Graph] | None = None) -> Iterator[None]:
    """Work until the block ends is recorded, in `graph` and those that the block begins, of which `latest` gives the last. An error
    ends the recording too, so that the device computes again."""
    latest = latest or (lambda: graph)
    graph.begin()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # of a recording that the error has spoilt, or that has ended
            latest().end()
        raise
    latest().end()


class Memory(NamedTuple):
    """Bytes of one device: its total, the free rest, and the peak of this process's tensors since `begin_peak`.

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
        """uint8 memory of the host that the device can copy from and to asynchronously."""

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        """Copy a host buffer to the device beside the work, once `after` is reached. The source must not be written before
        the mark is reached, and the target must not be read before the work has joined it."""

    def beside(self, copy: Callable[[], object], after: Mark | None) -> Mark:
        """Have the copies that `copy` requests, on the device or to it, made beside the work once `after` is reached, in the order
        of all such copies. For their sources and targets the rules of `copy_in` hold."""

    def join(self, mark: Mark) -> None:
        """Order all later work after the mark."""

    def mark(self) -> Mark:
        """The point at which all work requested so far is done."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Mark]:
        """Copies on the host, readable once the mark is reached."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor as a device tensor, without waiting; for occasional transfers."""

    def graph(self) -> Graph:
        """A new graph."""

    def free_unused(self) -> None:
        """Give back what the allocator holds and no tensor uses."""

    def begin_peak(self) -> None:
        """Forget the peak so far."""

    def memory(self) -> Memory:
        """The current figures, after all work is done."""
