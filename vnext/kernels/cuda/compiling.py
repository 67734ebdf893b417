"""Compiling: a source of `cuda/` and its macros to the machine code of one architecture, without a GPU.

Owns NVRTC and the folder of what was compiled before. A compiled file's name is a digest of all that went into it (the
source, every header beside it, macros, architecture, compiler), so that none is ever stale; it appears complete or not
at all.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vnext.kernels.cuda.interface import Defines, sources

OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
CACHE = Path("~/.cache/vnext/cubins")
TOOLKITS = ("/usr/local/cuda/include", "/opt/cuda/include")


class CompileError(RuntimeError):
    """A source that the compiler refused; the message is the compiler's."""


class Compiled(NamedTuple):
    """Machine code, and what the assembler said of registers, spills and shared memory."""

    cubin: bytes
    log: str


def compile_source(source: str, defines: Defines, arch: str, folder: Path | None = None) -> Compiled:
    """Compile `folder / source` (default: the sources') for an architecture such as "sm_90".

    Raises CompileError with the compiler's log, and ImportError where CuPy is missing.
    """
    from cupy.cuda import nvrtc

    folder = folder or sources()
    options = (f"-arch={arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in defines))
    includes = (f"-I{folder}", f"-I{toolkit_headers()}")
    program = nvrtc.createProgram((folder / source).read_text(), source, (), ())
    try:
        nvrtc.compileProgram(program, (*options, *includes))
        cubin = nvrtc.getCUBIN(program) + b"\0"  # CuPy takes the last byte off, as if it ended a text
        return Compiled(cubin, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError:
        raise CompileError(f"{source} for {arch}:\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def toolkit_headers() -> str:
    """The folder of cuda_bf16.h: of the package nvidia-cuda-runtime, or of a toolkit. Raises CompileError without one."""
    found = [folder for folder in (packaged_headers(), *TOOLKITS) if folder and (Path(folder) / "cuda_bf16.h").is_file()]
    if not found:
        raise CompileError("the headers of the CUDA runtime are missing: install nvidia-cuda-runtime")
    return str(found[0])


def packaged_headers() -> str | None:
    """As NVIDIA's own pathfinder has them, which looks at CUDA_HOME too; CuPy brings it along."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # before its version 1.3
        return None
    found: str | None = find_nvidia_header_directory("cudart")
    return found


def cached_cubin(source: str, defines: Defines, arch: str, cache: Path = CACHE) -> bytes:
    """As compile_source, kept in a folder between processes; a folder that cannot be written keeps nothing."""
    path = cubin_path(source, defines, arch, cache)
    has_place = path.is_absolute()  # a user without a home has none, and the working directory may be a stranger's
    if has_place and path.is_file():
        return path.read_bytes()
    cubin = compile_source(source, defines, arch).cubin
    with suppress(OSError):
        if has_place:
            keep(path, cubin)
    return cubin


def cubin_path(source: str, defines: Defines, arch: str, cache: Path = CACHE) -> Path:
    """Where it is kept."""
    return Path(os.path.expanduser(cache)) / f"{Path(source).stem}-{arch}-{digest(source, defines, arch)}.cubin"


def keep(path: Path, cubin: bytes) -> None:
    """The file appears whole or not at all, even if another process writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def digest(source: str, defines: Defines, arch: str) -> str:
    """What goes into a cubin, as one hash."""
    from cupy.cuda import nvrtc

    headers = sorted(sources().glob("*.cuh"))
    texts = [path.read_bytes() for path in (sources() / source, *headers)]
    facts = repr((source, defines, arch, OPTIONS, nvrtc.getVersion())).encode()
    return hashlib.sha256(b"\0".join((facts, *texts))).hexdigest()[:32]
