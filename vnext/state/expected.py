"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

Plans are recorded and sent as differences from this one, so a steady step costs a few bytes whatever the batch size.

With microbatches, a step takes its part of the requests that decode, and none whose token is in flight. The stages of a pipeline
then compute several steps at once: the next step needs no token of the one before. Prompts are computed in every step.

A rank encodes an input, a tile of an image or a sound, whole, in the first step that computes a part of it, and everybody waits for
that. So with `inputs_a_step` a chunk ends where one more input would begin: rows are served in order, then admitted requests. A
step that preempts begins any number, since those who are left must go on. Source: vLLM's encoder budget.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.drafting import expected_drafts
from vnext.state.preempt import row_tokens
from vnext.state.recurrent import cut
from vnext.state.state import State, Waiting
from vnext.state.store import columns, columns_numpy
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.rows import wants


class Work(msgspec.Struct, frozen=True):
    """The work of one step: new tokens of each row and the blocks it lacks for them (int64[R] each, never written again).

    `tokens_sum` is the sum of the tokens, `pages_sum` the number of pages that all these blocks take. `drafts` int64[R]: how
    many of the tokens are drafts; None without speculation. `inputs` is how many inputs admitted requests may begin.
    """

    tokens: np.ndarray
    blocks: np.ndarray
    tokens_sum: int
    pages_sum: int
    drafts: np.ndarray | None = None
    inputs: int = 0


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
        drafting = work_of(state, work.tokens + drafted, drafted, work.inputs)
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
    config, cells = state.config, state.rows.cells
    if config.inputs_a_step or (config.state_pages and config.takes_snapshots):
        return _up_to_edges(state)
    both = np.empty((2, cells.shape[1]), dtype=np.int64)
    tokens_sum, blocks_sum = columns.impl.expected(
        cells, both, config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size,
        microbatches(state), state.planned,
    )  # fmt: skip
    if config.windows:
        blocks_sum *= len(config.windows)
    return Work(both[0], both[1], tokens_sum, blocks_sum)


def _up_to_edges(state: State) -> Work:
    """As `columns.expected`, cut where snapshots of recurrent layers are taken and where more inputs would begin than may."""
    config, rows = state.config, state.rows
    most = wants(rows) * in_turn(state)
    if config.long_prefill_token_threshold:
        most = np.minimum(most, config.long_prefill_token_threshold)
    most, inputs = up_to_inputs(state, cut(config, rows, most))
    before = np.cumsum(most) - most
    return work_of(state, np.minimum(np.maximum(config.max_num_batched_tokens - before, 0), most), inputs=inputs)


def work_of(state: State, tokens: np.ndarray, drafts: np.ndarray | None = None, inputs: int = 0) -> Work:
    """The work of computing the given number of tokens in each row, of which `drafts` are drafts (int64[R] each), with so many
    inputs left for others."""
    config, rows = state.config, state.rows
    need = np.empty(len(rows), dtype=np.int64)
    blocks = columns.impl.needed(rows.cells, tokens, need, config.block_size)
    return Work(tokens, need, int(tokens.sum()), blocks * config.group_count, drafts, inputs)


# ---- inputs --------------------------------------------------------------------------------------------------------


def up_to_inputs(state: State, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """`tokens` of the rows (int64[R]), cut where they would begin more inputs than a step may, and how many are left for others."""
    left = state.config.inputs_a_step
    if not left:
        return tokens, 0
    found, rows = tokens.copy(), state.rows
    for row in np.flatnonzero((rows.computed < rows.prompt) & (tokens > 0)).tolist():
        part = row_tokens(state, row)[int(rows.computed[row]) :][: int(tokens[row])]
        starts = np.flatnonzero(part < INPUT_BEGINS)
        found[row], left = _cut(starts, int(tokens[row]), left)
    return found, left


def first_up_to_inputs(config: SchedulerConfig, waiting: Waiting, start: int, tokens: int, left: int) -> tuple[int, int]:
    """`tokens` of a waiting request from `start` on, cut as those of a row, and how many inputs others may still begin. It begins
    the input in which it starts, too."""
    if not config.inputs_a_step:
        return tokens, left
    part = np.frombuffer(waiting.tokens, np.int32)[start : start + tokens]
    begins = part < INPUT_BEGINS
    begins[:1] = part[:1] < 0
    return _cut(np.flatnonzero(begins), tokens, left)


def _cut(starts: np.ndarray, tokens: int, left: int) -> tuple[int, int]:
    """How many of `tokens`, among which inputs begin at `starts`, begin no more than `left`, and how many those leave."""
    return (int(starts[left]), 0) if len(starts) > left else (tokens, left - len(starts))
