"""The batch of one step as arrays: what a forward gets. Knows tokens, rows and slots, no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array
from vnext.kernels.calls import AttentionStep
from vnext.kernels.cpu.stack import AuxStates

if TYPE_CHECKING:
    from vnext.kernels.table import Operations
    from vnext.kernels.thin_tiles import ThinTiles


class HostBatch(NamedTuple):
    """Copies on the host of what shapes the attention work, so that nothing waits for the device.

    query_starts int32 [R + 1] and context_lengths int32 [R], as in ForwardBatch.
    """

    query_starts: np.ndarray
    context_lengths: np.ndarray


class GroupPlaces(NamedTuple):
    """Where a group of layers keeps the step's tokens: slots int64 [T] and block_table int32 [R, W], as in ForwardBatch."""

    slots: Array
    block_table: Array


class PreparedAttention(NamedTuple):
    """Attention that was described beforehand, so that a forward reads nothing of the host's: for steps that are captured.

    `metadata`: one for each group of layers, in their order. `attend`: who attends in the place of the table's
    paged_attention, with its arguments; None for the table's.
    """

    metadata: Sequence[Any]
    attend: Callable[..., Array] | None = None


class AdapterRows(NamedTuple):
    """The tokens of a step that are computed with the adapter in `slot`: int64 [n], rising places in T."""

    slot: int
    tokens: np.ndarray


class InputPart(NamedTuple):
    """`count` tokens of a step, from place `at` in T on, stand for the vectors from `first` on of the input with this `digest`."""

    at: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    digest: bytes
    first: int


class RecurrentBatch(NamedTuple):
    """Where the recurrent layers keep the states of a step's R rows. `pools`: of each such layer in turn its tensors, whose first
    axis is pages. `pages` int32 [R]: the page that a row goes on from and leaves its state in, no two alike; from zeros where
    `fresh`, bool [R]. Rows without tokens change nothing. `trail` as in StateRows: None in a step without drafts."""

    pools: Sequence[tuple[Array, ...]]
    pages: Array
    fresh: Array
    trail: Array | None = None


class ForwardBatch(NamedTuple):
    """R rows, T tokens, S samples: arrays of the host, or tensors on one device. A row's tokens are neighbours, in order.

    token_ids int64 [T], positions int64 [T], slots int64 [T] (block * block_size + offset where the token's key and
    value go), query_starts int32 [R + 1], context_lengths int32 [R] (tokens in the cache after this step's writes),
    block_table int32 [R, W], sample_at int64 [S] (rising places in T whose hidden state gives logits). `host` may be None:
    the two arrays are then copied from the device, which waits for it. With `attention` neither is looked at.

    `slots` and `block_table` are those of the first group of layers (kv_cache.kv_groups), `groups` those of the others. Of a
    group with a window, entries of the table before the window's first block are never read. `adapters` has one entry for each
    adapter that the step computes with; on a device `tiles` says which tokens have one, and `adapted` gives the operations that
    compute with them. `aux` takes the inputs of some layers. `states` [T, hidden]: what the layers of the stages before have made
    of the tokens, which a stage behind the first goes on with in the place of their embeddings; it is used up. `recurrent` is None
    where all layers attend. `inputs`: where tokens, which are below 0 there, stand for images. `turning`: the places by which a
    rope with axes turns, int64 [T], or [3, T] where images are among the tokens; None where these are `positions`. `deep`: tokens
    and what is added to them behind the first layers in turn, [tokens, layers, hidden].
    """

    token_ids: Array
    positions: Array
    slots: Array
    query_starts: Array
    context_lengths: Array
    block_table: Array
    sample_at: Array
    host: HostBatch | None = None
    groups: tuple[GroupPlaces, ...] = ()
    attention: PreparedAttention | None = None
    adapters: tuple[AdapterRows, ...] = ()
    aux: AuxStates | None = None
    tiles: ThinTiles | None = None
    adapted: Callable[[Operations], Operations] | None = None
    states: Array | None = None
    recurrent: RecurrentBatch | None = None
    inputs: tuple[InputPart, ...] = ()
    turning: Array | None = None
    deep: tuple[tuple[slice, Array], ...] = ()


def host_batch(batch: ForwardBatch) -> HostBatch:
    """The batch's host copies, made now if it brought none."""
    if batch.host is not None:
        return batch.host
    return HostBatch(batch.query_starts.cpu().numpy(), batch.context_lengths.cpu().numpy())


def in_runs(step: AttentionStep) -> AttentionStep:
    """The same tokens, in rows that are cut where a run of the window's size ends, whose contexts begin where a run does."""
    (size,), starts, found = step.windows, step.query_starts.tolist(), []
    for row, length in enumerate(step.context_lengths.tolist()):
        at = length - starts[row + 1] + starts[row]
        while at < length:
            begin = at - at % size
            end = min(length, begin + size)
            found.append((row, begin // step.block_size, end - begin, end - at))
            at = end
    rows, firsts, contexts, counts = np.array(found, dtype=np.int64).reshape(-1, 4).T
    columns = np.minimum(firsts[:, None] + np.arange(step.block_table.shape[1]), step.block_table.shape[1] - 1)
    whole = step.block_table
    table = whole.index_select(0, whole.new_tensor(rows).long()).gather(1, whole.new_tensor(columns).long())
    query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return step._replace(query_starts=query_starts, context_lengths=contexts.astype(np.int32), block_table=table, windows=(0,))
