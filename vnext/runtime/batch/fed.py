"""Fed: the inputs of a step, one word (uint64) for each kind of array, so that a drifted batch is identified by the kind.

A rank hashes the inputs that its batch really gives the model (words.py). `due` computes the same words from the state alone,
and the engine core compares them. Digests of states cannot see this drift: the batch's rows live beside the state for as long
as the rank does, and only differences are copied into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec
import numpy as np
import xxhash

from vnext.log.pseudonyms import GOLDEN, ONE, mix
from vnext.runtime.batch.turning import Turning
from vnext.state.config import SchedulerConfig
from vnext.state.events import StepCommitted, unpack_tokens
from vnext.state.params import CHOOSING, IN_PROMPT, PARAMETERS, PENALTIES, Sampling, is_penalised
from vnext.state.state import State, StepInFlight, runs_in, sample_points
from vnext.state.store import extents
from vnext.state.store.rows import find_rows

Commits = Mapping[int, StepCommitted]
ALL = slice(None)
SAMPLING = (
    {name: PARAMETERS[name].dtype for name in CHOOSING} | {"seed": "uint64", "logprobs": "int64"}
    | {name: PARAMETERS[name].dtype for name in PENALTIES}
)  # fmt: skip
"""Sampling parameters of the sampled rows, by their names in Sampling."""
parameters_of = attrgetter(*SAMPLING)
NAMES = (
    "token ids", "positions", "slots", "block tables", "query lengths", "context lengths", "adapters", "sampled tokens",
    "places of samples",
    *SAMPLING, "logit bias", "banned tokens", "counted tokens", "forbidden tokens",
)  # fmt: skip
"""The last kind is what constraints forbid. Only ranks match grammars, so its words are compared between ranks."""


def word(*arrays: np.ndarray) -> int:
    """xxh3-64 over arrays, one after the other, whatever their strides. -0.0 counts as 0.0: both sample alike."""
    return xxhash.xxh3_64_intdigest(b"".join((array + 0 if array.dtype.kind == "f" else array).tobytes() for array in arrays))


def otherwise(words: Sequence[int], due_words: Sequence[int]) -> tuple[str, ...]:
    """Names of the kinds that differ. `due_words` are those of `due` and rank 0's word for the last kind."""
    return tuple(name for name, one, other in zip(NAMES, words, due_words, strict=True) if one != other)


def due(state: State, commits: Commits, drafts: bytes = b"", drafted: bytes = b"") -> tuple[int, ...]:
    """One word for each of NAMES but the last, for the newest step in flight of `state`. `commits` holds what the steps before
    it sampled, by step. `drafts` are the step's drafts (int32 bytes), `drafted` their number for each request that samples
    (uint8), b"" for none. Cost: proportional to the step's tokens and to the blocks of its requests."""
    scheduled, config = _as_computed(state, commits, drafted), state.config
    rows = find_rows(state.rows, scheduled.ids, scheduled.preemption_counts)
    ends, positions = scheduled.starts + scheduled.counts, extents.spans(scheduled.starts, scheduled.counts)
    tables = state.rows.table_at[rows]
    points = sample_points(scheduled)
    sampled_at = ends[points.entries] - points.back
    asked = [state.requests[id_] for id_ in scheduled.ids[points.entries].tolist()]
    samples = [(request.sampling, request.prompt_length, end) for request, end in zip(asked, sampled_at.tolist())]
    penalised = [at for at, request in enumerate(asked) if is_penalised(request.sampling)]
    ahead = _ahead(state, scheduled, commits, drafts)
    entries = zip(points.entries[penalised].tolist(), sampled_at[penalised].tolist())
    counts = [_counted(state, scheduled, rows, entry, end, ahead) for entry, end in entries]
    return (
        word(_token_ids(state, scheduled, rows, positions, ahead)),
        word(positions, *_turning(state, scheduled, positions)),
        word(*(_slots(state, scheduled, tables, positions, group) for group in range(config.group_count))),
        word(*(extents.gather(state.tables, places) for places in _table_places(state, scheduled, tables))),
        word(scheduled.counts),
        word(ends),
        adapters_word(_adapters(state, scheduled)),
        word(np.cumsum(scheduled.counts)[points.entries] - 1 - points.back),
        word(sampled_at),
        *_sampling_words([request.sampling for request in asked]),
        _table_word(_banned(config, samples), np.int64, np.int64),
        word(np.array(counts, dtype=np.uint64)),
    )


