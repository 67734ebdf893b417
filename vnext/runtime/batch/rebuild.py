"""The plain implementation of the persistent batch: the same arrays, built from the state alone, request by request.

Keeps nothing between steps. Slow; it is the specification against which `batch.py` is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vnext.models.layers.batch import AdapterRows, ForwardBatch, GroupPlaces, HostBatch, InputPart, RecurrentBatch
from vnext.runtime.batch.masks import first_of, firsts_of
from vnext.runtime.batch.sampling_rows import (
    TokenCounts,
    banned,
    logit_bias,
    penalties,
)
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.sampling.constraint import Matcher, Vocabulary
from vnext.sampling.inputs import Allowed, SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.params import CHOOSING, ROW_DTYPES, Sampling, is_filtered, is_penalised
from vnext.state.preempt import row_tokens
from vnext.state.state import State, blocks_for
from vnext.state.store.fields import LIVE
from vnext.state.store.inputs import DIGEST_SIZE, inputs_in, rows_of, step_of, with_rows
from vnext.state.windows import row_table

Sampled = Mapping[tuple[int, int, int], Sequence[int]]
"""(step, request id, preemption count) -> tokens sampled by a step that is still in flight."""
Drafts = Mapping[int, Sequence[int]]
"""Request id -> the drafts that the newest step computes for it."""
NO_DRAFTS: Drafts = MappingProxyType({})


def rebuild(
    state: State, sampled: Sampled, vocab_size: int, vocabulary: Vocabulary | None = None, drafts: Drafts = NO_DRAFTS
) -> StepInputs:
    """The newest step in flight as arrays of the host; `sampled` holds the tokens that earlier steps sampled.

    `vocabulary`: what constraints are matched with. The step starts where it does in truth and has just these `drafts`.
    """
    entries = list(entries_of(state, sampled, drafts))
    starts = np.cumsum([0, *(entry.end - entry.start for entry in entries)])
    contexts = [entry.end for entry in entries]
    width = blocks_for(max(contexts), state.config.block_size)
    first, *others = [places_of(state.config, entries, group, width) for group in range(state.config.group_count)]
    forward = ForwardBatch(
        token_ids=np.array([token for entry in entries for token in entry.history[entry.start : entry.end]], dtype=np.int64),
        positions=np.array([position for entry in entries for position in range(entry.start, entry.end)], dtype=np.int64),
        slots=first.slots,
        query_starts=starts.astype(np.int32),
        context_lengths=np.array(contexts, dtype=np.int32),
        block_table=first.block_table,
        sample_at=np.array(
            [last - 1 - back for entry, last in zip(entries, starts[1:].tolist()) for back in entry.samples], dtype=np.int64
        ),
        host=HostBatch(starts.astype(np.int32), np.array(contexts, dtype=np.int32)),
        groups=tuple(others),
        adapters=adapters_of(state, entries),
        recurrent=recurrent_of(state, entries),
        inputs=tuple(inputs_of(state, entries)),
        turning=turning_of(state, entries),
    )
    rows = [(each.row, each.history[: each.end - back], each.end - back) for each in entries for back in each.samples]
    sampling, asked = sampling_of(state, rows, vocab_size, vocabulary)
    return StepInputs(forward, sampling, asked, copies=state.in_flight[-1].copies)


def adapters_of(state: State, entries: Sequence[Entry]) -> tuple[AdapterRows, ...]:
    """The tokens of each slot's adapter, entry by entry."""
    places: dict[int, list[int]] = {}
    first = 0
    for entry in entries:
        adapter = state.requests[int(state.rows.id[entry.row])].sampling.adapter
        for slot, holds in enumerate(state.slots):
            if adapter and holds is not None and holds.digest == adapter:
                places.setdefault(slot, []).extend(range(first, first + entry.end - entry.start))
        first += entry.end - entry.start
    return tuple(AdapterRows(slot, np.array(places[slot])) for slot in sorted(places))


