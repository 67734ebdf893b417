"""The parameters of a decoder. Owns their shape and nothing that computes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.layers.latent import LatentAttention
from vnext.models.layers.layer_inputs import Added, Beside, InputTable
from vnext.models.layers.layers import Attention, Mlp, Norm, ReadingAttention
from vnext.models.layers.recurrent import Recurring

Mixing = Attention | ReadingAttention | LatentAttention | Recurring
"""What mixes the tokens of a row."""


class LayerParams(NamedTuple):
    """One decoder layer. Norms stand before attention and MLP, behind them before what they give is added, or both; None where
    there is none. `beside`: experts whose part is added to the MLP's; `added`: what the layer adds behind its MLP."""

    attention_norm: Norm | None
    attention: Mixing
    mlp_norm: Norm | None
    mlp: Mlp
    after_attention_norm: Norm | None = None
    after_mlp_norm: Norm | None = None
    beside: Beside | None = None
    added: Added | None = None


class Params(NamedTuple):
    """One rank's weights. `head` is packed, and tied it is also the embedding, which `embedding_scale` multiplies.

    `frequencies` are float32 [R / 2], None where nothing turns, and `local_frequencies` those of layers with a window, None where
    they have the same. `positions` [position_count_max, hidden] are learned ones. `stack` is the layers once more as one call,
    where there is one; without it they run one by one, with the same bits. `inputs`: what tokens give to each layer, or None.
    `embedding_norm` is of what the first layer gets.
    """

    embedding: Any
    layers: tuple[LayerParams, ...]
    norm: Norm
    head: Any
    frequencies: Array | None
    local_frequencies: Array | None = None
    positions: Array | None = None
    embedding_scale: float = 1.0
    stack: Any = None
    inputs: InputTable | None = None
    embedding_norm: Norm | None = None
