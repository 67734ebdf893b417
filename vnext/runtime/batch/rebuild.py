"""The plain implementation of the persistent batch: the same tensors, built from the state alone, request by request.

Keeps nothing between steps. Slow; it is the specification against which `batch.py` is tested.
"""

from __future__ import annotations

import numpy as np
import torch

from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.runtime.batch.sampling_rows import (
    TokenCounts,
    banned,
    is_special,
    logit_bias,
    penalties,
)
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.sampling.constraint import Matcher, Vocabulary
from vnext.sampling.inputs import DTYPES, Allowed, SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.fold_plan import row_tokens
from vnext.state.params import CHOOSING, Sampling, is_filtered, is_penalised
from vnext.state.state import State, StepInFlight, blocks_for
from vnext.state.windows import row_table

Sampled = dict[tuple[int, int, int], int]
"""(step, request id, preemption count) -> token sampled by a step that is still in flight."""


def rebuild(
    state: State, sampled: Sampled, vocab_size: int, vocabulary: Vocabulary | None = None
) -> StepInputs:
    """The newest step in flight as tensors on the CPU; `sampled` holds the tokens that earlier steps sampled.

    `vocabulary`: what constraints are matched with.
    """
    scheduled, size, groups = state.in_flight[-1], state.config.block_size, state.config.group_count
    tokens, positions, tables, sample_at, rows = [], [], [], [], []
    slots: list[list[int]] = [[] for _ in range(groups)]
    starts, contexts = [0], []
    for id_, start, count, samples in zip(scheduled.ids, scheduled.starts, scheduled.counts, scheduled.samples):
        row = int(np.flatnonzero(state.rows.id == id_)[0])
        history, table = history_of(state, row, sampled), row_table(state, row).tolist()
        for position in range(int(start), int(start + count)):
            tokens.append(history[position])
            positions.append(position)
            for group, found in enumerate(slots):
                found.append(table[position // size * groups + group] * size + position % size)
        starts.append(len(tokens))
        contexts.append(int(start + count))
        tables.append(table)
        if samples:
            sample_at.append(len(tokens) - 1)
            rows.append((row, history, int(start + count)))
    width = blocks_for(max(contexts), size)
    places = [
        GroupPlaces(torch.tensor(found, dtype=torch.int64), block_table(state.config, scheduled, tables, group, width))
        for group, found in enumerate(slots)
    ]
    host = HostBatch(np.array(starts, dtype=np.int32), np.array(contexts, dtype=np.int32))
    forward = ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=places[0].slots,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_table=places[0].block_table,
        sample_at=torch.tensor(sample_at, dtype=torch.int64),
        host=host,
        groups=tuple(places[1:]),
    )
    return StepInputs(forward, *sampling_of(state, rows, vocab_size, vocabulary))


def allowed(answers: list[tuple[int, Sampling, list[int]]], vocabulary: Vocabulary | None) -> Allowed | None:
    """The masks of (index among the samples, parameters, answer so far) with a constraint; None if there are none."""
    bound = [(at, sampling.constraint, answer) for at, sampling, answer in answers if sampling.constraint is not None]
    if not bound:
        return None
    assert vocabulary is not None, "constraints need the checkpoint's vocabulary"
    may_come = [Matcher(constraint, vocabulary, answer).allowed() for _, constraint, answer in bound]
    masks = np.stack([vocabulary.mask_of(np.flatnonzero(each).tolist()) for each in may_come])
    rows = torch.tensor([at for at, *_ in bound])
    return Allowed(rows, torch.arange(len(bound)), torch.from_numpy(masks.view(np.int32)))


def block_table(
    config: SchedulerConfig, scheduled: StepInFlight, tables: list[list[int]], group: int, width: int
) -> torch.Tensor:
    """Blocks of each request in one group of layers, as far as this step's queries see (int32 [R, width]; others are 0)."""
    size, groups, window = config.block_size, config.group_count, (config.windows or (0,))[group]
    found = torch.zeros((len(tables), width), dtype=torch.int32)
    for at, (table, start) in enumerate(zip(tables, scheduled.starts.tolist())):
        first = max(start - window + 1, 0) // size if window else 0
        pages = table[group::groups][first:width]
        found[at, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return found


def history_of(state: State, row: int, sampled: Sampled) -> list[int]:
    """All tokens of a row: the known ones, and those that its earlier steps in flight sampled."""
    id_, preemptions = int(state.rows.id[row]), int(state.rows.preemption_count[row])
    placeholders = [
        sampled[scheduled.step, id_, preemptions]
        for scheduled in state.in_flight[:-1]
        if (scheduled.step, id_, preemptions) in sampled
    ]
    return row_tokens(state, row).tolist() + placeholders


def sampling_of(
    state: State, rows: list[tuple[int, list[int], int]], vocab_size: int, vocabulary: Vocabulary | None = None
) -> tuple[SamplingInputs | None, np.ndarray]:
    """Sampling inputs of (row, history, position of the token to be sampled)."""
    requests = [state.requests[int(state.rows.id[row])] for row, _, _ in rows]
    params = [request.sampling for request in requests]
    asked = np.array([sampling.logprobs for sampling in params], dtype=np.int64)
    if not rows:
        return None, asked
    special = [(at, sampling) for at, sampling in enumerate(params) if is_special(sampling)]
    answers = [(at, each, rows[at][1][requests[at].prompt_length :]) for at, each in enumerate(params)]
    counts = [
        TokenCounts(np.array(rows[at][1]), requests[at].prompt_length, vocab_size)
        for at, sampling in special
        if is_penalised(sampling)
    ]
    early = [
        (at, sampling) for at, sampling in special if rows[at][2] < requests[at].prompt_length + sampling.min_tokens
    ]
    columns = {name: [getattr(sampling, name) for sampling in params] for name in CHOOSING}
    return SamplingInputs(
        **{name: torch.tensor(column, dtype=DTYPES[name]) for name, column in columns.items()},
        seed=torch.from_numpy(np.array([sampling.seed for sampling in params], dtype=np.uint64).astype(np.int64)),
        position=torch.tensor([position for _, _, position in rows], dtype=torch.int64),
        penalties=penalties([(at, sampling) for at, sampling in special if is_penalised(sampling)], counts, "cpu"),
        bias=logit_bias(special, "cpu"),
        banned=banned(state.config, early, "cpu"),
        allowed=allowed(answers, vocabulary),
        logprobs=int(asked.max()),
        any_random=any(sampling.temperature > 0 for sampling in params),
        any_filter=any(sampling.temperature > 0 and is_filtered(sampling) for sampling in params),
    ), asked
