"""Sampling columns of the persistent batch: each row's parameters, and token counts of the rows that are penalised.

Owns what sampling needs beside logits. A row without penalties costs no vocabulary-sized memory; counts of a row with
them grow by one entry a token and are made anew only when the request joins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.runtime.sampling_inputs import Banned, LogitBias, Penalties, SamplingInputs
from vnext.state import rows as columns
from vnext.state.config import SchedulerConfig
from vnext.state.params import Sampling
from vnext.state.planning import row_tokens
from vnext.state.state import State

COLUMNS = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "logprobs": np.int64,
    "min_known": np.int64,
}


def is_penalised(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )


def stop_ids(config: SchedulerConfig, sampling: Sampling) -> tuple[int, ...]:
    """Tokens that end the request."""
    ends = () if sampling.ignore_eos else config.eos_token_ids
    return tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))


class TokenCounts:
    """Tokens of one penalised request: `prompt` bool[V], `output` int32[V]."""

    __slots__ = ("prompt", "output")

    def __init__(self, tokens: np.ndarray, prompt_length: int, vocab_size: int) -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool)
        self.prompt[torch.from_numpy(tokens[:prompt_length].astype(np.int64))] = True
        counts = np.bincount(tokens[prompt_length:], minlength=vocab_size).astype(np.int32)
        self.output = torch.from_numpy(counts)


class Standing(NamedTuple):
    """What stays from step to step while the same rows are sampled.

    `places` are the bytes of theirs; `fields` are those of SamplingInputs but position, penalties and bans; `logprobs`
    int64[S]; `special` has (place among the samples, parameters) of the rows with penalties, bias or a minimum length.
    """

    places: bytes
    fields: dict[str, torch.Tensor | LogitBias | int | bool | None]
    logprobs: np.ndarray
    special: list[tuple[int, Sampling]]


class SamplingColumns:
    """One entry per batch row. Tensors that a step was given may be given again: nobody writes them."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._vocab_size = vocab_size
        self._columns = {name: np.zeros(config.running_max, dtype=dtype) for name, dtype in COLUMNS.items()}
        self._special: dict[int, Sampling] = {}  # rows with penalties, bias or a minimum length
        self._counts: dict[int, TokenCounts] = {}
        self._standing: Standing | None = None

    def join(self, place: int, state: State, row: int) -> None:
        """A request takes a batch row."""
        self._standing = None
        request = state.requests[int(state.rows.id[row])]
        sampling = request.sampling
        for name in ("temperature", "top_k", "top_p", "min_p", "logprobs"):
            self._columns[name][place] = getattr(sampling, name)
        self._columns["seed"][place] = np.uint64(sampling.seed).astype(np.int64)
        self._columns["min_known"][place] = state.rows.cells[columns.MIN_KNOWN, row]
        if is_penalised(sampling):
            self._counts[place] = TokenCounts(row_tokens(state, row), request.prompt_length, self._vocab_size)
        if is_penalised(sampling) or sampling.logit_bias or sampling.min_tokens:
            self._special[place] = sampling

    def leave(self, place: int) -> None:
        self._counts.pop(place, None)
        self._special.pop(place, None)

    def count(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Each row sampled one more token."""
        if not self._counts:
            return
        for place, token in zip(places.tolist(), tokens.tolist()):
            if place in self._counts:
                self._counts[place].output[token] += 1

    def inputs(self, places: np.ndarray, positions: np.ndarray) -> tuple[SamplingInputs | None, np.ndarray]:
        """Inputs of the sampled rows (int64[S] each) and the alternatives each asked for."""
        if len(places) == 0:
            return None, self._columns["logprobs"][places]
        standing = self._standing
        if standing is None or standing.places != places.tobytes():
            standing = self._standing = self._stand(places)
        position, special = self._send(positions), standing.special
        if not special:
            return SamplingInputs(**standing.fields, position=position), standing.logprobs
        early = positions < self._columns["min_known"][places]
        return SamplingInputs(
            **standing.fields,
            position=position,
            penalties=self._penalties(places, special),
            banned=banned(self._config, [(at, sampling) for at, sampling in special if early[at]], self._device),
        ), standing.logprobs

    def _stand(self, places: np.ndarray) -> Standing:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        arrays = {name: self._columns[name][places] for name in names}
        logprobs = self._columns["logprobs"][places]
        random = arrays["temperature"] > 0
        filtered = (arrays["top_k"] > 0) | (arrays["top_p"] < 1) | (arrays["min_p"] > 0)
        special = [(at, self._special[place]) for at, place in enumerate(places.tolist()) if place in self._special]
        fields = {name: self._send(array) for name, array in arrays.items()} | {
            "bias": logit_bias(special, self._device),
            "logprobs": int(logprobs.max()),
            "any_random": bool(random.any()),
            "any_filter": bool((random & filtered).any()),
        }
        return Standing(places.tobytes(), fields, logprobs, special)

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _penalties(self, places: np.ndarray, special: list[tuple[int, Sampling]]) -> Penalties | None:
        rows = [(at, sampling) for at, sampling in special if is_penalised(sampling)]
        return penalties(rows, [self._counts[int(places[at])] for at, _ in rows], self._device)


def penalties(
    rows: list[tuple[int, Sampling]], counts: list[TokenCounts], device: torch.device | str
) -> Penalties | None:
    """Penalties of the rows (place among the samples, parameters) with their counts; None without any."""
    if not rows:
        return None

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(sampling, name) for _, sampling in rows], dtype=torch.float32, device=device)

    return Penalties(
        rows=torch.tensor([at for at, _ in rows], dtype=torch.int64, device=device),
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        prompt_mask=torch.stack([count.prompt for count in counts]).to(device),
        output_counts=torch.stack([count.output for count in counts]).to(device),
    )


def logit_bias(rows: list[tuple[int, Sampling]], device: torch.device | str) -> LogitBias | None:
    """The rows' biases as (row, token, value); None without any."""
    entries = [(at, token, value) for at, sampling in rows for token, value in sampling.logit_bias]
    if not entries:
        return None
    at, tokens, values = zip(*entries)
    return LogitBias(
        torch.tensor(at, dtype=torch.int64, device=device),
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def banned(
    config: SchedulerConfig, rows: list[tuple[int, Sampling]], device: torch.device | str
) -> Banned | None:
    """End tokens of the rows that are shorter than their minimum; None without any."""
    entries = [(at, token) for at, sampling in rows for token in stop_ids(config, sampling)]
    if not entries:
        return None
    at, tokens = zip(*entries)
    return Banned(
        torch.tensor(at, dtype=torch.int64, device=device), torch.tensor(tokens, dtype=torch.int64, device=device)
    )
