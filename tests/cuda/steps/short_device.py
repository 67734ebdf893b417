"""A device whose memory another process takes: the twin over the shim's allocator (shim/device_memory.cc)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from device_twin import Roomy, TwinMark
from host_shim import SHIM, alone, compiler, run_compiler

from vnext.runtime.gpu.device import Mark
from vnext.sim.rng import Rng

IN_A_ROW, SPREAD, REST = 6, 100, 400
"""Refusals that come one behind the other, because an engine ends where a step that cannot be smaller lacks memory nine times in a
row; between how many requests each of them comes; and requests of more than a step, which are granted behind them."""


class DeviceMemory:
    """The allocator of this process's tensors while it `serves`."""

    def __init__(self, folder: Path) -> None:
        torch_folder, library = Path(torch.__file__).parent, folder / "device_memory.so"
        flags = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-I{torch_folder / 'include'}")
        with alone(library):
            if not library.exists():
                source = SHIM / "device_memory.cc"
                run_compiler((compiler(), *flags, str(source), f"-L{torch_folder / 'lib'}", "-lc10"), library, source.name)
        self._library = ctypes.CDLL(str(library))
        self._library.memory_leave.argtypes = self._library.memory_refuse.argtypes = (ctypes.c_int64,)
        for name in ("held", "peak", "refused"):
            self._library[f"memory_{name}"].restype = ctypes.c_int64

    @contextmanager
    def serving(self) -> Iterator[None]:
        """It forgets peak and refusals first."""
        self._library.memory_begin()
        try:
            yield
        finally:
            self._library.memory_end()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """What this thread asks for here is pinned memory of the host."""
        self._library.memory_pinned(True)
        try:
            yield
        finally:
            self._library.memory_pinned(False)

    def leave(self, free_bytes: int) -> None:
        """Leave so many bytes beside what is held now; -1: all."""
        self._library.memory_leave(free_bytes)

    def refuse(self, behind: int) -> None:
        """Refuse one request, behind so many others; -1: none."""
        self._library.memory_refuse(behind)

    def read(self, name: str) -> int:
        """Bytes that are "held" now, or were at the "peak"; how often it "refused"."""
        return int(self._library[f"memory_{name}"]())


class ShortDevice(Roomy):
    """Mutable. From `shrink` on a request of a step is refused `left` times: which one comes next is chosen when the engine has given
    a step up."""

    def __init__(self, memory: DeviceMemory, seed: int) -> None:
        super().__init__()
        self._memory, self._rng, self.left = memory, Rng(seed), 0

    def shrink(self, count: int) -> None:
        self.left = count
        self._refuse_next()

    def _refuse_next(self) -> None:
        rest = 0 if self.left % IN_A_ROW else REST
        self._memory.refuse(rest + self._rng.below(SPREAD) if self.left > 0 else -1)

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        with self._memory.pinned():
            return super().host_buffer(size_bytes)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], TwinMark]:
        with self._memory.pinned():
            return super().fetch(tensors)

    def beside(self, copy: Callable[[], object], after: Mark | None) -> TwinMark:
        """Asks for memory when copies are requested, as a GPU's upload among them does."""
        torch.empty(1, dtype=torch.uint8)
        return super().beside(copy, after)

    def free_unused(self) -> None:
        self.left -= 1
        self._refuse_next()
