"""The cost of one more row in a step, measured when a rank starts: it decides how many drafts pay (vnext/state/drafting.py).

Runs real steps on a small cache of their own, before the engine's is made. The engine records the result in its first event, so
a replay decides as the engine did, on any machine.
"""

from __future__ import annotations

from vnext.models.layers.kv_cache import kv_groups
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import HostSteps
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived, RequestId, StepCommitted, StepPlanned, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

ROWS = 8
STEPS = 9
BLOCK_SIZE, PROMPT = 16, 12
COST_MAX = 1000


def row_cost(runner: ModelRunner) -> int:
    """The time that one more draft adds to a decode step, in thousandths of the time of a step of one row (0 to 1000): that of one
    more row and, with a draft model, of its own step."""
    _, alone_s, together_s = (_step_seconds(runner, rows) for rows in (ROWS, 1, ROWS))  # the first warms up
    draft_s = _step_seconds(runner.draft, 1, block_size=1) if runner.draft else 0.0  # each step in a new block is made anew
    return min(max(round(1000 * ((together_s - alone_s) / (ROWS - 1) + draft_s) / alone_s), 0), COST_MAX)


def _step_seconds(runner: ModelRunner, rows: int, block_size: int = BLOCK_SIZE) -> float:
    """The shortest time of a decode step of this many rows: what disturbs a step is not its cost."""
    windows = kv_groups(runner.config).windows
    windows = windows if any(windows) else ()
    config = SchedulerConfig(
        block_size=block_size, page_count=rows * 2 * BLOCK_SIZE // block_size * (len(windows) or 1),
        max_num_batched_tokens=rows * BLOCK_SIZE,
        max_num_seqs=rows, max_model_len=2 * BLOCK_SIZE, vocab_size=runner.config.vocab_size, pipeline_depth=1,
        digest_interval=2**31 - 1, windows=windows,
    )  # fmt: skip
    steps, seconds = HostSteps(runner), []
    started = EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0)
    state = start(started)
    steps.start(state)
    for row in range(rows):
        sampling = Sampling(seed=row, max_tokens=STEPS + 2, temperature=0.0, ignore_eos=True)
        prompt = pack_tokens([1 + row] * PROMPT)
        state = reduce(
            state, RequestArrived(id=RequestId(row), name="", prompt=prompt, sampling=sampling, priority=0, arrival_ns=0)
        )
    admitted = tuple((row, PROMPT) for row in range(rows))
    for step in range(STEPS):
        state = reduce(state, StepPlanned(step=step, admitted=() if step else admitted))
        steps.launch(state)
        computed = steps.wait()
        seconds.append(computed.seconds)
        state = reduce(state, StepCommitted(step=step, tokens=computed.tokens))
    return min(seconds[1:])