def recurrent_of(state: State, entries: Sequence[Entry]) -> RecurrentBatch | None:
    """The page of each entry's states, entry by entry."""
    if (recurrent := state.rows.recurrent) is None:
        return None
    pages = [int(recurrent[LIVE, entry.row]) for entry in entries]
    return RecurrentBatch((), np.array(pages, dtype=np.int32), np.array([entry.start == 0 for entry in entries]))


def inputs_of(state: State, entries: Sequence[Entry]) -> Iterator[InputPart]:
    """What the entries compute of their prompts' inputs, token by token."""
    place = 0
    for entry in entries:
        prompt = np.frombuffer(state.requests[int(state.rows.id[entry.row])].prompt, np.int32)
        for begin, length, digest in inputs_in(prompt):
            computed = [at for at in range(entry.start, entry.end) if begin <= at < begin + length]
            if computed:
                yield InputPart(place + computed[0] - entry.start, len(computed), digest, computed[0] - begin)
        place += entry.end - entry.start


def turning_of(state: State, entries: Sequence[Entry]) -> np.ndarray | None:
    """By which places heads turn, token by token."""
    prompts = [state.requests[int(state.rows.id[entry.row])].prompt for entry in entries]
    inputs = [each for prompt in prompts for each in inputs_in(np.frombuffer(prompt, np.int32))]
    if not state.config.grids or not any(rows_of(each.digest) for each in inputs):
        return None
    found = np.array([place for entry, prompt in zip(entries, prompts) for place in places_by_axis(entry, prompt)]).T
    return found if (found != found[0]).any() else found[0]


def places_by_axis(entry: Entry, prompt: bytes) -> list[tuple[int, int, int]]:
    """Time, row and column of what an entry computes: an image goes on from its first token's, parts of a video from the video's,
    texts behind the longest side; those of a sound stand as a text's."""
    images = {start: (length, digest) for start, length, digest in inputs_in(np.frombuffer(prompt, np.int32))}
    found, place, begin, time, is_open = list[tuple[int, int, int]](), 0, 0, 0, False
    while len(found) < entry.end:
        length, digest = images.get(len(found), (1, with_rows(bytes(DIGEST_SIZE), 1)))
        step, rows = step_of(digest), rows_of(digest)
        if not rows:
            found += [(at, at, at) for at in range(place, place + length)]
            place, is_open = place + length, False
            continue
        begin, time = (begin, time + step) if is_open and step is not None else (place, 0)
        is_open, columns = len(found) in images, length // rows
        found += [(begin + time, begin + row, begin + column) for row in range(rows) for column in range(columns)]
        place = max(place, begin + time + 1, begin + rows, begin + columns)
    return found[entry.start : entry.end]


class Entry(NamedTuple):
    """One request of a step: its row, its tokens, its pages, the positions [start, end) that it computes, and how many of them
    come behind each of its samples."""

    row: int
    history: list[int]
    table: list[int]
    start: int
    end: int
    samples: Sequence[int]


def entries_of(state: State, sampled: Sampled, drafts: Drafts) -> Iterator[Entry]:
    """The entries of the newest step in flight."""
    scheduled = state.in_flight[-1]
    for id_, start, count, samples in zip(scheduled.ids, scheduled.starts, scheduled.counts, scheduled.samples):
        row = int(np.flatnonzero(state.rows.id == id_)[0])
        own, table = list(drafts.get(int(id_), ())), row_table(state, row).tolist()
        history = history_of(state, row, sampled) + own
        first = min(int(start), len(history) - int(count))  # a step of a request that has left stands as planned
        yield Entry(row, history, table, first, first + int(count), range(len(own), -1, -1) if samples else ())


