"""Named tensors as one safetensors file in an engine's run directory, from which its ranks read an update.

Owns the writing: arrays of numpy or tensors of torch, or the places of tensors in shared memory that another program has filled.
The file appears under its name when it is whole. No torch, no pickles.
"""

from __future__ import annotations

import json
import mmap
import secrets
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vnext.base.spelling import reason
from vnext.runtime.client.pending_operations import BadTensors
from vnext.runtime.protocol.operations import SharedTensor

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32"}
"""The format's names of dtypes; ranks say which of them they can read."""
SHARED_MEMORY = Path("/dev/shm")


def write_tensors(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], folder: Path) -> Path:
    """A new file in `folder` with these tensors. Raises BadTensors, OSError."""
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    arrays = {}
    for name, tensor in pairs:
        if name in arrays:
            raise BadTensors(f"tensor {name!r} is given twice: nothing has changed")
        arrays[name] = _array(name, tensor)
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": _name_of(name, array), "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = folder / f"weights.{secrets.token_hex(6)}.part"
    try:
        with draft.open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return draft.rename(draft.with_suffix(".safetensors"))
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_shared(tensors: Iterable[SharedTensor], folder: Path) -> Path:
    """A new file in `folder` with tensors of shared memory. Raises BadTensors, OSError."""
    tensors, segments, arrays = list(tensors), dict[str, mmap.mmap](), list[tuple[str, np.ndarray]]()
    try:
        for name in dict.fromkeys(tensor.segment for tensor in tensors):
            segments[name] = _mapped(name)
        arrays = [(tensor.name, _shared(tensor, segments[tensor.segment])) for tensor in tensors]
        return write_tensors(arrays, folder)
    finally:
        arrays.clear()  # a segment that an array reads cannot be closed
        for segment in segments.values():
            segment.close()


def _mapped(name: str) -> mmap.mmap:
    if Path(name).name != name or name in ("", ".", ".."):
        raise BadTensors(f"{name!r} is no name of shared memory: give the name without folders")
    try:
        with (SHARED_MEMORY / name).open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        sentence = f"the shared memory {name!r} cannot be read ({reason(error)}): make it before the call, readable by this user"
        raise BadTensors(sentence) from error


def _shared(tensor: SharedTensor, segment: mmap.mmap) -> np.ndarray:
    if tensor.dtype not in NAMES or min(tensor.shape, default=0) < 0:
        found = f"dtype {tensor.dtype!r} and shape {tensor.shape}"
        raise BadTensors(f"tensor {tensor.name!r} has {found}: dtypes are {', '.join(NAMES)}")
    dtype = np.dtype(getattr(ml_dtypes, tensor.dtype, tensor.dtype))
    if tensor.offset < 0 or tensor.offset + prod(tensor.shape) * dtype.itemsize > len(segment):
        raise BadTensors(f"tensor {tensor.name!r} ends behind the {len(segment)} bytes of the shared memory {tensor.segment!r}")
    return np.frombuffer(segment, dtype, prod(tensor.shape), tensor.offset).reshape(tensor.shape).copy()


def _array(name: str, tensor: Any) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().contiguous()
        is_narrow = str(tensor.dtype) == "torch.bfloat16"  # numpy knows no such type, and ml_dtypes its bits
        array: np.ndarray = tensor.view(tensor[:0].short().dtype).numpy() if is_narrow else tensor.numpy()
        return array.view(ml_dtypes.bfloat16) if is_narrow else array
    raise BadTensors(f"{name!r} is a {type(tensor).__name__}: give an array of numpy or a tensor of torch")


def _name_of(name: str, array: np.ndarray) -> str:
    found = NAMES.get(str(array.dtype))
    if found is None:
        raise BadTensors(f"tensor {name!r} has the dtype {array.dtype}: send float32, bfloat16 or float16")
    return found
