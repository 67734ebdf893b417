"""Random steps for paged attention, and its dense oracle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.references import kv_write
from vnext.kernels.table import choose


class Sequences(NamedTuple):
    """Whole sequences: queries, keys and values of each, and where their blocks are in the caches."""

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    blocks: list[list[int]]
    key_cache: torch.Tensor
    value_cache: torch.Tensor


def make_sequences(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, seed: int = 0
) -> Sequences:
    """Sequences of these lengths, their keys and values already in scattered blocks of otherwise poisoned caches."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, count: int) -> torch.Tensor:
        return torch.randn(length, count, head_dim, generator=generator)

    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    caches = torch.full((2, sum(counts) + 3, kv_heads, block_size, head_dim), float("nan"))
    query = [draw(length, heads) for length in lengths]
    key, value = ([draw(length, kv_heads) for length in lengths] for _ in range(2))
    for index, length in enumerate(lengths):
        place = torch.arange(length)
        slots = torch.tensor(blocks[index])[place // block_size] * block_size + place % block_size
        kv_write(key[index], value[index], caches[0], caches[1], slots)
    return Sequences(query, key, value, blocks, caches[0], caches[1])


def attend(
    sequences: Sequences,
    ranges: list[tuple[int, int, int]],
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """One step: for each (sequence, start, stop) the result of its queries [start, stop) after stop tokens."""
    table = np.full((len(ranges), max(map(len, sequences.blocks))), -1, dtype=np.int32)
    for row, (index, _, _) in enumerate(ranges):
        table[row, : len(sequences.blocks[index])] = sequences.blocks[index]
    starts = np.cumsum([0] + [stop - start for _, start, stop in ranges]).astype(np.int32)
    lengths = np.array([stop for _, _, stop in ranges], dtype=np.int32)
    _, kv_heads, block_size, head_dim = sequences.key_cache.shape
    step = AttentionStep(starts, lengths, torch.from_numpy(table), block_size, kv_heads, tuple({0, window}))
    metadata = choose("attention_metadata", "cpu")(step)
    query = torch.cat([sequences.query[index][start:stop] for index, start, stop in ranges])
    call = AttentionCall(sequences.key_cache, sequences.value_cache, metadata, head_dim**-0.5, window, softcap, sinks=sinks)
    output = choose("paged_attention", "cpu")(query, call)
    return list(output.split([stop - start for _, start, stop in ranges]))


def dense(
    sequences: Sequences, index: int, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of one whole sequence, in float64, without pages, pieces or tiles."""
    query, key, value = (tensors[index].double() for tensors in (sequences.query, sequences.key, sequences.value))
    group_size = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    if window:
        unseen |= torch.ones(scores.shape[1:], dtype=torch.bool).tril(-window)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(query)], value).float()
