"""Rests: chunks that end within an image whose tokens see each other to both sides.

Keys and values of such an image's tokens depend on those behind a chunk's end. So a row that ends within one is computed once
more with the rest of the image behind it, which overwrites what the step has kept of the row: a chunk may end anywhere, and bits
are those of whole chunks. The rest is kept where the row's next tokens go, and in pages that no request has. Such a row has no
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import AdapterRows, ForwardBatch, GroupPlaces, HostBatch, InputPart, host_batch
from vnext.models.layers.kv_cache import KvCache, kv_groups


def spare_pages(config: ModelConfig, block_size: int) -> int:
    """The pages that a cache has for rests, behind all others."""
    return len(kv_groups(config).windows) * _pages_of_rest(config, block_size)


def rests(
    batch: ForwardBatch, kv: KvCache, config: ModelConfig, vectors: Callable[[bytes], torch.Tensor]
) -> Iterator[ForwardBatch]:
    """A batch of one row for each row of a step that ends within such an image; `vectors` gives an image's [N, hidden]."""
    if config.tower is None or not config.tower.is_mutual:
        return
    starts, _ = host_batch(batch)
    rows = {int(end): row for row, end in enumerate(starts[1:]) if end > starts[row]}
    for part in batch.inputs:
        row = rows.get(part.at + part.count)
        rest = vectors(part.digest)[part.first + part.count :]
        if row is not None and len(rest):
            yield _with_rest(batch, row, rest, kv, config)


def _with_rest(batch: ForwardBatch, row: int, rest: torch.Tensor, kv: KvCache, config: ModelConfig) -> ForwardBatch:
    """The batch of one row, with the vectors [N, hidden] of the rest of an image behind it."""
    (starts, lengths), (pages, _, size, _) = host_batch(batch), kv[0][0].shape
    own, count, end = slice(int(starts[row]), int(starts[row + 1])), len(rest), int(lengths[row])
    total, each = own.stop - own.start + count, _pages_of_rest(config, size)
    behind = np.arange(end, end + count)

    def places(group: int, slots: torch.Tensor, table: torch.Tensor) -> GroupPlaces:
        held, first = -(-end // size), pages - spare_pages(config, size) + group * each
        blocks = torch.cat((table[row, :held], torch.arange(first, first + each, dtype=table.dtype)))
        new = blocks[behind // size].long() * size + torch.from_numpy(behind % size)
        return GroupPlaces(torch.cat((slots[own], new)), blocks[None])

    first, *others = (places(at, *each) for at, each in enumerate(((batch.slots, batch.block_table), *batch.groups)))
    parts = [part for part in batch.inputs if own.start <= part.at < own.stop]
    moved = [InputPart(part.at - own.start, part.count, part.digest, part.first) for part in parts]
    moved[-1] = moved[-1]._replace(count=moved[-1].count + count)
    assert batch.states is not None, "the step's vectors are made"
    return ForwardBatch(
        token_ids=torch.cat((batch.token_ids[own], batch.token_ids.new_zeros(count))),
        positions=torch.cat((batch.positions[own], torch.from_numpy(behind))),
        slots=first.slots, query_starts=torch.tensor([0, total], dtype=torch.int32),
        context_lengths=torch.tensor([end + count], dtype=torch.int32), block_table=first.block_table,
        sample_at=batch.sample_at[:0], host=HostBatch(np.array([0, total], np.int32), np.array([end + count], np.int32)),
        groups=tuple(others), inputs=tuple(moved), states=torch.cat((batch.states[own], rest)),
        adapters=tuple(AdapterRows(slot, np.arange(total)) for slot, tokens in batch.adapters if own.start in tokens),
    )  # fmt: skip


def _pages_of_rest(config: ModelConfig, block_size: int) -> int:
    """Of one group of layers: a rest begins anywhere in a block."""
    tower = config.tower
    return tower.vectors // block_size + 1 if tower is not None and tower.is_mutual else 0
