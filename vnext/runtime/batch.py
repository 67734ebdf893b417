"""Persistent batch: the running requests as rows of arrays that live as long as the rank; only differences are copied.

Owns block tables and last tokens by batch row, and turns one step in flight into a ForwardBatch. Decides nothing: rows
come from the state. `batch_rebuild.py` builds the same tensors from the state alone and is the oracle in tests.
Cost of a steady step: a dozen array operations and the blocks that were added, nothing proportional to history.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.models.batch import ForwardBatch, HostBatch
from vnext.runtime.batch_sampling import SamplingColumns
from vnext.runtime.sampling_inputs import SamplingInputs
from vnext.state import extents
from vnext.state.config import SchedulerConfig
from vnext.state.rows import find_rows
from vnext.state.state import Flight, State, blocks_for


class StepInputs(NamedTuple):
    """What one step computes and how it is sampled. `logprobs` int64[S]: alternatives each sampled row asked for, -1 none.

    `sampling` is None in a step that samples nothing.
    """

    forward: ForwardBatch
    sampling: SamplingInputs | None
    logprobs: np.ndarray


class PersistentBatch:
    """Rows of at most `config.running_max` requests. One instance a rank, used by one thread."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._device = device
        row_count, width = config.running_max, blocks_for(config.model_len_max, config.block_size)
        self._table = np.zeros((row_count, width), dtype=np.int32)
        self._held = np.zeros(row_count, dtype=np.int64)
        self._last = np.zeros(row_count, dtype=np.int64)
        self._sampling = SamplingColumns(config, vocab_size)
        self._free = list(range(row_count - 1, -1, -1))
        self._ids = np.empty(0, dtype=np.int64)
        self._epochs = np.empty(0, dtype=np.int64)
        self._row_of: dict[tuple[int, int], int] = {}
        self._places = np.empty(0, dtype=np.int64)

    def step_inputs(self, state: State) -> StepInputs:
        """The newest step in flight of `state` as tensors. The rows are brought in line with the state first."""
        self._update(state)
        flight = state.flights[-1]
        rows = find_rows(state.rows, flight.ids, flight.epochs)
        places = self._places[rows]
        sampled = np.flatnonzero(flight.samples)
        position = (flight.starts + flight.counts)[sampled]
        sampling, logprobs = self._sampling.inputs(places[sampled], position, self._device)
        return StepInputs(self._forward(state, flight, rows, places), sampling, logprobs)

    def take_sampled(self, flight: Flight, tokens: np.ndarray) -> None:
        """Remember what the step sampled (int64[S]): the next step may need it before it is committed."""
        pairs = zip(flight.ids[flight.samples].tolist(), flight.epochs[flight.samples].tolist())
        places = np.array([self._row_of[pair] for pair in pairs], dtype=np.int64)
        self._last[places] = tokens
        self._sampling.count(places, tokens)

    def _forward(self, state: State, flight: Flight, rows: np.ndarray, places: np.ndarray) -> ForwardBatch:
        size, counts = self._config.block_size, flight.counts
        positions = extents.spans(flight.starts, counts)
        owners = np.repeat(places, counts)
        ends = np.cumsum(counts)
        context = (flight.starts + counts).astype(np.int32)
        starts = np.concatenate(([0], ends)).astype(np.int32)
        width = blocks_for(int(context.max()), size)
        arrays = (
            self._token_ids(state, flight, rows, places, positions),
            positions,
            self._table[owners, positions // size].astype(np.int64) * size + positions % size,
            starts,
            context,
            self._table[places, :width],
            ends[flight.samples] - 1,
        )
        tensors = (torch.from_numpy(array).to(self._device) for array in arrays)
        return ForwardBatch(*tensors, host=HostBatch(starts, context))

    def _token_ids(
        self, state: State, flight: Flight, rows: np.ndarray, places: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Known tokens from the state; a row that runs ahead of it takes the token it sampled last (int64[T])."""
        known = state.rows.known[rows]
        ahead = np.flatnonzero(flight.starts >= known)
        from_state = np.minimum(positions, np.repeat(known - 1, flight.counts))
        offsets = np.repeat(state.rows.tokens_at[rows], flight.counts)
        tokens = extents.gather(state.tokens, offsets + from_state).astype(np.int64)
        if len(ahead):
            first = np.cumsum(flight.counts) - flight.counts
            tokens[first[ahead]] = self._last[places[ahead]]
        return tokens

    def _update(self, state: State) -> None:
        rows = state.rows
        if not (np.array_equal(rows.id, self._ids) and np.array_equal(rows.epoch, self._epochs)):
            self._change_rows(state)
        held = self._held[self._places]
        grown = rows.blocks - held
        if grown.any():
            owners, columns = np.repeat(self._places, grown), extents.spans(held, grown)
            self._table[owners, columns] = extents.gather(state.tables, extents.spans(rows.table_at + held, grown))
            self._held[self._places] = rows.blocks

    def _change_rows(self, state: State) -> None:
        """Requests that left give their row back; new ones, and new epochs of old ones, take a free row."""
        pairs = list(zip(state.rows.id.tolist(), state.rows.epoch.tolist()))
        for pair in self._row_of.keys() - set(pairs):
            place = self._row_of.pop(pair)
            self._sampling.leave(place)
            self._free.append(place)
        for row, pair in enumerate(pairs):
            if pair not in self._row_of:
                place = self._row_of[pair] = self._free.pop()
                self._held[place] = 0
                self._sampling.join(place, state, row)
        self._places = np.array([self._row_of[pair] for pair in pairs], dtype=np.int64)
        self._ids, self._epochs = state.rows.id, state.rows.epoch
