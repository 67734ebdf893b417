"""The tower of sounds: a spectrogram of one sound in, states out; each state sees all of the sound, which is computed alone.

Products, norms and attention are the decoders', as in tower.py: no sound's bits depend on others. A convolution is a product of
each place's neighbours, laid side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import LayerNorm, Linear, norm_of
from vnext.models.layers.tower import NO_BAND, Parts, TowerLayer, parts_of, step_of_all, through

if TYPE_CHECKING:
    import torch

KERNEL = 3
"""Columns that a convolution looks at: one on either side."""


class SoundTowerParams(NamedTuple):
    """`first` and `second` are the convolutions, over bands and over channels, as products [hidden, channels * KERNEL]; `positions`
    [N, hidden]."""

    first: Linear
    second: Linear
    positions: Array
    layers: tuple[TowerLayer, ...]
    norm: LayerNorm


def listen(params: SoundTowerParams, kv: KvCache, spectrogram: torch.Tensor, config: ModelConfig, band: int = NO_BAND) -> Parts:
    """States [span, hidden] of one sound, float32 [bands, 2 * states], in parts as tower.encode; zeros behind the last one. `kv` is
    a cache for its states and one layer, used up."""
    sound = config.sound
    assert sound is not None
    step = step_of_all(kv, sound.states, config)
    chosen, hidden = step.operations, spectrogram.T.to(params.positions.dtype)
    for layer, stride in ((params.first, 1), (params.second, 2)):
        hidden = chosen.activate(chosen.linear(neighbours(hidden, stride), *layer), None, None, "gelu")
    hidden, count = hidden + params.positions, len(params.layers) * parts_of(sound.states, band)
    for _ in through(params.layers, hidden, kv, step, band):
        yield count
    hidden = norm_of(hidden, params.norm, step)
    found = hidden.new_zeros((sound.span, hidden.shape[1]))
    found[: len(hidden)] = hidden
    return found


def neighbours(columns: torch.Tensor, stride: int) -> torch.Tensor:
    """Of every `stride`-th of N columns [N, channels] the KERNEL around it, zeros beyond the ends: [N / stride, channels *
    KERNEL], channel by channel."""
    room = columns.new_zeros((len(columns) + KERNEL - 1, columns.shape[1]))
    room[1 : len(columns) + 1] = columns
    return room.unfold(0, KERNEL, stride).flatten(1).contiguous()
