"""Halves: the rows that a step computes beside those of guided requests, and the logits of both made one.

A guided request (Guidance in state/params.py) is one request of the state, whose tokens are the prompt's or, if that is longer,
the negative prompt's. Its other half has the other's before the answer, and keys and values in pages of its own: in an engine with
guidance a block has a page for each half, in twice the groups. So both halves are in each step together, whatever the state
decides. A half's first page is of the request's block in which it begins: what the request shares with others lies before, and
holds nothing of the half. Owns the order of the arithmetic; any thread may call it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.models.layers.batch import AdapterRows, ForwardBatch, GroupPlaces, HostBatch
from vnext.runtime.batch.step_inputs import Guided, StepInputs
from vnext.state.events import unpack_tokens
from vnext.state.params import Guidance, half_begins
from vnext.state.state import State


class _Half(NamedTuple):
    """The other half of a row: its tokens, their positions, and the places in T of the tokens that it follows, int64[n]
    each. Its first page is of the request's block `begins`."""

    row: int
    begins: int
    tokens: np.ndarray
    positions: np.ndarray
    after: np.ndarray
    guidance: Guidance


def with_halves(inputs: StepInputs, state: State) -> StepInputs:
    """The inputs of the newest step in flight, which have the groups of both halves, with rows behind them for the halves of guided
    requests, in the model's own groups. The samples of these rows come last."""
    forward, size = inputs.forward, state.config.block_size
    (first, *others), own = _places(forward), state.config.group_count // 2
    plain = forward._replace(groups=tuple(others[: own - 1]))
    ids = state.in_flight[-1].ids.tolist()
    halves = [half for row, id_ in enumerate(ids) if (half := _half(state, id_, forward, row)) is not None]
    if not halves:
        return inputs._replace(forward=plain)
    after, positions = np.concatenate([each.after for each in halves]), np.concatenate([each.positions for each in halves])
    count = len(forward.token_ids)
    ends = count + np.cumsum([len(each.tokens) for each in halves])
    contexts = np.concatenate((forward.context_lengths, [each.positions[-1] + 1 for each in halves])).astype(np.int32)
    starts = np.concatenate((forward.query_starts, ends)).astype(np.int32)
    (slots, table), *groups = [
        _joined(here, beside, halves, size)
        for here, beside in zip((first, *others[: own - 1]), others[own - 1 :], strict=True)
    ]
    turning = None if forward.turning is None else np.concatenate((forward.turning, np.broadcast_to(
        positions, (*forward.turning.shape[:-1], len(positions))
    )), axis=-1)  # fmt: skip
    sampled = np.isin(after, forward.sample_at)
    counts = [int(np.isin(each.after, forward.sample_at).sum()) for each in halves]
    return inputs._replace(
        forward=plain._replace(
            token_ids=np.concatenate((forward.token_ids, *(each.tokens for each in halves))),
            positions=np.concatenate((forward.positions, positions)),
            slots=slots, query_starts=starts, context_lengths=contexts, block_table=table,
            sample_at=np.concatenate((forward.sample_at, count + np.flatnonzero(sampled))),
            host=HostBatch(starts, contexts), groups=tuple(groups), adapters=_adapters(forward, after),
            turning=turning,
        ),
        guided=_guided(halves, counts, np.searchsorted(forward.sample_at, after[sampled]), len(forward.sample_at)),
    )  # fmt: skip


def _guided(halves: list[_Half], counts: list[int], rows: np.ndarray, samples: int) -> Guided | None:
    """The pairs of the samples of `rows` and those of so many of each half, which lie behind all `samples` of rows."""
    if not len(rows):
        return None
    scales = np.repeat([np.float32(each.guidance.scale) for each in halves], counts)
    is_prompt, beside = np.repeat([each.guidance.is_prompt for each in halves], counts), samples + np.arange(len(rows))
    return Guided(np.where(is_prompt, beside, rows), np.where(is_prompt, rows, beside), scales)


def _places(forward: ForwardBatch) -> tuple[GroupPlaces, ...]:
    return GroupPlaces(forward.slots, forward.block_table), *forward.groups


def _half(state: State, id_: int, forward: ForwardBatch, row: int) -> _Half | None:
    """The half of one row; None for a request without guidance, and before the half begins."""
    request = state.requests[id_]
    if (guidance := request.sampling.guidance) is None:
        return None
    beside, (start, end) = unpack_tokens(guidance.beside), forward.query_starts[row : row + 2].tolist()
    begins = half_begins(guidance, request.prompt_length)
    positions = forward.positions[start:end] - begins
    dropped = int((positions < 0).sum())
    if dropped == len(positions):
        return None
    positions, after = positions[dropped:], np.arange(start + dropped, end)
    tokens = np.where(positions < len(beside), beside[np.minimum(positions, len(beside) - 1)], forward.token_ids[after])
    return _Half(row, begins // state.config.block_size, tokens.astype(np.int64), positions, after, guidance)


def _joined(here: GroupPlaces, beside: GroupPlaces, halves: list[_Half], size: int) -> GroupPlaces:
    """The places of a group of layers: of the rows, and behind them those of the halves, whose pages are `beside`."""
    tables, slots = np.zeros((len(halves), beside.block_table.shape[1]), beside.block_table.dtype), [here.slots]
    for table, half in zip(tables, halves, strict=True):
        pages = beside.block_table[half.row, half.begins :]
        table[: len(pages)] = pages
        blocks, offsets = np.divmod(half.positions, size)
        slots.append(table[blocks].astype(np.int64) * size + offsets)
    return GroupPlaces(np.concatenate(slots), np.concatenate((here.block_table, tables)))


def _adapters(forward: ForwardBatch, after: np.ndarray) -> tuple[AdapterRows, ...]:
    """A half is computed with its request's adapter."""
    count = len(forward.token_ids)
    return tuple(
        AdapterRows(each.slot, np.concatenate((each.tokens, count + np.flatnonzero(np.isin(after, each.tokens)))))
        for each in forward.adapters
    )
