"""Tensors of a host's parameters and caches: the same memory, for what torch computes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from vnext.kernels.arrays import as_tensor
from vnext.kernels.cpu.packed import Packed, PackedExperts
from vnext.kernels.cpu.stack import Stack

KEPT = (Packed, PackedExperts, Stack)
"""What operations take as it is."""
FREQUENCIES = ("frequencies", "local_frequencies")


def tensors_of(value: Any) -> Any:
    """A tree of tuples, named ones among them, with a tensor in the place of each array."""
    if isinstance(value, np.ndarray):
        return as_tensor(value)
    if isinstance(value, tuple) and not isinstance(value, KEPT):
        parts = [tensors_of(each) for each in value]
        if all(map(operator.is_, parts, value)):
            return value  # adapters know a weight by its identity
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def host_tensors_of(params: Any) -> Any:
    """A model's parameters as tensors, but for the frequencies: the host makes angles of arrays."""
    return tensors_of(params)._replace(**{name: getattr(params, name) for name in FREQUENCIES if hasattr(params, name)})
