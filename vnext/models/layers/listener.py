"""The listener: a decoder whose prompts begin with a sound, to which every token of the text behind it listens.

A sound is the first tokens of its row, one for each state of its tower (tower.py). In their slots each layer keeps the keys
and values that it makes of these states, as other layers keep those of tokens; a token of the text attends to the text before it
in the row's other blocks, and to all of the sound in its first ones. So a sound's pages are written once, shared and found again
as any prompt's. A text's positions count from its own first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array
from vnext.kernels.calls import RotaryWrite
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import SoundTower
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch, HostBatch, host_batch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import (
    Attention,
    LayerCache,
    LayerNorm,
    Linear,
    PlainMlp,
    Step,
    attention,
    embed,
    layer_steps,
    mlp,
    norm_of,
    read,
    row,
)
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    import torch


class Listening(NamedTuple):
    """Attention of a text to its sound: `query` and `key_value`, keys before values, are column-parallel, `output` row-parallel."""

    query: Linear
    key_value: Linear
    output: Linear


class ListenerLayer(NamedTuple):
    """Norms stand before attention, listening and MLP."""

    attention_norm: LayerNorm
    attention: Attention
    listening_norm: LayerNorm
    listening: Listening
    mlp_norm: LayerNorm
    mlp: PlainMlp


class ListenerParams(NamedTuple):
    """One rank's weights. `places` [N, hidden]: of a text's tokens. The names behind the head are those of other decoders; no
    `stack` of layers is one call."""

    embedding: object
    places: Array
    layers: tuple[ListenerLayer, ...]
    norm: LayerNorm
    head: object
    head_bias: None = None
    frequencies: None = None
    positions: None = None
    embedding_scale: float = 1.0
    stack: None = None


class Parts(NamedTuple):
    """A step's tokens int64 [F] of sounds and [N] of texts; the latter as a batch of their own, by the blocks behind the sounds,
    and as one with a row for each token, which reads the sound's blocks."""

    frames: np.ndarray
    texts: np.ndarray
    own: ForwardBatch
    heard: ForwardBatch


def parts_of(batch: ForwardBatch, sound: SoundTower, block_size: int) -> Parts:
    """The parts of a step. Raises ModelError where the text behind a sound would begin within a block."""
    span = sound.span
    if span % block_size:
        raise ModelError(f"A sound takes {span} tokens, which blocks of {block_size} do not divide: take --block-size 16.")
    starts, lengths = host_batch(batch)
    counts = np.diff(starts)
    positions = np.arange(starts[-1]) + np.repeat(lengths - counts - starts[:-1], counts)
    texts, frames = np.flatnonzero(positions >= span), np.flatnonzero(positions < span)
    rows = np.repeat(np.arange(len(counts)), counts)[texts]
    own_starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(counts))))).astype(np.int32)
    chosen, tables = batch.block_table.new_tensor(texts).long(), batch.block_table
    behind, before = tables[:, span // block_size :], tables[:, : span // block_size]
    own = batch._replace(
        token_ids=batch.token_ids[chosen], positions=batch.positions[chosen] - span, slots=batch.slots[chosen],
        block_table=behind, inputs=(), states=None, host=HostBatch(own_starts, np.maximum(lengths - span, 0).astype(np.int32)),
    )  # fmt: skip
    ends = np.full(len(texts), sound.states, dtype=np.int32)
    heard = own._replace(
        host=HostBatch(np.arange(len(texts) + 1, dtype=np.int32), ends), block_table=before[before.new_tensor(rows).long()]
    )
    return Parts(frames, texts, own, heard)


def forward(
    params: ListenerParams, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, zeros at those of sounds, the cache with this step's
    tokens). `batch.states` are those of sounds among embeddings of texts."""
    assert config.sound is not None
    parts = parts_of(batch, config.sound, kv[0][0].shape[2])
    states = embed(params.embedding, batch.token_ids, parallel) if batch.states is None else batch.states
    at = batch.positions.new_tensor(parts.frames), batch.positions.new_tensor(parts.texts)
    frames, hidden = states[at[0]], states[at[1]] + params.places[parts.own.positions]
    step, listens = (_step(kv, each, config, parallel) for each in (parts.own, parts.heard))
    for layer, cache in zip(params.layers, kv):
        if len(frames):
            _keep(layer.listening, cache, frames, batch.slots[at[0]], step)
        if len(hidden):
            hidden = run_layer(layer, cache, hidden, step, listens)
    found = states.new_zeros(states.shape)
    found[at[1]] = norm_of(hidden, params.norm, step) if len(hidden) else hidden
    return found.index_select(0, batch.sample_at), kv


def run_layer(layer: ListenerLayer, cache: LayerCache, hidden: torch.Tensor, step: Step, listens: Step) -> torch.Tensor:
    """One layer on the texts' tokens [N, hidden]."""
    hidden = hidden + attention(layer.attention, cache, norm_of(hidden, layer.attention_norm, step), step)
    query = step.operations.linear(norm_of(hidden, layer.listening_norm, step), *layer.listening.query)
    heard = read(query.unflatten(1, (-1, step.config.head_dim)), cache, listens)
    hidden = hidden + row(heard, layer.listening.output, step)
    return hidden + mlp(layer.mlp, norm_of(hidden, layer.mlp_norm, step), step)


def _step(kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel) -> Step:
    return layer_steps(kv, batch, config, parallel, None)[0]


def _keep(layer: Listening, cache: LayerCache, frames: torch.Tensor, slots: torch.Tensor, step: Step) -> None:
    """Write a layer's keys and values of a sound's states [F, hidden]."""
    pair = step.operations.linear(frames, *layer.key_value)
    joined = pair.new_zeros((len(pair), pair.shape[1] // 2 * 3))  # the queries' place, which no one reads
    joined[:, pair.shape[1] // 2 :] = pair
    write = RotaryWrite(None, None, step.config.rms_norm_eps, None, None, *cache, slots)
    step.operations.rotary_kv_write(joined, write)
