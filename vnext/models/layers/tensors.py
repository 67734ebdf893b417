"""Tensors of a host's parameters and caches: the same memory, for what torch computes; and the bytes that a token reads."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from vnext.kernels.arrays import as_tensor
from vnext.kernels.cpu.packed import Packed, PackedExperts
from vnext.kernels.cpu.stack import Stack
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.layers import SparseMlp

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


def token_bytes(params: Any, config: ModelConfig) -> int:
    """Bytes of one rank's weights that a step of one token reads: all but an embedding apart from the head, and of a layer's
    experts those that a token meets."""
    return sum(_bytes(getattr(params, name), config) for name in ("layers", "norm", "head"))


def _bytes(value: Any, config: ModelConfig) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, SparseMlp):
        assert config.experts is not None
        experts = _bytes(value.gate_up, config) + _bytes(value.down, config)
        beside = (value.router, value.shared, value.shared_gate, value.bias, value.score_bias)
        return _bytes(beside, config) + experts * config.experts.per_token // config.experts.count
    return sum(_bytes(each, config) for each in value) if isinstance(value, tuple | list) else 0
