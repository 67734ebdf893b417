"""The parameters of a decoder. Owns their shape and nothing that computes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.layers.heads import SharedBlock
from vnext.models.layers.latent import LatentAttention
from vnext.models.layers.layer_inputs import Added, Beside, InputTable
from vnext.models.layers.layers import Attention, Linear, Mlp, Norm, ReadingAttention, SparseMlp
from vnext.models.layers.recurrent import Recurring


class SideBySide(NamedTuple):
    """Attention and a recurrent layer of one input, whose parts are added."""

    attention: Attention
    recurring: Recurring


Alone = Attention | ReadingAttention | LatentAttention | Recurring
"""What mixes the tokens of a row with nothing beside it."""
Mixing = Alone | SideBySide
"""What mixes the tokens of a row."""


class LayerStreams(NamedTuple):
    """How a layer of N streams predicts and corrects them (AltUp, arXiv 2301.13310), and what it learns beside attention (LAuReL,
    arXiv 2411.07501).

    The first stream, normed by `router_norm` float32 [hidden], gives tanh of `router` packed [N, hidden]; from these `predict`
    packed [N * N, N] gives what streams add to streams and `correct` packed [N, N] their shares of what the layer found. `scale`
    [hidden] multiplies what gates the layer's own inputs, None for nothing. `left` and `right` are the narrow pair beside
    attention, normed by `norm` [hidden].
    """

    router_norm: Array
    router: Any
    predict: Any
    correct: Any
    scale: Array | None
    left: Linear
    right: Linear
    norm: Array


class Joint(NamedTuple):
    """What gives shares of N streams: a linear layer of all of them, `weight` packed float32 [P * N, N * hidden], whose P parts are
    multiplied by `scale` float32 [P] and added to `base` float32 [P * N]."""

    weight: object
    scale: Array
    base: Array


class Streams(NamedTuple):
    """What makes N - 1 streams of the embedding, and what takes them back, packed [hidden, hidden] each."""

    begin: tuple[Any, ...]
    end: tuple[Any, ...]


class LayerParams(NamedTuple):
    """One decoder layer; attention or MLP is None where the other stands alone. Norms stand before attention and MLP, behind them
    before what they give is added, or both; None where there is none. `beside`: experts whose part is added to the MLP's; `added`:
    what the layer adds behind its MLP; `streams`: of a layer of several; `joints`: before attention and MLP, where streams
    are joined; `ahead`: experts whose part the next layer adds; `block`: attention and MLP whose part the layer
    reads beside its input."""

    attention_norm: Norm | None
    attention: Mixing | None
    mlp_norm: Norm | None
    mlp: Mlp | None
    after_attention_norm: Norm | None = None
    after_mlp_norm: Norm | None = None
    beside: Beside | None = None
    added: Added | None = None
    streams: LayerStreams | None = None
    joints: tuple[Joint, Joint] | None = None
    ahead: SparseMlp | None = None
    block: SharedBlock | None = None


class Params(NamedTuple):
    """One rank's weights. `head` is packed, and tied it is also the embedding, which `embedding_scale` multiplies.

    `frequencies` are float32 [R / 2], None where nothing turns, and `local_frequencies` those of layers with a window, None where
    they have the same. `positions` [position_count_max, hidden] are learned ones. `stack` is the layers once more as one call,
    where there is one; without it they run one by one, with the same bits. `inputs`: what tokens give to each layer, or None.
    `embedding_norm` is of what the first layer gets. `head_bias` float32 [V_local], None for none. `streams`: of a model of
    several, or None; `joint`: of one whose streams are joined, behind its layers.
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
    head_bias: Array | None = None
    streams: Streams | None = None
    joint: Joint | None = None
