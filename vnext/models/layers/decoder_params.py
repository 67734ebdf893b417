"""The parameters of the decoder that most families are. Owns their shape and nothing that computes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.layers.layers import Attention, GatedMlp, SparseMlp


class LayerParams(NamedTuple):
    """One decoder layer."""

    attention_norm: Array
    attention: Attention
    mlp_norm: Array
    mlp: GatedMlp | SparseMlp


class Params(NamedTuple):
    """One rank's weights. `head` is packed, and tied it is also the embedding. `frequencies` are float32 [R / 2].

    `stack` is the layers once more as one call, where there is one; without it they run one by one, with the same bits.
    """

    embedding: Any
    layers: tuple[LayerParams, ...]
    norm: Array
    head: Any
    frequencies: Array
    stack: Any = None
