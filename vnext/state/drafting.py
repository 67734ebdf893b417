"""Drafting: how many drafts a step takes of each row, as one pure function of the state.

A rank drafts tokens that may follow a request's last one, and the step computes them together with it. At each draft's
position the rank samples the request's own token, by its seed and position. A draft is kept while it equals that token, so
the answer is the one without drafts, bit for bit. The arithmetic over the rows is in store/drafts_numpy.py.

    last token      draft 1      draft 2      draft 3          positions computed: 4
    samples: a      b            c            d                kept: a, and b if draft 1 == a, c if also draft 2 == b, ...
"""

from __future__ import annotations

import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.store import columns, drafts_numpy
from vnext.state.store.rows import Rows


def most_drafts(config: SchedulerConfig) -> int:
    """The most drafts of one row in a step."""
    assert config.speculation is not None
    most, threshold = config.speculation.num_speculative_tokens, config.long_prefill_token_threshold
    return min(most, threshold - 1) if threshold else most


def spare_tokens(config: SchedulerConfig) -> int:
    """The tokens beyond its computed ones for which a row may hold blocks: drafts that were not kept, of each step in flight."""
    return config.speculation.num_speculative_tokens * config.pipeline_depth if config.speculation else 0


def drafts_a_step(config: SchedulerConfig) -> int:
    """The most drafts of a step. A rank keeps the states of recurrent layers before each draft until it knows which are kept, in
    pages of its own: as many as a full batch may want, or a quarter of what requests have."""
    if config.speculation is None:
        return 0
    most = min(config.max_num_seqs * config.speculation.num_speculative_tokens, config.max_num_batched_tokens)
    return min(most, max(config.state_pages // 4, config.speculation.num_speculative_tokens)) if config.state_pages else most


def draft_room(config: SchedulerConfig, rows: Rows) -> np.ndarray:
    """The most drafts that a plan may give each row (int64[R])."""
    return drafts_numpy.draft_room(rows.cells, most_drafts(config))


def decided_by(config: SchedulerConfig) -> tuple[int, int, int, int]:
    """The most drafts of a row, and the costs of a row, of drafting at all, and of a row beside many others, in thousandths of a
    step of one row."""
    costs = config.speculation
    assert costs is not None and costs.row_cost >= 0, "a state has the cost that was measured"
    return most_drafts(config), costs.row_cost, costs.step_cost, costs.row_cost_many or costs.row_cost


def expected_drafts(config: SchedulerConfig, rows: Rows, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """The drafts of the expected plan (int64[R]) beside the `tokens` (int64[R]) that rows compute without them, and their sum. None
    goes beyond a block's edge where snapshots are taken."""
    drafts = np.empty(len(rows), dtype=np.int64)
    assert rows.drafting is not None
    budget = config.max_num_batched_tokens
    if config.state_pages:
        budget = min(budget, int(tokens.sum()) + drafts_a_step(config))
    total = columns.impl.drafts(rows.cells, rows.drafting, tokens, drafts, decided_by(config), budget)
    if config.takes_snapshots:
        np.minimum(drafts, config.block_size - 1 - rows.computed % config.block_size, out=drafts)
        total = int(drafts.sum())
    return drafts, total
