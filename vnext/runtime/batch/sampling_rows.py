"""Sampling columns of the persistent batch: each row's parameters, and the token counts of penalised rows.

Owns what sampling needs beside logits. A row without penalties costs no vocabulary-sized memory. The counts of a penalised
row grow by one entry a token and are built from scratch only when the request joins.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np

from vnext.kernels.arrays import Array
from vnext.runtime.batch.fed import stop_ids
from vnext.runtime.batch.masks import RowMasks
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.inputs import Banned, LogitBias, Penalties, SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.params import CHOOSING, DEFAULTS, FILTERS, PENALTIES, ROW_DTYPES, Sampling, is_penalised
from vnext.state.preempt import row_tokens
from vnext.state.state import State
from vnext.state.store import fields

COLUMNS = {name: ROW_DTYPES[name] for name in (*CHOOSING, "seed")} | {"logprobs": "int64", "min_known": "int64"}


CACHED_MAX = 8
"""Sets of rows whose inputs are kept; the rows of a step and of its drafts are few such sets."""


class TokenCounts:
    """Tokens of one penalised request: `prompt` bool[V], `output` int32[V]."""

    __slots__ = ("prompt", "output")

    def __init__(self, prompt: np.ndarray, answer: np.ndarray, vocab_size: int) -> None:
        self.prompt = np.zeros(vocab_size, dtype=bool)
        self.prompt[prompt[prompt >= 0]] = True  # others stand for images
        self.output = np.bincount(answer, minlength=vocab_size).astype(np.int32)

    def plus(self, tokens: np.ndarray) -> TokenCounts:
        if not len(tokens):
            return self
        more = copy(self)
        more.output = self.output + np.bincount(tokens, minlength=len(self.output)).astype(np.int32)
        return more


class CachedInputs(NamedTuple):
    """Inputs that stay the same from step to step while the same rows are sampled.

    `inputs` lack what sampled tokens change: their position, penalties and banned tokens. `logprobs` int64[S]. `special` has (index
    among the samples, parameters) of rows with penalties, bias or a minimum length.
    """

    inputs: SamplingInputs
    logprobs: np.ndarray
    special: list[tuple[int, Sampling]]


class SamplingColumns:
    """One entry per batch row. An array given to one step may be given to the next: steps do not write to it."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, vocabulary: Vocabulary | None = None) -> None:
        """`vocabulary`: what constraints are matched with."""
        self._config = config
        drafts_max = config.speculation.num_speculative_tokens if config.speculation else 0
        self.masks = RowMasks(config.max_num_seqs, vocabulary, drafts_max)
        self._vocab_size = vocab_size
        self._columns = {name: np.zeros(config.max_num_seqs, dtype=dtype) for name, dtype in COLUMNS.items()}
        self.spoilt: set[int] = set()  # rows that must join anew: their constraints lacked memory behind a step
        self._special: dict[int, Sampling] = {}  # rows with penalties, bias or a minimum length
        self._counts: dict[int, TokenCounts] = {}
        self._cached_inputs: dict[bytes, CachedInputs] = {}  # by the bytes of the row indices

    def join(self, place: int, state: State, row: int) -> None:
        self._cached_inputs = {}
        request = state.requests[int(state.rows.id[row])]
        sampling = request.sampling
        for name in (*CHOOSING, "logprobs"):
            self._columns[name][place] = getattr(sampling, name)
        self._columns["seed"][place] = np.uint64(sampling.seed).astype(np.int64)
        self._columns["min_known"][place] = state.rows.cells[fields.MIN_KNOWN, row]
        if penalised := is_penalised(sampling):
            self._counts[place] = TokenCounts(*request.parted(row_tokens(state, row)), self._vocab_size)
        if sampling.constraint is not None:
            answer = row_tokens(state, row)[request.prompt_length :]
            self.masks.join(place, sampling.constraint, answer.tolist())
        if penalised or sampling.logit_bias or sampling.min_tokens:
            self._special[place] = sampling

    def leave(self, place: int) -> None:
        self._counts.pop(place, None)
        self._special.pop(place, None)
        if place in self.masks.matchers:
            self.masks.leave(place)

    def drop(self) -> None:
        """Steps are over without samples."""
        self.spoilt = self.masks.drop()

    def count(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Each row has sampled one more token."""
        if self.masks.matchers and (rows := self.masks.of(places)):
            self.masks.take(rows, tokens)
        if not self._counts:
            return
        for place, token in zip(places.tolist(), tokens.tolist()):
            if place in self._counts:
                self._counts[place].output[token] += 1

    def inputs(
        self, places: np.ndarray, positions: np.ndarray, before: list[np.ndarray] | None = None
    ) -> tuple[SamplingInputs | None, np.ndarray]:
        """Inputs of the sampled rows (int64[S] each), and the number of alternatives that each asked for.

        `before`: the drafts between each row's last token and its sample (int32[m] each), None for none.
        """
        if len(places) == 0:
            return None, self._columns["logprobs"][places]
        cached_inputs = self._cached_inputs.get(places.tobytes()) or self._cache_inputs(places)
        special = cached_inputs.special
        if not special:
            return cached_inputs.inputs._replace(position=positions), cached_inputs.logprobs
        early = positions < self._columns["min_known"][places]
        return cached_inputs.inputs._replace(
            position=positions,
            penalties=self._penalties(places, special, before),
            banned=banned(self._config, [(at, sampling) for at, sampling in special if early[at]]),
        ), cached_inputs.logprobs

    def _cache_inputs(self, places: np.ndarray) -> CachedInputs:
        arrays: dict[str, Array] = {name: self._columns[name][places] for name in (*CHOOSING, "seed")}
        logprobs = self._columns["logprobs"][places]
        random = arrays["temperature"] > 0
        filtered = np.any([arrays[name] != DEFAULTS[name] for name in FILTERS], axis=0)
        special = [(at, self._special[place]) for at, place in enumerate(places.tolist()) if place in self._special]
        masked = self.masks.of(places) if self.masks.matchers else []
        inputs = SamplingInputs(
            **arrays,
            position=places,
            bias=logit_bias(special) if special else None,
            allowed=self.masks.allowed(masked) if masked else None,
            logprobs=int(logprobs.max()),
            any_random=bool(random.any()),
            any_filter=bool((random & filtered).any()),
        )
        if len(self._cached_inputs) == CACHED_MAX:
            self._cached_inputs = {}
        made = self._cached_inputs[places.tobytes()] = CachedInputs(inputs, logprobs, special)
        return made

    def _penalties(
        self, places: np.ndarray, special: list[tuple[int, Sampling]], before: list[np.ndarray] | None
    ) -> Penalties | None:
        rows = [(at, sampling) for at, sampling in special if is_penalised(sampling)]
        counts = [self._counts[int(places[at])] for at, _ in rows]
        return penalties(rows, counts if before is None else [each.plus(before[at]) for each, (at, _) in zip(counts, rows)])


def penalties(rows: list[tuple[int, Sampling]], counts: list[TokenCounts]) -> Penalties | None:
    """Penalties of the rows (index among the samples, parameters) with their counts, which grow with the rows; None if there are
    none."""
    if not rows:
        return None
    rates = [[getattr(sampling, name) for _, sampling in rows] for name in PENALTIES]
    repetition, presence, frequency = np.array(rates, dtype=np.float32)
    return Penalties(
        np.array([at for at, _ in rows], dtype=np.int64),
        repetition,
        presence,
        frequency,
        prompt_mask=tuple(count.prompt for count in counts),
        output_counts=tuple(count.output for count in counts),
    )


def logit_bias(rows: list[tuple[int, Sampling]]) -> LogitBias | None:
    """The rows' biases as (row, token, value); None if there are none."""
    entries = [(at, token, value) for at, sampling in rows for token, value in sampling.logit_bias]
    if not entries:
        return None
    at, tokens, values = zip(*entries)
    return LogitBias(
        np.array(at, dtype=np.int64), np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32)
    )


def banned(config: SchedulerConfig, rows: list[tuple[int, Sampling]]) -> Banned | None:
    """End tokens of the rows that are below their minimum length; None if there are none."""
    entries = [(at, token) for at, sampling in rows for token in stop_ids(config, sampling)]
    if not entries:
        return None
    at, tokens = zip(*entries)
    return Banned(np.array(at, dtype=np.int64), np.array(tokens, dtype=np.int64))
