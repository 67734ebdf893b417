"""Tensors of safetensors files, mapped: each is read where it lies, a part at a time. Knows no names and no models."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from vnext.base.spelling import reason
from vnext.kernels.arrays import host_dtype
from vnext.models.config.folder import read_header
from vnext.models.errors import ModelError

DTYPES = MappingProxyType({"F32": host_dtype("float32"), "F16": host_dtype("float16"), "BF16": host_dtype("bfloat16")})
"""The files' names of floats."""
INTEGERS: Mapping[str, np.dtype] = MappingProxyType({"I32": np.dtype("int32"), "I64": np.dtype("int64")})
ELEMENTS: dict[str, np.dtype] = {
    **DTYPES, **INTEGERS,
    "I8": np.dtype("int8"), "U8": np.dtype("uint8"), "I16": np.dtype("int16"), "F8_E4M3": host_dtype("float8_e4m3fn"),
    "F8_E5M2": host_dtype("float8_e5m2"), "F8_E8M0": host_dtype("float8_e8m0fnu"),
}  # fmt: skip
"""What can be read: the floats, and what formats of weights make numbers of."""

AROUND = max(2**16, mmap.PAGESIZE)
"""Bytes that become memory together at a fault: Linux's fault_around_bytes."""


class Stored(NamedTuple):
    """A tensor in a file: its dtype by the file's own name, its whole shape, and the bytes [start, stop) of the file."""

    file: Path
    mapping: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor, in the file's mapping."""
        whole = np.frombuffer(self.mapping, dtype=ELEMENTS[self.dtype], count=prod(self.shape), offset=self.start)
        found: np.ndarray = whole.reshape(self.shape)[ranges]
        return found

    def release(self) -> None:
        """Release the memory of the tensor's pages."""
        release(self.mapping, self.start, self.stop)


def mapped(file: Path) -> mmap.mmap:
    """A file's bytes, in a private map: torch warns of memory that it must not write to. Raises OSError."""
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def release(mapping: mmap.mmap, start: int, stop: int) -> None:
    """Release the memory of the pages with the bytes [start, stop), and of the neighbours that Linux maps with them."""
    first = max(0, start // mmap.PAGESIZE * mmap.PAGESIZE - AROUND)
    mapping.madvise(mmap.MADV_DONTNEED, first, min(stop + AROUND, len(mapping)) - first)


def stored_tensors(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, mapped. Raises ModelError where the header does not match the file."""
    header = read_header(file)
    begin = 8 + len(header)
    try:
        mapping = mapped(file)
        return {
            name: stored(file, mapping, entry, begin)
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise ModelError(f"{file} is truncated or corrupt ({reason(error)}); download the model again") from error


def stored(file: Path, mapping: mmap.mmap, entry: dict[str, Any], begin: int) -> Stored:
    """One entry of a header whose data begin at byte `begin`. Raises ValueError, KeyError or TypeError for a broken one."""
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    sized = ELEMENTS.get(entry["dtype"])
    if not 0 <= start <= stop or begin + stop > len(mapping):
        raise ValueError(f"data at {start} to {stop} of {len(mapping) - begin} bytes")
    if sized is not None and (any(size < 0 for size in shape) or prod(shape) * sized.itemsize != stop - start):
        raise ValueError(f"{stop - start} bytes for the shape {list(shape)} of {entry['dtype']}")
    return Stored(file, mapping, entry["dtype"], shape, begin + start, begin + stop)
