"""Rows of a batch: which request has which, for as long as it runs, and what any batch keeps of each.

Owns the requests' rows, their block tables and last tokens on the host, and brings them in line with a state; only differences are
copied. Sampling parameters and drafts are kept by the batch's own kind: on the host (batch.py), on a device (gpu/device_batch.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vnext.runtime.batch.draft_rows import NO_DRAFTS, Drafted
from vnext.runtime.batch.turning import Turning
from vnext.state.config import SchedulerConfig
from vnext.state.params import NO_LOGPROBS, NO_POOLING
from vnext.state.preempt import row_tokens
from vnext.state.state import Request, State, StepInFlight, blocks_for
from vnext.state.store import extents
from vnext.state.store.rows import find_rows

ALL_ROWS = slice(None)
NO_COUNT = -1
"""As many preemptions as no request has behind it."""


class SamplingRows(Protocol):
    """The rows' sampling parameters. `spoilt`: rows that must join anew, whose constraints lacked memory behind a step."""

    spoilt: set[int]

    def join(self, place: int, state: State, row: int) -> None:
        """A request takes a batch row."""

    def leave(self, place: int) -> None:
        """A row is free."""

    def drop(self) -> None:
        """Steps are over without samples."""


class Histories(Protocol):
    """The tokens of rows that may take drafts."""

    def join(self, place: int, tokens: np.ndarray, request: Request) -> None:
        """A request with these known tokens (int32[n]) takes a batch row."""

    def leave(self, place: int, is_finished: bool) -> None:
        """A request leaves its batch row, for good if it `is_finished`."""


class BatchRows:
    """Rows of at most `config.max_num_seqs` requests. One thread uses it. All arrays are the host's."""

    def __init__(self, config: SchedulerConfig, sampling: SamplingRows) -> None:
        self._config, self._sampling = config, sampling
        row_count, width = config.max_num_seqs, blocks_for(config.max_model_len, config.block_size)
        self._table = np.zeros((row_count, width * config.group_count), dtype=np.int32)
        self._held = np.zeros(row_count, dtype=np.int64)
        self._last = np.zeros(row_count, dtype=np.int64)
        self._prompts: dict[int, Request] = {}  # of the rows that want something of their prompt
        self._turning = Turning(row_count) if config.grids else None
        self._free = list(range(row_count - 1, -1, -1))
        self._row_of: dict[tuple[int, int], int] = {}
        self._places = np.empty(0, dtype=np.int64)
        self._owners, self._blocks = (b"", b""), b""  # the state that the rows match; bytes compare fastest
        self._drafts: Histories | None = None
        self._drafted: Drafted | None = None

    def drop_steps(self) -> None:
        """The steps without samples are over, and who was in them leaves the batch, or takes a row anew, with the next step."""
        self._sampling.drop()
        self._owners, self._blocks = (b"", b""), b""

    def _leave_all(self) -> None:
        """Have every request take a row anew with the next step."""
        self._row_of = {(id_, NO_COUNT): place for (id_, _), place in self._row_of.items()}

    def _rows_of(self, state: State, scheduled: StepInFlight) -> np.ndarray | slice:
        if (scheduled.ids.tobytes(), scheduled.preemption_counts.tobytes()) == self._owners:
            return ALL_ROWS
        return find_rows(state.rows, scheduled.ids, scheduled.preemption_counts)

    def _token_ids(
        self,
        state: State,
        scheduled: StepInFlight,
        rows: np.ndarray | slice,
        places: np.ndarray,
        positions: np.ndarray,
        starts: np.ndarray,
    ) -> np.ndarray:
        """Known tokens from the state; a row that runs ahead of the state takes its last sampled token (int64[T])."""
        known = state.rows.known[rows]
        ahead = np.flatnonzero(scheduled.starts >= known)
        if len(ahead) == scheduled.tokens:
            newest: np.ndarray = self._last[places]
            return newest
        drafted = self._drafted.tokens if self._drafted is not None else NO_DRAFTS
        from_state = np.minimum(positions, per_token(scheduled, known) - 1)
        offsets = per_token(scheduled, state.rows.tokens_at[rows])
        tokens = extents.gather(state.tokens, offsets + from_state).astype(np.int64)
        if len(ahead):
            tokens[starts[ahead]] = self._last[places[ahead]]
        if len(drafted) and scheduled.drafts is not None:
            tokens[extents.spans(starts[1:] - scheduled.drafts, scheduled.drafts)] = drafted
        return tokens

    def _update(self, state: State) -> bool:
        """Bring the rows in line with the state. Returns whether they already were."""
        rows = state.rows
        owners, blocks = (rows.id.tobytes(), rows.preemption_count.tobytes()), rows.blocks.tobytes()
        if owners != self._owners:
            self._change_rows(state)
        elif blocks == self._blocks:
            return True
        held = self._held[self._places]
        grown = rows.blocks - held
        if grown.any():
            before, more = held * self._config.group_count, grown * self._config.group_count
            entries = extents.gather(state.tables, extents.spans(rows.table_at + before, more))
            added = np.maximum(entries, 0)  # entries of windows that no page holds are never read
            self._append(before, more, added)
            self._held[self._places] = rows.blocks
        self._owners, self._blocks = owners, blocks
        return False

    def _append(self, held: np.ndarray, more: np.ndarray, pages: np.ndarray) -> None:
        """Append `more` pages to the tables of rows that hold `held` (int64[N] each): `pages` int32[sum(more)]."""
        self._table[np.repeat(self._places, more), extents.spans(held, more)] = pages

    def _change_rows(self, state: State) -> None:
        """Free the rows of requests that left; give free rows to new requests and to requests that resume after preemption. Rows
        that stay behind dropped steps, but whose sampling lacked memory too, begin it anew."""
        pairs = list(zip(state.rows.id.tolist(), state.rows.preemption_count.tolist()))
        for pair in sorted(self._row_of.keys() - set(pairs)):
            place = self._row_of.pop(pair)
            self._sampling.leave(place)
            self._prompts.pop(place, None)
            if self._drafts is not None:
                self._drafts.leave(place, pair[0] not in state.requests)
            self._free.append(place)
        for row, pair in enumerate(pairs):
            if pair in self._row_of:
                if (place := self._row_of[pair]) in self._sampling.spoilt:
                    self._sampling.leave(place)
                    self._sampling.join(place, state, row)
            else:
                place = self._row_of[pair] = self._free.pop()
                request = state.requests[pair[0]]
                self._held[place] = 0
                self._sampling.join(place, state, row)
                if request.sampling.prompt_logprobs != NO_LOGPROBS or request.sampling.pooling != NO_POOLING:
                    self._prompts[place] = request
                if self._turning is not None:
                    self._turning.join(place, request.prompt)
                if self._drafts is not None:
                    self._drafts.join(place, row_tokens(state, row), request)
        self._sampling.spoilt = set()
        self._places = np.array([self._row_of[pair] for pair in pairs], dtype=np.int64)


def positions_of(scheduled: StepInFlight) -> np.ndarray:
    """Position of each of the step's tokens in its request (int64[T])."""
    if scheduled.tokens == len(scheduled.samples):
        return scheduled.starts.copy()
    return extents.spans(scheduled.starts, scheduled.counts)


def per_token(scheduled: StepInFlight, values: np.ndarray) -> np.ndarray:
    """Repeat one value per request for each of its tokens; the same array where each computes one token, as in a steady step."""
    return values if scheduled.tokens == len(values) else np.repeat(values, scheduled.counts)