def allowed(answers: list[tuple[int, Sampling, list[int]]], vocabulary: Vocabulary | None) -> Allowed | None:
    """The masks of (index among the samples, parameters, answer so far) with a constraint; None if there are none."""
    bound = [(at, sampling.constraint, answer) for at, sampling, answer in answers if sampling.constraint is not None]
    if not bound:
        return None
    assert vocabulary is not None, "constraints need the checkpoint's vocabulary"
    may_come = [Matcher(constraint, vocabulary, answer).allowed() for _, constraint, answer in bound]
    masks = np.stack([vocabulary.mask_of(np.flatnonzero(each).tolist()) for each in may_come])
    rows = np.array([at for at, *_ in bound])
    firsts = firsts_of([first_of(constraint, vocabulary.size) for _, constraint, _ in bound], vocabulary.size)
    return Allowed(rows, np.arange(len(bound)), masks.view(np.int32), firsts=firsts)


def places_of(config: SchedulerConfig, entries: list[Entry], group: int, width: int) -> GroupPlaces:
    """One group of layers: the slot of each token (int64 [T]), and each request's blocks as far as this step's queries see
    (int32 [R, width]; others are 0)."""
    size, groups, window = config.block_size, config.group_count, (config.windows or (0,))[group]
    slots, tables = [], np.zeros((len(entries), width), dtype=np.int32)
    for at, entry in enumerate(entries):
        pages = entry.table[group::groups]
        slots += [pages[position // size] * size + position % size for position in range(entry.start, entry.end)]
        first = max(entry.start - window + 1, 0) // size if window else 0
        seen = pages[first : blocks_for(entry.end, size)]
        tables[at, first : first + len(seen)] = seen
    return GroupPlaces(np.array(slots, dtype=np.int64), tables)


def history_of(state: State, row: int, sampled: Sampled) -> list[int]:
    """All tokens of a row: the known ones, and those that its earlier steps in flight sampled."""
    id_, preemptions = int(state.rows.id[row]), int(state.rows.preemption_count[row])
    placeholders = [
        token for scheduled in state.in_flight[:-1] for token in sampled.get((scheduled.step, id_, preemptions), ())
    ]
    known: list[int] = row_tokens(state, row).tolist()
    return known + placeholders


def sampling_of(
    state: State, rows: list[tuple[int, list[int], int]], vocab_size: int, vocabulary: Vocabulary | None = None
) -> tuple[SamplingInputs | None, np.ndarray]:
    """Sampling inputs of (row, history, position of the token to be sampled)."""
    requests = [state.requests[int(state.rows.id[row])] for row, _, _ in rows]
    params = [request.sampling for request in requests]
    asked = np.array([sampling.logprobs for sampling in params], dtype=np.int64)
    if not rows:
        return None, asked
    special = [
        (at, each) for at, each in enumerate(params) if is_penalised(each) or each.logit_bias or each.min_tokens
    ]
    answers = [(at, each, rows[at][1][requests[at].prompt_length :]) for at, each in enumerate(params)]
    penalised = [at for at, sampling in special if is_penalised(sampling)]
    counts = [TokenCounts(*requests[at].parted(np.array(rows[at][1])), vocab_size) for at in penalised]
    early = [
        (at, sampling) for at, sampling in special if rows[at][2] < requests[at].prompt_length + sampling.min_tokens
    ]
    columns = {name: [getattr(sampling, name) for sampling in params] for name in CHOOSING}
    return SamplingInputs(
        **{name: np.array(column, dtype=ROW_DTYPES[name]) for name, column in columns.items()},
        seed=np.array([sampling.seed for sampling in params], dtype=np.uint64).astype(np.int64),
        position=np.array([position for _, _, position in rows], dtype=np.int64),
        penalties=penalties([(at, sampling) for at, sampling in special if is_penalised(sampling)], counts),
        bias=logit_bias(special),
        banned=banned(state.config, early),
        allowed=allowed(answers, vocabulary),
        logprobs=int(asked.max()),
        any_random=any(sampling.temperature > 0 for sampling in params),
        any_filter=any(sampling.temperature > 0 and is_filtered(sampling) for sampling in params),
    ), asked
