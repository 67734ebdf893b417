"""Arrays of the host: numpy's, with bfloat16 as ml_dtypes has it, and torch's tensors of the same memory.

Owns the way from one to the other. A rank that computes its steps in single calls of the CPU kernels needs addresses, sizes and
dtypes only, which numpy has: it starts without torch, whose import takes longer than loading a small model.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

Array = Any
"""An array of numpy or a tensor of torch on the CPU."""


def host_dtype(name: str) -> np.dtype:
    """The dtype of numpy with this name, "bfloat16" among them."""
    return np.dtype(getattr(ml_dtypes, name, name))


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype of torch with the name of `dtype`, of either library or a name."""
    import torch  # what has tensors has loaded it

    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found


@cache
def is_int8(dtype: Any) -> bool:
    """Whether a dtype of either library is that of an int8 cache."""
    return dtype_name(dtype) == "int8"


def address(array: Array) -> int:
    """Where an array's elements begin."""
    found: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return found


def address_or_0(array: Array | None) -> int:
    """Where an array's elements begin, 0 for none."""
    return 0 if array is None else address(array)


def strides_of(array: Array) -> tuple[int, ...]:
    """Elements from one index to the next, of each axis."""
    return tuple(step // array.itemsize for step in array.strides) if isinstance(array, np.ndarray) else array.stride()


def is_dense(array: Array) -> bool:
    """Whether the elements lie one after the other."""
    found: bool = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    return found


def dense(array: Array) -> Array:
    """The array with its elements one after the other."""
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def have_dense_blocks(*caches: Array) -> bool:
    """Whether caches of one shape [page_count, kv_heads, block_size, D] have dense blocks at equal distances."""
    (_, _, block_size, width), strides = caches[0].shape, strides_of(caches[0])
    return strides[1:] == (block_size * width, width, 1) and all(strides_of(cache) == strides for cache in caches[1:])


def as_tensor(array: Any) -> Any:
    """The tensor of an array's memory; anything else stays what it is."""
    if not isinstance(array, np.ndarray):
        return array
    import torch

    if array.dtype == host_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.itemsize == 1 and array.dtype.name.startswith("float8"):
        return torch.from_numpy(array.view(np.uint8)).view(torch_dtype(array.dtype))
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The array of a CPU tensor's memory."""
    if dtype_name(tensor.dtype) == "bfloat16":
        return tensor.view(torch_dtype("int16")).numpy().view(host_dtype("bfloat16"))
    found: np.ndarray = tensor.numpy()
    return found