def _turning(state: State, scheduled: StepInFlight, positions: np.ndarray) -> Iterator[np.ndarray]:
    """By which places heads turn, if these are not positions."""
    if state.config.grids:
        rows, places = Turning(len(scheduled.ids)), np.arange(len(scheduled.ids))
        for place, id_ in enumerate(scheduled.ids.tolist()):
            rows.join(place, state.requests[id_].prompt)
        if (found := rows.of(places, scheduled.starts, scheduled.counts, positions)) is not None:
            yield found


def adapters_word(tokens: Mapping[str, np.ndarray]) -> int:
    """One word over the step's tokens (int64 each) that are computed with each adapter, by the digest of its files."""
    parts = ((np.frombuffer(digest.encode(), np.uint8), tokens[digest]) for digest in sorted(tokens))
    return word(*(part for both in parts for part in both))


def weights_of(tokens: np.ndarray) -> np.ndarray:
    """What one occurrence of each token adds to the word of a request's counts (uint64, shaped like `tokens`)."""
    return mix((tokens.astype(np.uint64) + ONE) * GOLDEN)


def counted(sampled: np.ndarray, prompt: np.ndarray) -> int:
    """A request's counts as one word, from the weights of all sampled tokens and of each prompt token (uint64)."""
    return (int(sampled.sum(dtype=np.uint64)) + int(prompt.sum(dtype=np.uint64)) * IN_PROMPT) % 2**64


def _as_computed(state: State, commits: Commits, drafted: bytes) -> StepInFlight:
    """The newest step where it starts in truth, with the drafts that there were."""
    scheduled = state.in_flight[-1]
    if scheduled.drafts is None:
        return scheduled
    back: dict[tuple[int, int], int] = {}
    for step in state.in_flight[:-1]:
        counts, _ = runs_in(commits[step.step], int(np.count_nonzero(step.samples)))
        assert step.drafts is not None, "all steps of an engine have drafts, or none has"
        rejected = step.drafts[step.samples] + 1 - counts
        for owner, by in zip(_owners(step, step.samples), rejected.tolist()):
            back[owner] = back.get(owner, 0) + by
    entries, drafts = scheduled.entries.copy(), np.zeros_like(scheduled.drafts)
    entries[2] -= np.array([back.get(owner, 0) for owner in _owners(scheduled, ALL)], dtype=np.int64)
    if drafted:
        drafts[scheduled.samples] = np.frombuffer(drafted, np.uint8)
    entries[3] += drafts - scheduled.drafts
    return msgspec.structs.replace(scheduled, entries=entries, tokens=int(entries[3].sum()), drafts=drafts)


def _owners(scheduled: StepInFlight, which: np.ndarray | slice) -> list[tuple[int, int]]:
    """(request, preemption count) of the step's entries."""
    return list(zip(scheduled.ids[which].tolist(), scheduled.preemption_counts[which].tolist()))


def _counted(
    state: State, scheduled: StepInFlight, rows: np.ndarray, entry: int, end: int, ahead: Mapping[tuple[int, int], list[int]]
) -> int:
    """For a sample at position `end`, the weights of all tokens sampled so far, plus IN_PROMPT times those of the prompt's
    tokens."""
    id_, row = int(scheduled.ids[entry]), rows[entry]
    known = extents.read(state.tokens, int(state.rows.tokens_at[row]), int(state.rows.known[row]))
    more = np.array(ahead.get((id_, int(scheduled.preemption_counts[entry])), ()), dtype=known.dtype)
    prompt, answer = state.requests[id_].parted(np.concatenate((known, more))[:end])
    prompt = np.unique(prompt)
    return counted(weights_of(answer), weights_of(prompt[prompt >= 0]))


def _adapters(state: State, scheduled: StepInFlight) -> dict[str, np.ndarray]:
    """By digest, the tokens of the requests that name the adapter; empty in an engine without slots."""
    if not state.slots:
        return {}
    named = [state.requests[id_].sampling.adapter for id_ in scheduled.ids.tolist()]
    of_tokens = np.repeat(np.array(named), scheduled.counts)
    return {adapter: np.flatnonzero(of_tokens == adapter) for adapter in set(named) - {""}}


