"""The host shim's backend: sources of `cuda/` compiled by the C++ compiler and run on CPU tensors.

Owns the build and the calling form, which is that of a GPU. A kernel that does what no GPU defines raises KernelError.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vnext.kernels.cuda.compiled import Launcher, address_of
from vnext.kernels.cuda.interface import Argument, Arguments, Defines, sources, three

SHIM = Path(__file__).parent / "shim"
FLAGS = ("-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
EXPORTED = re.compile(r'extern "C" __global__ (?:void )?(?:__launch_bounds__\([^)]*\)\s*)?(?:void )?(\w+)\(')

REVERSE_THREADS, REVERSE_BLOCKS, EARLY_COPIES, SHUFFLED, STRAGGLING, SEED_SHIFT = 1, 2, 4, 8, 16, 5
"""Bits of an order, as shim/block.h has them; the rest of it is the seed of SHUFFLED and STRAGGLING."""
ORDERS = (0, REVERSE_THREADS, REVERSE_BLOCKS | EARLY_COPIES, SHUFFLED | 7 << SEED_SHIFT | EARLY_COPIES)
"""Four ways of carrying out a launch in which no correct kernel may differ."""
MOST = (2**31 - 1, 65535, 65535, 1024, 1024, 64)
"""Blocks of a grid and threads of a block, in each direction; threads in all as in the first."""
SHARED_BYTES_MOST = 227 * 1024
"""Of a block on sm_90 and sm_100; sm_80 has 163 KiB."""


class KernelError(RuntimeError):
    """A kernel deadlocked, or used a barrier, a warp or an instruction as no GPU allows."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("c++")


def expect_limits(name: str, grid: Sequence[int], block: Sequence[int], shared_mem: int) -> None:
    """Raise KernelError for a launch that a GPU refuses: of no blocks, of too many, or with too much shared memory."""
    if not all(1 <= size <= most for size, most in zip((*grid, *block), MOST, strict=True)) or math.prod(block) > MOST[3]:
        raise KernelError(f"{name}: no GPU takes a grid of {tuple(grid)} blocks of {tuple(block)} threads")
    if shared_mem > SHARED_BYTES_MOST:
        raise KernelError(f"{name}: no GPU gives a block {shared_mem} bytes of shared memory")


class HostKernel:
    """One exported kernel. `order` and `workers` (OS threads) may be changed between calls."""

    def __init__(self, library: ctypes.CDLL, name: str, backend: HostBackend) -> None:
        self._launch = library[f"{name}__launch"]
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
        self._name, self._backend, self.library = name, backend, library

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument], *, shared_mem: int = 0
    ) -> None:
        values = Arguments(arguments)
        self.launch(three(grid), three(block), values.address, shared_mem)

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], pointers: int, shared_mem: int) -> None:
        """With the address of the pointers to the arguments."""
        shape = (ctypes.c_uint * 6)(*grid, *block)
        expect_limits(self._name, grid, block, shared_mem)
        order, workers = self._backend.order, self._backend.workers
        error = self._launch(ctypes.addressof(shape), shared_mem, workers, order, pointers)
        if error is not None:
            raise KernelError(f"{self._name}: {error.decode()}")

    def prepare(self, shared_mem: int) -> tuple[int, int]:
        """For launches from C++: a handle that `HostLauncher` knows."""
        self._backend.handles[id(self)] = self
        return id(self), SHARED_BYTES_MOST


class HostLauncher:
    """cuLaunchKernel's form over the shim's kernels, for the compiled operations."""

    FORM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)

    def __init__(self, backend: HostBackend) -> None:
        self._backend, self._said, self.launches = backend, "", 0
        self._function = self.FORM(self.launch)

    def launch(self, handle: int, *rest: int) -> int:
        *sizes, shared_mem, _, pointers, _ = rest
        self.launches += 1
        try:
            self._backend.handles[handle].launch(tuple(sizes[:3]), tuple(sizes[3:]), pointers, shared_mem)
        except KernelError as error:
            self._said = str(error)
            return 1
        return 0

    def launcher(self) -> Launcher:
        """As `compiled.serve` takes it; this object must live as long."""
        return Launcher(address_of(self._function), 0, lambda code: self._said)


class HostBackend:
    """Compiles into a folder, one library for each source, set of macros and flags.

    `precompile`: the shim beforehand, which takes as long as three libraries and then half off each.
    """

    def __init__(
        self, folder: Path, flags: Sequence[str] = ("-O1",), include: Path | None = None, precompile: bool = False
    ) -> None:
        self._precompile = precompile
        self._folder, self._flags, self._include = folder, tuple(flags), include or sources()
        self._libraries: dict[tuple[str, Defines], ctypes.CDLL] = {}
        self.handles: dict[int, HostKernel] = {}
        self.order, self.workers = 0, 1

    def kernel(self, source: str, name: str, defines: Defines) -> HostKernel:
        """A kernel of `source`; raises RuntimeError with the compiler's words where it does not compile."""
        key = (source, defines)
        if key not in self._libraries:
            self._libraries[key] = ctypes.CDLL(str(self.build(source, defines)))
        return HostKernel(self._libraries[key], name, self)

    def build(self, source: str, defines: Defines) -> Path:
        """The library of a source."""
        path = self._include / source
        names = EXPORTED.findall(path.read_text())
        text = "\n".join(['#include "shim.h"', f'#include "{path}"', *(f"SHIM_EXPORT({name})" for name in names), ""])
        options = (*FLAGS, *self._flags, *(f"-D{name}={value}" for name, value in defines))
        digest = hashlib.sha256(repr((text, options)).encode()).hexdigest()[:16]
        library = self._folder / f"{path.stem}-{digest}.so"
        with alone(library):
            if not library.exists():
                self._compile(text, options, source, library)
        return library

    def _compile(self, text: str, options: Sequence[str], source: str, library: Path) -> None:
        generated = library.with_suffix(".cpp")
        generated.write_text(text)
        first = (f"-I{self.precompiled()}",) if self._precompile else ()
        folders = (f"-I{SHIM}", f"-I{self._include}", f"-I{sources()}")
        run_compiler((compiler(), *options, *first, *folders, str(generated)), library, source)

    def precompiled(self) -> Path:
        """A folder with the shim compiled by the same flags."""
        flags = (*FLAGS, *self._flags)
        folder = self._folder / f"shim-{hashlib.sha256(repr(flags).encode()).hexdigest()[:16]}"
        folder.mkdir(exist_ok=True)
        with alone(header := folder / "shim.h.gch"):
            if not header.exists():
                run_compiler((compiler(), *flags, f"-I{SHIM}", "-x", "c++-header", str(SHIM / "shim.h")), header, "shim.h")
        return folder


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Of all processes that share the folder, one makes this file at a time."""
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_compiler(command: Sequence[str], target: Path, source: str) -> None:
    """Make the target, whole or not at all. Raise RuntimeError with the compiler's words where it fails. A sanitizer loaded into
    Python is not for it."""
    made = target.with_suffix(".part")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    ran = subprocess.run((*command, "-o", str(made)), env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{source} does not compile for the host:\n{ran.stderr}")
    made.rename(target)
