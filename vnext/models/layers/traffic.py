"""Traffic: the bytes of weights that a decoded token reads, which bound its time where memory does."""

from __future__ import annotations

from typing import Any

from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.layers import SparseMlp


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
