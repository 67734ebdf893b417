"""Attention to chosen keys: of a long context a query sees those to which an index gives the highest scores (arXiv 2512.02556).

A query whose context is no longer than what an index chooses sees all of it, with the rest of its row; any other one sees the rows
of its choice, copied side by side, in the order of the context. Which of the two a token takes depends on its position alone, and
what it gives on its own keys, so that a token's bits do not depend on how its request is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep, Selection

COPIED_BYTES = 1 << 24
"""Of keys, at once."""
SCORED = 1 << 24
"""Scores at once."""
LANES = 16


class Queries(NamedTuple):
    """Queries that an index chooses for: `query` [F, H, I] and `weights` [F, H], each with the row of the block table and the
    length of its context, int64 [F]."""

    query: torch.Tensor
    weights: torch.Tensor
    rows: np.ndarray
    limits: np.ndarray


Choose = Callable[[Queries, Selection, torch.Tensor], torch.Tensor]
"""From queries, the index and the block table int32 [R, W] to the places that the queries see, int32 [F, count]."""


def selected_attention(
    query: torch.Tensor,
    call: AttentionCall,
    attend: Callable[[torch.Tensor, AttentionCall], torch.Tensor],
    describe: Callable[[AttentionStep], object],
    choose: Choose,
) -> torch.Tensor:
    """paged_attention of a call with a selection, by one of calls without."""
    selection, step, plain = call.selection, call.metadata.step, call._replace(selection=None)
    assert selection is not None
    rows, limits = contexts(step)
    far = np.flatnonzero(limits > selection.count)
    if not len(far):
        return attend(query, plain)
    result = torch.zeros_like(query)
    near = np.flatnonzero(limits <= selection.count)
    if len(near):
        tokens, own = torch.from_numpy(near), step_of_some(step, rows[near], limits[near])
        result.index_copy_(0, tokens, attend(query.index_select(0, tokens), plain._replace(metadata=describe(own))))
    if not selection.found:
        selection.found.append(all_places(rows[far], limits[far], torch.from_numpy(far), step, selection, choose))
    size = max(1, COPIED_BYTES // (selection.count * call.key_cache[0, :, 0].nbytes))
    for tokens, places in zip(torch.from_numpy(far).split(size), selection.found[0].split(size)):
        result.index_copy_(0, tokens, attend(query.index_select(0, tokens), side_by_side(plain, places, describe)))
    return result


def contexts(step: AttentionStep) -> tuple[np.ndarray, np.ndarray]:
    """Of each token its row, and how many tokens it sees with itself, int64 [T]."""
    counts = np.diff(step.query_starts).astype(np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = step.context_lengths.astype(np.int64) - step.query_starts[1:]
    return rows, ends[rows] + np.arange(len(rows)) + int(step.query_starts[0]) + 1


def step_of_some(step: AttentionStep, rows: np.ndarray, limits: np.ndarray) -> AttentionStep:
    """The step of the first tokens of rows alone."""
    counts = np.bincount(rows, minlength=len(step.context_lengths))
    lengths = np.zeros(len(counts), dtype=np.int32)
    np.maximum.at(lengths, rows, limits.astype(np.int32))
    return step._replace(query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32), context_lengths=lengths)


def all_places(
    rows: np.ndarray, limits: np.ndarray, tokens: torch.Tensor, step: AttentionStep, selection: Selection, choose: Choose
) -> torch.Tensor:
    """What `tokens` see, int32 [F, count], so many at once that their scores take little memory."""
    size, found = max(1, SCORED // int(limits.max())), []
    for at in range(0, len(rows), size):
        some, own = slice(at, at + size), tokens[at : at + size]
        chosen = Queries(selection.query.index_select(0, own), selection.weights.index_select(0, own), rows[some], limits[some])
        found.append(choose(chosen, selection, step.block_table))
    return torch.cat(found)


def side_by_side(call: AttentionCall, places: torch.Tensor, describe: Callable[[AttentionStep], object]) -> AttentionCall:
    """The call of queries of which each sees its own `places` [N, count]."""
    size = call.key_cache.shape[2]
    (many, count), blocks, offsets = places.shape, places.long() // size, places.long() % size
    is_both, shape = call.value_cache.data_ptr() == call.key_cache.data_ptr(), (many, -1, count, call.key_cache.shape[3])

    def copied(cache: torch.Tensor) -> torch.Tensor:
        return cache[blocks, :, offsets].transpose(1, 2).flatten().view(shape)

    keys = copied(call.key_cache)
    values = keys if is_both else copied(call.value_cache)
    table = torch.arange(many, dtype=torch.int32, device=places.device)[:, None]
    step = AttentionStep(np.arange(many + 1, dtype=np.int32), np.full(many, count, dtype=np.int32), table, count, keys.shape[1])
    return call._replace(key_cache=keys, value_cache=values, metadata=describe(step))


def chosen_keys(queries: Queries, selection: Selection, table: torch.Tensor) -> torch.Tensor:
    """The places of the keys that each query sees, int32 [F, count], in the order of its context; of equal scores the first ones.

    Scores are float32: sums over a head's numbers in their order, then over sixteens of heads, then over the sixteen, each product
    rounded before it is added, as the kernels have them.
    """
    size, found = selection.cache.shape[2], []
    for query, weights, row, limit in zip(queries.query.float(), queries.weights, queries.rows.tolist(), queries.limits.tolist()):
        at = torch.arange(limit, device=table.device)
        places = table[row].long()[at // size] * size + at % size
        scores = scores_of(query, weights, selection.cache[places // size, 0, places % size].float())
        bits = scores.view(torch.int32)
        ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() * 2**32 + (limit - at)
        found.append(places[ranks.topk(selection.count).indices.sort().values].int())
    return torch.stack(found)


def scores_of(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of keys [L, I] for query [H, I] and weights [H], all float32: [L]."""
    heads, width = query.shape
    sums = keys.new_zeros(len(keys), -(-heads // LANES) * LANES)
    for place in range(width):
        sums[:, :heads] += keys[:, place : place + 1] * query[:, place]
    sums[:, :heads] = sums[:, :heads].clamp(min=0.0) * weights
    lanes, scores = keys.new_zeros(len(keys), LANES), keys.new_zeros(len(keys))
    for part in sums.split(LANES, 1):
        lanes += part
    for lane in lanes.unbind(1):
        scores += lane
    return scores