def _token_ids(
    state: State, scheduled: StepInFlight, rows: np.ndarray, positions: np.ndarray, ahead: Mapping[tuple[int, int], list[int]]
) -> np.ndarray:
    """int64[T]: known tokens from the histories, and others from the steps that sampled them or from this step's drafts."""
    known = np.repeat(state.rows.known[rows], scheduled.counts)
    at = np.repeat(state.rows.tokens_at[rows], scheduled.counts) + np.minimum(positions, known - 1)
    tokens = extents.gather(state.tokens, at).astype(np.int64)
    unknown = np.flatnonzero(positions >= known)
    if len(unknown):
        entries, owners = np.repeat(np.arange(len(rows)), scheduled.counts), _owners(scheduled, ALL)
        tokens[unknown] = [ahead[owners[entries[place]]][positions[place] - known[place]] for place in unknown.tolist()]
    return tokens


def _ahead(state: State, newest: StepInFlight, commits: Commits, drafts: bytes) -> dict[tuple[int, int], list[int]]:
    """By request and preemption count: tokens that earlier steps sampled and `state` does not know yet, in order, and then the
    drafts of the newest step."""
    found: dict[tuple[int, int], list[int]] = {}
    for scheduled in state.in_flight[:-1]:
        commit = commits[scheduled.step]
        counts, _ = runs_in(commit, int(np.count_nonzero(scheduled.samples)))
        _extend(found, _owners(scheduled, scheduled.samples), counts, unpack_tokens(commit.tokens))
    if newest.drafts is not None:
        _extend(found, _owners(newest, ALL), newest.drafts, unpack_tokens(drafts))
    return found


def _extend(
    found: dict[tuple[int, int], list[int]], owners: list[tuple[int, int]], counts: np.ndarray, tokens: np.ndarray
) -> None:
    """Append each owner's run of tokens."""
    repeated = [owner for owner, count in zip(owners, counts.tolist()) for _ in range(count)]
    for owner, token in zip(repeated, tokens.tolist(), strict=True):
        found.setdefault(owner, []).append(token)


def _slots(state: State, scheduled: StepInFlight, tables: np.ndarray, positions: np.ndarray, group: int) -> np.ndarray:
    """int64[T]: where each token's keys and values go, in one group of layers."""
    size = state.config.block_size
    at = np.repeat(tables, scheduled.counts) + positions // size * state.config.group_count + group
    slots: np.ndarray = extents.gather(state.tables, at).astype(np.int64) * size + positions % size
    return slots


def _table_places(state: State, scheduled: StepInFlight, tables: np.ndarray) -> list[np.ndarray]:
    """For each group of layers, the positions in the arena of the blocks that the step's queries see."""
    config, found = state.config, []
    for group, (first, count) in enumerate(blocks_seen(config, scheduled.starts, scheduled.starts + scheduled.counts)):
        found.append(np.repeat(tables, count) + extents.spans(first, count) * config.group_count + group)
    return found


def blocks_seen(config: SchedulerConfig, starts: np.ndarray, ends: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each group of layers, each row's first block that queries of [start, end) see, and the number (int64[R] each)."""
    found = []
    for window in config.windows or (0,):
        first = np.maximum(starts - window + 1, 0) // config.block_size if window else np.zeros_like(starts)
        found.append((first, -(-ends // config.block_size) - first))
    return found


def _sampling_words(samples: Sequence[Sampling]) -> tuple[int, ...]:
    """A word for each parameter of SAMPLING over the sampled rows, and one for their biases."""
    columns = zip(*map(parameters_of, samples)) if samples else ((),) * len(SAMPLING)
    bias = [(at, token, value) for at, each in enumerate(samples) if each.logit_bias for token, value in each.logit_bias]
    words = [word(np.array(column, dtype=dtype)) for column, dtype in zip(columns, SAMPLING.values())]
    return *words, _table_word(bias, np.int64, np.int64, np.float32)


def _table_word(rows: Sequence[tuple[object, ...]], *dtypes: type) -> int:
    """The word of a table's columns, one after the other."""
    return word(*(np.array(column, dtype=dtype) for column, dtype in zip(zip(*rows), dtypes)))


def _banned(config: SchedulerConfig, samples: Sequence[tuple[Sampling, int, int]]) -> list[tuple[int, int]]:
    """(index among the samples, end token) of the rows that are below their minimum length. `samples` holds (parameters,
    prompt length, position of the token to be sampled)."""
    early = [(at, each) for at, (each, length, end) in enumerate(samples) if end < length + each.min_tokens]
    return [(at, token) for at, each in early for token in stop_ids(config, each)]


def stop_ids(config: SchedulerConfig, sampling: Sampling) -> tuple[int, ...]:
    """Tokens that end the request."""
    ends = () if sampling.ignore_eos else config.eos_token_ids
    return tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
