"""What drafts cost a step, measured when a rank starts: it decides how many drafts pay (vnext/state/drafting.py).

Runs real steps on a small cache of their own, before the engine's is made. The engine records the result in its first event, so
a replay decides as the engine did, on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from vnext.models.layers.kv_cache import kv_groups
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import Steps
from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.events import EngineStarted, RequestArrived, RequestId, StepCommitted, StepPlanned, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

ROWS, MANY_ROWS = 8, 32
STEPS_MIN, STEPS_MAX, SECONDS = 6, 40, 0.3
BLOCK_SIZE, LENGTH, PROMPT = 16, 96, 4
COST_MAX = 1000
MARGIN = 9 / 8
"""Beside many rows a draft gains little at best. A gain that is smaller than this is not worth the risk."""
ONE_DRAFT = Speculation(num_speculative_tokens=1)
CERTAIN = 1000.0
"""Added to a token's logit: the model repeats it, so `ngram` has a draft in every step."""


def draft_costs(
    runner: ModelRunner, make_steps: Callable[[ModelRunner], Steps], pipeline_depth: int = 1, seconds: float = SECONDS
) -> tuple[int, int, int]:
    """The row_cost, step_cost and row_cost_many of Speculation (0 to 1000 each), in thousandths of the time of a step of one row.

    One more draft adds one more row and, with a draft model or a head, its step. The first adds the step_cost beyond that. One in a
    step of more than FEW_ROWS rows, which may be compute-bound, adds row_cost_many; it contains the MARGIN. With a `pipeline_depth`
    of 2 steps are launched ahead, and a step that drafts waits for the one before: that is part of its cost. A measurement takes
    STEPS_MIN steps or more, until `seconds` are over: 0 for ranks that compute together and must take equally many.
    """
    timed = partial(_step_seconds, runner, make_steps, pipeline_depth=pipeline_depth, seconds=seconds)
    _, alone_s, together_s = (timed(rows) for rows in (ROWS, 1, ROWS))  # the first warms up
    draft = runner.draft  # each of its steps in a new block is made anew
    draft_s = _step_seconds(draft, make_steps, 1, block_size=1, seconds=seconds) if draft else 0.0
    draft_s = runner.head.step_seconds() if runner.head else draft_s
    row_s = (together_s - alone_s) / (ROWS - 1) + draft_s
    many_s = (timed(MANY_ROWS) - together_s) / (MANY_ROWS - ROWS) + draft_s
    biased_s, drafted_s = (timed(1, speculation=each, bias=CERTAIN) for each in (None, ONE_DRAFT))
    step_s = drafted_s - biased_s - row_s
    row, step, many = (_thousandths(seconds / alone_s) for seconds in (row_s, step_s, MARGIN * many_s))
    return row, step, many


def _thousandths(share: float) -> int:
    return min(max(round(1000 * share), 0), COST_MAX)


def _step_seconds(
    runner: ModelRunner, make_steps: Callable[[ModelRunner], Steps], rows: int, block_size: int = BLOCK_SIZE,
    speculation: Speculation | None = None, bias: float = 0.0, pipeline_depth: int = 1, seconds: float = SECONDS,
) -> float:  # fmt: skip
    """The shortest time of a decode step of this many rows with its two events: what disturbs a step is not its cost."""
    windows = kv_groups(runner.config).windows
    windows = windows if any(windows) else ()
    config = SchedulerConfig(
        block_size=block_size, page_count=rows * LENGTH // block_size * (len(windows) or 1),
        max_num_batched_tokens=rows * BLOCK_SIZE, max_num_seqs=rows, max_model_len=LENGTH,
        vocab_size=runner.config.vocab_size, pipeline_depth=pipeline_depth, digest_interval=2**31 - 1, windows=windows,
        speculation=speculation, state_pages=rows if runner.config.recurrent else 0, snapshot_interval=0,
    )  # fmt: skip
    started = EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0)
    steps, state = make_steps(runner), start(started)
    steps.start(state)
    for row in range(rows):
        likes = ((1 + row, bias),) if bias else ()
        sampling = Sampling(seed=row, max_tokens=LENGTH - PROMPT, temperature=0.0, ignore_eos=True, logit_bias=likes)
        prompt = pack_tokens([1 + row] * PROMPT)
        state = reduce(
            state, RequestArrived(id=RequestId(row), name="", prompt=prompt, sampling=sampling, priority=0, arrival_ns=0)
        )
    return _shortest(steps, state, bool(speculation), seconds)


def _shortest(steps: Steps, state: State, drafts: bool, seconds_min: float) -> float:
    """The seconds of the shortest step, all requests admitted in the first; `drafts`: of those with drafts, or without.
    `seconds_min`: as in `draft_costs`."""
    seconds, depth = [], state.config.pipeline_depth
    admitted = tuple((row, PROMPT) for row in range(len(state.waiting)))
    for step in range(STEPS_MAX):
        began_s = time.perf_counter()
        state = reduce(state, StepPlanned(step=step, admitted=() if step else admitted))
        steps.launch(state)
        if len(state.in_flight) < depth:
            continue
        done = steps.wait()
        commit = StepCommitted(step=state.committed, tokens=done.tokens, counts=done.counts, drafted=done.drafted)
        state = reduce(state, commit)
        if step >= depth and bool(done.counts) == drafts:
            seconds.append(time.perf_counter() - began_s)
        if step >= STEPS_MIN and sum(seconds) > seconds_min:
            break
    for _ in state.in_flight:
        steps.wait()
    return min(seconds, default=0.0)
