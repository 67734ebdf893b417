"""Random rows of logits and sampling parameters: the extremes of each, equals, holes, infinities and NaN; what rows ask for
beside, as a device's tables and as a step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sampling_values import values_of

from vnext.kernels.cuda import sampling
from vnext.sampling.inputs import (
    NO_DRAFTS,
    Allowed,
    Banned,
    BehindDrafts,
    LogitBias,
    Penalties,
    RowTables,
    SamplingInputs,
)
from vnext.state.params import CHOOSING, IN_PROMPT

THREADS = 128
INFINITY, NAN = float("inf"), float("nan")


class Draws:
    """Seeded random rows and parameters."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, values: tuple[float, ...], count: int) -> torch.Tensor:
        return torch.tensor(values)[self.integers(0, len(values), count)]

    def integers(self, low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=self.generator)

    def inputs(self, rows: int) -> SamplingInputs:
        return SamplingInputs(
            **{name: self.pick(values_of(name), rows) for name in CHOOSING},
            seed=self.integers(-(2**63), 2**63 - 1, rows),
            position=self.integers(0, 2**32, rows),
        )

    def logits(self, rows: int, vocabulary: int) -> torch.Tensor:
        """Narrow and wide rows, some with equals, holes, infinities and NaN."""
        spread = self.pick((0.0, 0.01, 0.5, 1.0, 3.0, 10.0, 100.0), rows)[:, None]
        logits = torch.randn(rows, vocabulary, generator=self.generator) * spread + self.pick((0.0, 5.0, -3e3), 1)
        logits[::3] = logits[::3].round()
        logits[1::4][torch.rand(logits[1::4].shape, generator=self.generator) < 0.7] = -INFINITY
        for row in range(0, rows, 5):
            logits[row, int(self.integers(0, vocabulary, 1))] = float(self.pick((NAN, INFINITY, -INFINITY, 0.0, -0.0), 1))
        logits[-1] = float(self.pick((NAN, INFINITY, -INFINITY, 0.0), 1))
        return logits


def sampled(
    logits: torch.Tensor, inputs: SamplingInputs, threads: int = THREADS, spoilt: torch.Tensor | None = None
) -> torch.Tensor:
    return sampling.sample_rows(logits, inputs.columns(), threads, spoilt)


def masked(draws: Draws, rows: int, vocabulary: int) -> Allowed:
    """Masks of three of the rows: words of random bits, some of ones and some of zeros."""
    words = (vocabulary + 31) // 32
    masks = draws.integers(-(2**31), 2**31, 3 * words).to(torch.int32).view(3, words)
    masks[draws.integers(0, 3, 3 * words).view(3, words) == 0] = -1
    masks[draws.integers(0, 3, 3 * words).view(3, words) == 0] = 0
    return Allowed(torch.tensor([rows - 1, 0, 2]), torch.arange(3), masks)


class Asked(NamedTuple):
    """What batch rows `places` of `tables` ask for at `positions`, and the same as a step's inputs for `logits.adjust`. With
    `drafts` some samples follow drafts."""

    tables: RowTables
    places: torch.Tensor
    positions: torch.Tensor
    inputs: SamplingInputs
    drafts: BehindDrafts = NO_DRAFTS


RATES = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.1, 0.3], [0.7, 0.0, -1.1], [1.0, 1.7, 0.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
"""Repetition, presence, frequency of batch rows; two have none."""


DRAFTED = torch.tensor([1, 1, 1, 1, 4, 4, 3, 5, 5]), torch.tensor([6, 7, 8, 9, 9, 10, 7, 3, 4]), torch.tensor([0, 1, 2, 3, 0, 1, 0, 0, 1])
"""Batch rows, positions and depths of samples that follow up to three drafts."""


def asked(draws: Draws, vocabulary: int, room: int, is_drafted: bool = False) -> Asked:
    """Five of six batch rows: bias (whose tokens are stops, too), stops before a position, penalties, each with and without."""
    count = len(RATES)
    places, positions, depths = torch.tensor([4, 0, 5, 1, 3]), torch.tensor([9, 20, 3, 8, 7]), torch.zeros(5, dtype=torch.int64)
    if is_drafted:
        places, positions, depths = DRAFTED
    fed = draws.integers(0, min(3, vocabulary), len(places))  # the same ones again and again
    until = torch.tensor([8, 8, 0, 8, 0, 4])
    bias_count = torch.tensor([0, min(room, vocabulary), 1, min(room, vocabulary), 0, 0])
    in_prompt = torch.rand(count, vocabulary, generator=draws.generator) < 0.3
    counts = draws.integers(-4, 4, count * vocabulary).clamp(min=0).view(count, vocabulary).int()
    tokens = torch.stack([torch.randperm(vocabulary, generator=draws.generator)[:room] for _ in range(count)])
    values = torch.randn(tokens.shape, generator=draws.generator)
    for row, each in enumerate(bias_count.tolist()):  # a row that has fewer repeats its first
        tokens[row, each:], values[row, each:] = tokens[row, 0].clone(), values[row, 0].clone()
    history = (counts + in_prompt * IN_PROMPT).int()
    tables = RowTables(RATES.T.contiguous(), torch.stack((until, bias_count)), history, tokens, values, tokens.flip(1))
    penalised = [at for at, row in enumerate(places.tolist()) if row not in (0, 4)]
    rows, early = places[penalised], [at for at in range(len(places)) if positions[at] < until[places[at]]]
    seen = counts[places].clone()
    for at, depth in enumerate(depths.tolist()):
        for token in fed[at - depth + 1 : at + 1].tolist():
            seen[at, token] += 1
    biased = [(at, entry) for at, row in enumerate(places.tolist()) for entry in range(int(bias_count[row]))]
    at, entries = torch.tensor(biased).T
    stops = [(at, token) for at in early for token in set(tokens[places[at]].tolist())]
    inputs = draws.inputs(len(places))._replace(
        penalties=Penalties(torch.tensor(penalised), *RATES[rows].T, in_prompt[rows], seen[penalised]),
        bias=LogitBias(at, tokens[places[at], entries], values[places[at], entries]),
        banned=Banned(*torch.tensor(stops).T),
    )
    return Asked(tables, places, positions, inputs, BehindDrafts(fed, depths) if is_drafted else NO_DRAFTS)
