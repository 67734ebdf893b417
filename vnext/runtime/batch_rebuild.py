"""The simple twin of the persistent batch: the same tensors, built from the state alone, request by request.

Owns nothing between steps. It is the specification that `batch.py` is tested against, and slow.
"""

from __future__ import annotations

import numpy as np
import torch

from vnext.models.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.runtime.batch_sampling import TokenCounts, banned, is_penalised, logit_bias, penalties
from vnext.runtime.sampling_inputs import SamplingInputs
from vnext.runtime.step_inputs import StepInputs
from vnext.state.config import SchedulerConfig
from vnext.state.planning import row_tokens
from vnext.state.state import Flight, State, blocks_for
from vnext.state.windows import row_table

Sampled = dict[tuple[int, int, int], int]
"""(step, request id, epoch) -> token sampled by a step that is still in flight."""


def rebuild(state: State, sampled: Sampled, vocab_size: int) -> StepInputs:
    """The newest step in flight as tensors on the CPU; `sampled` holds what the steps before it sampled."""
    flight, size, groups = state.flights[-1], state.config.block_size, state.config.group_count
    tokens, positions, tables, sample_at, rows = [], [], [], [], []
    slots: list[list[int]] = [[] for _ in range(groups)]
    starts, contexts = [0], []
    for id_, start, count, samples in zip(flight.ids, flight.starts, flight.counts, flight.samples):
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
        GroupPlaces(torch.tensor(found, dtype=torch.int64), block_table(state.config, flight, tables, group, width))
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
    return StepInputs(forward, *sampling_of(state, rows, vocab_size))


def block_table(
    config: SchedulerConfig, flight: Flight, tables: list[list[int]], group: int, width: int
) -> torch.Tensor:
    """Blocks of each request in one group of layers, as far as this step's queries see (int32 [R, width]; others are 0)."""
    size, groups, window = config.block_size, config.group_count, (config.windows or (0,))[group]
    found = torch.zeros((len(tables), width), dtype=torch.int32)
    for at, (table, start) in enumerate(zip(tables, flight.starts.tolist())):
        first = max(start - window + 1, 0) // size if window else 0
        pages = table[group::groups][first:width]
        found[at, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return found


def history_of(state: State, row: int, sampled: Sampled) -> list[int]:
    """All tokens of a row: the known ones and those its earlier steps in flight sampled."""
    id_, epoch = int(state.rows.id[row]), int(state.rows.epoch[row])
    pending = [sampled[flight.step, id_, epoch] for flight in state.flights[:-1] if (flight.step, id_, epoch) in sampled]
    return row_tokens(state, row).tolist() + pending


def sampling_of(
    state: State, rows: list[tuple[int, list[int], int]], vocab_size: int
) -> tuple[SamplingInputs | None, np.ndarray]:
    """Sampling inputs of (row, history, position of the token to be sampled)."""
    requests = [state.requests[int(state.rows.id[row])] for row, _, _ in rows]
    params = [request.sampling for request in requests]
    asked = np.array([sampling.logprobs for sampling in params], dtype=np.int64)
    if not rows:
        return None, asked
    special = [
        (at, sampling)
        for at, sampling in enumerate(params)
        if is_penalised(sampling) or sampling.logit_bias or sampling.min_tokens
    ]
    counts = [
        TokenCounts(np.array(rows[at][1]), requests[at].prompt_length, vocab_size)
        for at, sampling in special
        if is_penalised(sampling)
    ]
    early = [
        (at, sampling) for at, sampling in special if rows[at][2] < requests[at].prompt_length + sampling.min_tokens
    ]
    random = [sampling.temperature > 0 for sampling in params]
    filtered = [sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 for sampling in params]
    return SamplingInputs(
        temperature=torch.tensor([sampling.temperature for sampling in params], dtype=torch.float32),
        top_k=torch.tensor([sampling.top_k for sampling in params], dtype=torch.int64),
        top_p=torch.tensor([sampling.top_p for sampling in params], dtype=torch.float32),
        min_p=torch.tensor([sampling.min_p for sampling in params], dtype=torch.float32),
        seed=torch.from_numpy(np.array([sampling.seed for sampling in params], dtype=np.uint64).astype(np.int64)),
        position=torch.tensor([position for _, _, position in rows], dtype=torch.int64),
        penalties=penalties([(at, sampling) for at, sampling in special if is_penalised(sampling)], counts, "cpu"),
        bias=logit_bias(special, "cpu"),
        banned=banned(state.config, early, "cpu"),
        logprobs=int(asked.max()),
        any_random=any(random),
        any_filter=any(draws and on for draws, on in zip(random, filtered)),
    ), asked
