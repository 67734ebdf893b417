"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

Plans are recorded and sent as differences from this one, so a steady step costs a few bytes whatever the batch size.

With microbatches, a step takes its part of the requests that decode, and none whose token is in flight. The stages of a pipeline
then compute several steps at once: the next step needs no token of the one before. Prompts are computed in every step.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.drafting import expected_drafts
from vnext.state.recurrent import cut
from vnext.state.state import State
from vnext.state.store import columns, columns_numpy
from vnext.state.store.rows import wants


class Work(msgspec.Struct, frozen=True):
    """The work of one step: new tokens of each row and the blocks it lacks for them (int64[R] each, never written again).

    `tokens_sum` is the sum of the tokens, `pages_sum` the number of pages that all these blocks take. `drafts` int64[R]: how
    many of the tokens are drafts; None without speculation.
    """

    tokens: np.ndarray
    blocks: np.ndarray
    tokens_sum: int
    pages_sum: int
    drafts: np.ndarray | None = None


def expected_work(state: State, drafts: bool = True) -> Work:
    """The work of the expected plan: 0 tokens for a row that has nothing to compute, whose turn it is not, or that the budget does
    not reach.

    Drafts are part of it while the free pages suffice for all of them, unless `drafts` is false.
    """
    work = _without_drafts(state)
    if state.config.speculation is None:
        return work
    if drafts and len(state.rows):
        drafted, total = expected_drafts(state.config, state.rows, work.tokens)
        if not total:
            return msgspec.structs.replace(work, drafts=drafted)
        drafting = work_of(state, work.tokens + drafted, drafted)
        if drafting.pages_sum <= state.pool.free:
            return drafting
    return msgspec.structs.replace(work, drafts=np.zeros_like(work.tokens))


def in_turn(state: State) -> np.ndarray:
    """Which rows the next step takes (bool[R]): all, or those of its microbatch."""
    return columns_numpy.in_turn(state.rows.cells, microbatches(state), state.planned)


def microbatches(state: State) -> int:
    """The parts into which the next steps divide the requests that decode. Cautious steps follow one another and take all."""
    return 1 if state.cautious else state.config.microbatches


def _without_drafts(state: State) -> Work:
    if state.config.takes_snapshots:
        return _up_to_edges(state)
    config, both = state.config, np.empty((2, len(state.rows)), dtype=np.int64)
    tokens_sum, blocks_sum = columns.impl.expected(
        state.rows.cells, both, config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size,
        microbatches(state), state.planned,
    )  # fmt: skip
    if config.windows:
        blocks_sum *= len(config.windows)
    return Work(both[0], both[1], tokens_sum, blocks_sum)


def _up_to_edges(state: State) -> Work:
    """As `columns.expected`, cut where snapshots of recurrent layers are taken."""
    config, rows = state.config, state.rows
    most = wants(rows)
    if config.long_prefill_token_threshold:
        most = np.minimum(most, config.long_prefill_token_threshold)
    most = cut(config, rows, most)
    before = np.cumsum(most) - most
    return work_of(state, np.minimum(np.maximum(config.max_num_batched_tokens - before, 0), most))


def work_of(state: State, tokens: np.ndarray, drafts: np.ndarray | None = None) -> Work:
    """The work of computing the given number of tokens in each row, of which `drafts` are drafts (int64[R] each)."""
    config, rows = state.config, state.rows
    need = np.empty(len(rows), dtype=np.int64)
    blocks = columns.impl.needed(rows.cells, tokens, need, config.block_size)
    return Work(tokens, need, int(tokens.sum()), blocks * config.group_count, drafts)
