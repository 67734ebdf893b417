"""Outputs: the news that clients get from one event, as values. The runtime only delivers them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from vnext.state.block_hash import leading_hashes
from vnext.state.events import AnyEvent, RequestAborted, RequestId, StepCommitted
from vnext.state.fold_commit import Effects, MatchedSamples, match_samples
from vnext.state.pool import Pool, is_pinned, longest_prefix
from vnext.state.preempt import row_tokens
from vnext.state.state import Request, State, root_of
from vnext.state.store import fields
from vnext.state.windows import NULL, longest_hit

Finish = Literal["", "stop", "length", "abort"]


class Retained(NamedTuple):
    """Of the tokens that a request wanted to stay in the cache, in whole blocks: those that are pinned as it ends, and the rest."""

    pinned: int
    gave_way: int


class Output(msgspec.Struct, frozen=True):
    """One request's news. `token` is -1 if there is none; `sample` is its index among the step's samples.

    `stop_token` is the token that ended the request, -1 if none did. `cached_tokens` is its prompt's prefix hit.
    `retained`: of a request that has finished, what stays in the cache of what it wanted to; None where it wanted nothing.
    """

    id: RequestId
    name: str
    token: int
    sample: int
    finish: Finish
    stop_token: int
    cached_tokens: int
    retained: Retained | None = None


class Going(msgspec.Struct, frozen=True):
    """Requests that got a token and continue: `ids` int64[n], `tokens` int32[n], `cached` (as in Output) int64[n]."""

    ids: np.ndarray
    tokens: np.ndarray
    cached: np.ndarray


def outputs(before: State, event: AnyEvent, after: State, effects: Effects = None) -> tuple[Output, ...]:
    """The news of a commit, in the step's order, or of an abort. `effects` comes from `fold` and is recomputed if missing."""
    if isinstance(event, StepCommitted):
        return _of_commit(before, after, effects or match_samples(before, event))
    if isinstance(event, RequestAborted):
        named_once = dict.fromkeys(event.ids)
        gone = [before.requests[id_] for id_ in named_once if id_ in before.requests and id_ not in after.requests]
        return tuple(Output(request.id, request.name, -1, -1, "abort", -1, 0) for request in gone)
    return ()


def outputs_apart(before: State, after: State, matched: MatchedSamples) -> tuple[Going, tuple[Output, ...]]:
    """The news of a commit: requests that continue (the majority) as columns, and requests that end as in `outputs`."""
    if not matched.ended and matched.runs is None:
        return going_of(before.rows.cells, matched.rows, matched.tokens), ()
    ends = matched.stopped | matched.at_limit
    if matched.runs is not None:  # the earlier tokens of a request that ends go with its last one
        ends = np.isin(matched.rows, matched.rows[ends])
    goes_on = ~ends
    going = going_of(before.rows.cells, matched.rows[goes_on], matched.tokens[goes_on])
    return going, _of_commit(before, after, matched, ends.nonzero()[0])


def going_of(cells: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> Going:
    """The news of these rows (int64[n], ascending) of a matrix, which get these tokens."""
    if len(rows) == cells.shape[1] and rows.tobytes() == _all_rows(len(rows)):
        return Going(cells[fields.ID], tokens, cells[fields.CACHED])
    return Going(cells[fields.ID].take(rows), tokens, cells[fields.CACHED].take(rows))


@lru_cache(maxsize=256)
def _all_rows(count: int) -> bytes:
    return np.arange(count).tobytes()


def _of_commit(before: State, after: State, matched: MatchedSamples, places: np.ndarray | None = None) -> tuple[Output, ...]:
    """The outputs of all matched rows, or only of those at `places`."""
    reported: tuple[np.ndarray, ...] = matched.rows, matched.tokens, matched.samples, matched.stopped, matched.at_limit
    rows, *rest = reported if places is None else (column[places] for column in reported)
    cells, requests = before.rows.cells, before.requests
    made = []
    for row, id_, hit, token, sample, stopped, at_limit in zip(
        rows.tolist(), cells[fields.ID, rows].tolist(), cells[fields.CACHED, rows].tolist(), *(column.tolist() for column in rest)
    ):
        finish: Finish = "stop" if stopped else "length" if at_limit else ""
        request = requests[id_]
        retains = finish and request.sampling.retention
        stays = _retained(before, after, request, row, matched.tokens[matched.rows == row]) if retains else None
        made.append(Output(id_, request.name, token, sample, finish, token if stopped else -1, hit, stays))
    return tuple(made)


def _retained(before: State, after: State, request: Request, row: int, new: np.ndarray) -> Retained:
    """Of a request that wanted something to stay, in a row of `before`, which the commit of its last tokens, `new` (int32[n]), has
    ended."""
    config = before.config
    history, size = np.concatenate((row_tokens(before, row), new)), config.block_size
    most = min(max(tokens for tokens, _ in request.sampling.retention), len(history) - 1)
    keys = leading_hashes(root_of(before, request), history.tobytes(), size, most // size)
    pool, pins, groups = after.pool, after.pool.pins, config.group_count
    if pins is None:
        return Retained(0, len(keys) * config.block_size)
    hits = longest_hit(config, pool, keys) if config.windows else longest_prefix(pool, keys, len(keys))
    if pool.states is not None:
        there = keys[: len(hits) // groups]
        hits = hits[: groups * max((at + 1 for at, key in enumerate(there) if _pins(pool.states, key)), default=0)]
    stays = ((hits == NULL) | (pins.ends.at(hits) > 0)).reshape(-1, groups).all(axis=1)
    pinned = int(np.argmin(np.append(stays, False)))
    return Retained(pinned * config.block_size, (len(keys) - pinned) * config.block_size)


def _pins(states: Pool, key: bytes) -> bool:
    """Whether the snapshot behind the block of this name is pinned."""
    page = states.prefix_index.block_of(key)
    return page is not None and is_pinned(states, page)
