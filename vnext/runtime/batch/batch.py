"""Persistent batch: the running requests as rows of arrays that live as long as the rank; only differences are copied.

Turns one step in flight into a ForwardBatch. Decides nothing: rows come from the state (batch_rows.py). `rebuild.py` builds the
same tensors from the state alone and is the oracle in tests.
Cost of a steady step: a dozen array operations and the added blocks; nothing is proportional to history. Comparisons with the
step before compare bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vnext.models.layers.batch import AdapterRows, ForwardBatch, GroupPlaces, HostBatch, InputPart, RecurrentBatch
from vnext.runtime.batch.batch_rows import BatchRows, per_token, positions_of
from vnext.runtime.batch.draft_batch import DraftBatch
from vnext.runtime.batch.draft_rows import DraftRows, Kept, draft_rows
from vnext.runtime.batch.masks import failed_requests
from vnext.runtime.batch.prompts import prompt_inputs
from vnext.runtime.batch.sampling_rows import SamplingColumns
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.sampling.constraint import Vocabulary
from vnext.state.config import SchedulerConfig
from vnext.state.state import SamplePoints, State, StepInFlight, blocks_for, sample_points
from vnext.state.store import extents
from vnext.state.store.fields import DIGEST_WORDS, LIVE
from vnext.state.store.inputs import inputs_in
from vnext.state.store.rows import Rows, find_rows


class PersistentBatch(BatchRows):
    """The batch of a rank that computes on the host. One instance a rank, used by one thread."""

    _sampling: SamplingColumns
    _drafts: DraftRows | None

    def __init__(
        self,
        config: SchedulerConfig,
        vocab_size: int,
        vocabulary: Vocabulary | None = None,
        drafts_of: Callable[..., DraftBatch] | None = None,
    ) -> None:
        """`vocabulary`: what constraints are matched with. `drafts_of(table, sampling, config)`: a model's drafts,
        if a model drafts."""
        super().__init__(config, SamplingColumns(config, vocab_size, vocabulary))
        self._sampled: dict[int, np.ndarray] = {}  # the rows that steps sample, until their tokens are taken
        self._newest = self._places  # those of the newest step
        self.masks = self._sampling.masks
        self._decode_step: DecodeStep | None = None
        model_drafts = drafts_of and drafts_of(self._table, self._sampling, config)
        self._drafts = draft_rows(config, self._sampling.masks, model_drafts)

    def step_inputs(self, state: State) -> StepInputs:
        """The newest step in flight of `state` as arrays. Brings the rows in line with the state first, and drafts."""
        stands, scheduled = self._update(state), state.in_flight[-1]
        if self._drafts is not None:
            self._drafted = self._drafts.drafted(scheduled, self._places[self._rows_of(state, scheduled)])
            scheduled = self._drafted.scheduled
        if (
            stands
            and self._decode_step is not None
            and (steady := self._decode_step.next(scheduled, self._last)) is not None
        ):
            self._sampled[scheduled.step] = self._newest
            return steady
        rows = self._rows_of(state, scheduled)
        places, ends = self._places[rows], scheduled.starts + scheduled.counts
        sampled = np.flatnonzero(scheduled.samples)
        self._newest = self._sampled[scheduled.step] = places[sampled]
        points = sample_points(scheduled)
        before = self._drafted and self._drafted.before(points)
        sampling, logprobs = self._sampling.inputs(places[points.entries], ends[points.entries] - points.back, before)
        forward = self._forward(state, scheduled, rows, places, ends, points)
        prompts = prompt_inputs(self._prompts, scheduled, places, forward.query_starts) if self._prompts else None
        inputs = StepInputs(forward, sampling, logprobs, prompts, scheduled.copies)
        # The next decode can advance these arrays if there is one group of layers that attend, no row is below its minimum length,
        # none begins with empty states, and none is a prompt's last token that is an image's.
        decodes = prompts is None and scheduled.tokens == len(places) == len(sampled) and self._config.group_count == 1
        may_stay = decodes and not forward.inputs and sampling is not None and sampling.banned is None
        if may_stay and forward.recurrent is not None:
            may_stay = not forward.recurrent.fresh.any()
        self._decode_step = DecodeStep(inputs, scheduled, places, self._config.block_size) if may_stay else None
        return inputs

    def take_sampled(self, scheduled: StepInFlight, tokens: np.ndarray) -> Kept | None:
        """Keep a step's samples (int64[S]): the next step may need them before they are committed. Steps come in their order.

        Returns which of them are kept, None for all. Raises ValueError for a step that is not the oldest without samples.
        """
        oldest = next(iter(self._sampled), -1)
        if oldest != scheduled.step:
            raise ValueError(f"tokens of step {scheduled.step}, but the oldest one without is {oldest}")
        places = self._sampled.pop(oldest)
        if self._drafted is None or self._drafts is None or not len(self._drafted.tokens):
            self._last[places] = tokens
            self._sampling.count(places, tokens)
            if self._drafts is not None:
                self._drafts.take(places, np.ones_like(places), tokens)
            return None
        found = self._drafts.kept(self._drafted, places, tokens)
        counts = np.frombuffer(found.counts, np.uint8).astype(np.int64) if found.counts else np.ones(len(places), np.int64)
        if len(places):
            self._last[places] = found.tokens[np.cumsum(counts) - 1]
        self._sampling.count(places.repeat(counts), found.tokens)
        self._drafts.take(places, counts, found.tokens)
        return found

    def drop_steps(self) -> None:
        super().drop_steps()
        self._sampled.clear()
        self._decode_step = None

    def failed_constraints(self, scheduled: StepInFlight) -> tuple[tuple[int, str], ...]:
        """(request, why) of the newest step's samples whose constraint cannot be followed."""
        masks = self.masks
        rows = masks.of(self._newest)
        return failed_requests(scheduled.ids[scheduled.samples], masks.failed(rows)) if rows else ()

    def needs_samples(self, state: State) -> bool:
        """Whether the inputs of the newest step in flight depend on samples that were not taken, or cost them their rows."""
        rows, scheduled = state.rows, state.in_flight[-1]
        if self._drafts is not None or self._lose_samples(rows):
            return True
        at = find_rows(rows, scheduled.ids, scheduled.preemption_counts)
        return bool((scheduled.starts >= rows.known[at]).any())

    def _lose_samples(self, rows: Rows) -> bool:
        """Whether a request has left whose sample was not taken: its row may be another's from now on."""
        if (rows.id.tobytes(), rows.preemption_count.tobytes()) == self._owners:
            return False
        there = set(zip(rows.id.tolist(), rows.preemption_count.tolist()))
        left = [place for pair, place in self._row_of.items() if pair not in there]
        return any(np.isin(left, places).any() for places in self._sampled.values())

    def _forward(
        self,
        state: State,
        scheduled: StepInFlight,
        rows: np.ndarray | slice,
        places: np.ndarray,
        ends: np.ndarray,
        points: SamplePoints,
    ) -> ForwardBatch:
        size = self._config.block_size
        positions, context = positions_of(scheduled), ends.astype(np.int32)
        starts = np.zeros(len(places) + 1, dtype=np.int64)
        np.cumsum(scheduled.counts, out=starts[1:])
        host = HostBatch(starts.astype(np.int32), context)
        token_ids = self._token_ids(state, scheduled, rows, places, positions, starts)
        width = blocks_for(int(ends.max()), size)
        (block, offset), owners = np.divmod(positions, size), per_token(scheduled, places)
        (slots, table), *others = [
            self._places_of(group, places, owners, block, offset, width) for group in range(self._config.group_count)
        ]
        arrays = (
            token_ids,
            positions,
            slots,
            host.query_starts,
            context,
            table,
            starts[1:][points.entries] - 1 - points.back,
        )
        groups = tuple(GroupPlaces(*other) for other in others)
        adapters = adapter_rows(state, scheduled) if state.slots else ()
        recurrent = state_rows(state.rows.recurrent, rows, scheduled) if state.rows.recurrent is not None else None
        inputs = input_parts(state, rows, scheduled, starts) if int(token_ids.min()) < 0 else ()
        turning = self._turning and self._turning.of(places, scheduled.starts, scheduled.counts, positions)
        return ForwardBatch(
            *arrays, host=host, groups=groups, adapters=adapters, recurrent=recurrent, inputs=inputs, turning=turning
        )

    def _places_of(
        self, group: int, places: np.ndarray, owners: np.ndarray, block: np.ndarray, offset: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens' slots and the rows' block tables in one group of layers (int64[T], int32[R, width])."""
        size, groups = np.int64(self._config.block_size), self._config.group_count
        if groups == 1:
            return self._table[owners, block] * size + offset, self._table[places, :width]
        slots = self._table[owners, block * groups + group] * size + offset
        return slots, np.ascontiguousarray(self._table[places, group : width * groups : groups])


def input_parts(
    state: State, rows: np.ndarray | slice, scheduled: StepInFlight, places: np.ndarray
) -> tuple[InputPart, ...]:
    """What the step computes of prompts' inputs. `places` int64[R + 1]: of each row's first token."""
    found = []
    entries = zip(scheduled.ids.tolist(), state.rows.tokens_at[rows].tolist(), scheduled.starts.tolist(), scheduled.counts.tolist())
    for place, (id_, tokens_at, start, count) in zip(places.tolist(), entries):
        prompt = extents.read(state.tokens, tokens_at, min(state.requests[id_].prompt_length, start + count + DIGEST_WORDS))
        for begin, length, digest in inputs_in(prompt):
            first, end = max(begin, start), min(begin + length, start + count)
            if first < end:
                found.append(InputPart(place + first - start, end - first, digest, first - begin))
    return tuple(found)


def state_rows(recurrent: np.ndarray, rows: np.ndarray | slice, scheduled: StepInFlight) -> RecurrentBatch:
    """Where these rows of the state keep what recurrent layers know, without pools. `recurrent`: that column of all rows."""
    return RecurrentBatch((), recurrent[LIVE, rows].astype(np.int32), scheduled.starts == 0)


# ---- a steady step -----------------------------------------------------------------------------------------------
# A steady step: the rows of the step before, each advanced by one token.
#
# Owns the arrays of that step and advances them in place: nothing reads a step's arrays once the next step is launched. Serves
# as long as every row decodes and none enters another block. Gives the same arrays that `PersistentBatch` would build anew.


class DecodeStep:
    """`inputs` belong to a step on the CPU in which each row computes and samples one token; no other step shares their
    arrays."""

    def __init__(self, inputs: StepInputs, scheduled: StepInFlight, places: np.ndarray, block_size: int) -> None:
        """`places` int64[R]: the rows' indices among the last tokens."""
        forward = inputs.forward
        self._inputs, self._places = inputs, places
        self._owners, self._samples = scheduled.entries[:2].tobytes(), scheduled.samples.tobytes()
        self._token_ids = forward.token_ids
        self._positions = forward.positions
        assert inputs.sampling is not None, "every row samples"
        sampled = inputs.sampling.position
        turning = () if forward.turning is None else (forward.turning,)
        self._moved = (self._positions, forward.slots, forward.context_lengths, sampled, *turning)
        self._steps_left = int((-sampled % block_size).min())

    def next(self, scheduled: StepInFlight, last: np.ndarray) -> StepInputs | None:
        """The inputs of this step if it advances the same rows, else None; `last` int64: each row's newest token."""
        if self._steps_left == 0 or scheduled.tokens != len(self._places) or scheduled.samples.tobytes() != self._samples:
            return None
        if scheduled.entries[:2].tobytes() != self._owners:
            return None
        self._steps_left -= 1
        for values in self._moved:
            values += 1
        if self._positions.tobytes() != scheduled.starts.tobytes():
            self._steps_left = 0
            return None
        last.take(self._places, out=self._token_ids, mode="clip")
        return self._inputs if scheduled.copies is None else self._inputs._replace(copies=scheduled.copies)


# ---- adapter rows ------------------------------------------------------------------------------------------------
# Adapter rows: which tokens of a step are computed with which slot's adapter. Derived from the state in every step that
# changes its rows; a steady step has those of the step before, because no slot of a running request changes.


NO_SLOT = -1


def adapter_rows(state: State, scheduled: StepInFlight) -> tuple[AdapterRows, ...]:
    """One entry for each adapter of the step, in the order of their slots."""
    if not state.slots:
        return ()
    slot_of = {slot.digest: place for place, slot in enumerate(state.slots) if slot is not None}
    adapters = [state.requests[id_].sampling.adapter for id_ in scheduled.ids.tolist()]
    slots = [slot_of[adapter] if adapter else NO_SLOT for adapter in adapters]
    owners = np.repeat(np.array(slots, dtype=np.int64), scheduled.counts)
    used = sorted(set(slots) - {NO_SLOT})
    return tuple(AdapterRows(slot, np.flatnonzero(owners == slot)) for slot in used)
