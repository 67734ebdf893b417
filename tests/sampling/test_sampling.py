"""Sampling end to end: every row's token is its own, whatever batch, order, mates, padding, draw count or process."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gumbel_draw import draw_by_gumbel

from vnext.kernels.random_numpy import Domain, step_words
from vnext.runtime.protocol.sampling_params import answer_seed
from vnext.sampling.sampling import Banned, LogitBias, Penalties, SamplingInputs, draw_by_inversion, sample, scale
from vnext.sampling.weights import fixed_point_weights
from vnext.state.params import ROW_DTYPES

DRAWS = [None, draw_by_inversion, draw_by_gumbel]  # None is the product: compiled where it can be
NEGATIVE_INFINITY = float("-inf")


class Row(NamedTuple):
    """One request's own part of a batch."""

    logits: torch.Tensor
    seed: int = 1
    position: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: tuple[float, float, float] | None = None
    history: tuple[int, ...] = ()
    bias: dict[int, float] = {}
    banned: tuple[int, ...] = ()
    logprobs: int = -1


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def batch(rows: list[Row]) -> tuple[torch.Tensor, SamplingInputs]:
    random_rows = [row for row in rows if row.temperature > 0]
    bias = [(place, token, value) for place, row in enumerate(rows) for token, value in row.bias.items()]
    banned = [(place, token) for place, row in enumerate(rows) for token in row.banned]
    return torch.stack([row.logits for row in rows]), SamplingInputs(
        temperature=torch.tensor([row.temperature for row in rows]),
        top_k=torch.tensor([row.top_k for row in rows]),
        top_p=torch.tensor([row.top_p for row in rows]),
        min_p=torch.tensor([row.min_p for row in rows]),
        seed=torch.tensor([signed(row.seed) for row in rows]),
        position=torch.tensor([row.position for row in rows]),
        penalties=penalties_of(rows),
        bias=LogitBias(*(torch.tensor(column) for column in zip(*bias, strict=True))) if bias else None,
        banned=Banned(*(torch.tensor(column) for column in zip(*banned, strict=True))) if banned else None,
        logprobs=max(row.logprobs for row in rows),
        any_random=bool(random_rows),
        any_filter=any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in random_rows),
    )


def penalties_of(rows: list[Row]) -> Penalties | None:
    places = [place for place, row in enumerate(rows) if row.penalties is not None]
    if not places:
        return None
    vocabulary = rows[0].logits.shape[0]
    history = [torch.tensor(rows[place].history, dtype=torch.int64) for place in places]
    counts = torch.stack([torch.bincount(tokens, minlength=vocabulary) for tokens in history])
    strengths = [torch.tensor(column) for column in zip(*(rows[place].penalties for place in places), strict=True)]
    prompt = counts.roll(1, dims=1) > 0
    return Penalties(torch.tensor(places), *strengths, prompt_mask=prompt, output_counts=counts.to(torch.int32))


def tokens_of(rows: list[Row], draw=None) -> list[int]:
    return sample(*batch(rows), draw).tokens.tolist()


def varied_rows(vocabulary: int, count: int, seed: int) -> list[Row]:
    """Rows that between them switch everything on, in turn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * 3
    numbers = torch.randint(0, vocabulary, (count, 6), generator=generator).tolist()
    return [
        Row(
            logits=logits[place],
            seed=(place * 0x9E3779B97F4A7C15) % 2**64,
            position=place * 17,
            temperature=(0.0, 0.7, 1.0, 1.6, 5.0)[place % 5],
            top_k=(0, 5, 0, 300)[place % 4],
            top_p=(1.0, 1.0, 0.9, 0.3, 0.99)[place // 2 % 5],
            min_p=(0.0, 0.0, 0.05)[place % 3],
            penalties=(1.2, 0.5, 0.3) if place % 3 == 1 else None,
            history=tuple(numbers[place]),
            bias={numbers[place][0]: 4.0} if place % 4 == 2 else {},
            banned=tuple(set(numbers[place][1:3])) if place % 5 == 3 else (),
            logprobs=(-1, 0, 3, 20)[place % 4],
        )
        for place in range(count)
    ]


def plain_inversion(weights: list[int], seed: int, position: int) -> int:
    """The product's draw in whole numbers of any size."""
    first, second = step_words(seed, position, np.zeros(1, dtype=np.uint32), Domain.INVERSION)
    uniform = (int(first[0]) >> 1) << 31 | int(second[0]) >> 1
    left = uniform * sum(weights) >> 62
    for token, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return token
    raise AssertionError("the target lies below the sum of the weights")


def test_the_draw_is_that_of_whole_numbers() -> None:
    rows = [row for row in varied_rows(700, 60, 8) if row.temperature > 0 and row.penalties is None]
    rows = [row._replace(bias={}, banned=()) for row in rows]
    weights = fixed_point_weights(*batch(rows)).tolist()
    expected = [plain_inversion(weight, row.seed, row.position) for weight, row in zip(weights, rows, strict=True)]
    assert tokens_of(rows) == expected


def test_the_scaled_uniform_is_exact_at_the_ends() -> None:
    words = [0, 1, 2, 3, 2**31, 2**32 - 2, 2**32 - 1]
    totals = [1, 2, 2**31 - 1, 2**31, 2**40, 2**40 + 1, 2**62 - 1]
    cases = [(first, second, total) for first in words for second in words for total in totals]
    found = scale(*(torch.tensor(column) for column in zip(*cases, strict=True)))
    exact = [((first >> 1 << 31 | second >> 1) * total) >> 62 for first, second, total in cases]
    assert found.tolist() == exact
    assert all(0 <= value < total for value, (_, _, total) in zip(exact, cases, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("vocabulary", [33, 151, 5003])
def test_the_same_token_alone_and_in_any_batch_and_order(vocabulary: int, draw) -> None:
    rows = varied_rows(vocabulary, 24, vocabulary)
    alone = [tokens_of([row], draw)[0] for row in rows]
    assert tokens_of(rows, draw) == alone
    generator = torch.Generator().manual_seed(5)
    for size in (24, 13, 7, 2):
        order = torch.randperm(24, generator=generator)[:size].tolist()
        assert tokens_of([rows[place] for place in order], draw) == [alone[place] for place in order]


def test_reported_logprobs_do_not_depend_on_mates() -> None:
    rows = varied_rows(1001, 12, 1)
    together = sample(*batch(rows))
    for place, row in enumerate(rows):
        single = sample(*batch([row._replace(logprobs=5)]))
        assert torch.equal(single.logprob[0], together.logprob[place])
        assert torch.equal(single.rank[0], together.rank[place])
        assert torch.equal(single.top_tokens[0], together.top_tokens[place, :5])
        assert torch.equal(single.top_logprobs[0], together.top_logprobs[place, :5])


MATES = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "another seed": {"seed": 2**64 - 1},
    "penalties": {"penalties": (1.5, 1.0, 1.0), "history": (1, 2, 2)},
    "bias": {"bias": {3: 50.0}},
    "bans": {"banned": (0, 1, 2)},
    "logprobs": {"logprobs": 20},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mate", MATES.values(), ids=MATES.keys())
def test_a_mate_that_switches_something_on_changes_no_seeded_request(mate: dict, draw) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(7))
    mine = [Row(logits, seed=42, position=place) for place in range(20)]
    expected = tokens_of(mine, draw)
    assert len(set(expected)) > 5
    mates = [Row(logits * 2, position=place, **{"seed": 9, **mate}) for place in range(3)]
    assert tokens_of([*mates, *mine, *mates], draw)[3:23] == expected


@pytest.mark.parametrize("draw", DRAWS)
def test_min_p_with_a_seed_repeats_and_keeps_the_noise(draw) -> None:
    """A filter that drops only tokens that were not drawn changes no token."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(8)) * 2
    plain = [Row(logits, seed=3, position=place) for place in range(200)]
    filtered = [row._replace(min_p=0.1) for row in plain]
    first = tokens_of(filtered, draw)
    assert first == tokens_of(filtered, draw)
    allowed = (logits - logits.max()).exp() >= 0.1
    assert all(allowed[token] for token in first) and len(set(first)) > 1
    if draw is draw_by_gumbel:
        kept = [(token, now) for token, now in zip(tokens_of(plain, draw), first, strict=True) if allowed[token]]
        assert kept and all(token == now for token, now in kept)


@pytest.mark.parametrize("draw", DRAWS)
def test_padding_of_the_vocabulary_changes_nothing(draw) -> None:
    rows = varied_rows(777, 20, 2)
    holes = torch.full((247,), NEGATIVE_INFINITY)
    padded = [row._replace(logits=torch.cat([row.logits, holes])) for row in rows]
    plain, wide = sample(*batch(rows), draw), sample(*batch(padded), draw)
    assert torch.equal(plain.tokens, wide.tokens)
    assert torch.equal(plain.rank, wide.rank)
    assert torch.equal(plain.top_tokens, wide.top_tokens)


def test_flags_that_are_true_without_need_change_no_token() -> None:
    logits, inputs = batch([row._replace(top_k=0, top_p=1.0, min_p=0.0) for row in varied_rows(400, 20, 3)])
    assert not inputs.any_filter
    assert torch.equal(sample(logits, inputs).tokens, sample(logits, inputs._replace(any_filter=True)).tokens)
    greedy = inputs._replace(temperature=torch.zeros(20), any_random=False)
    assert torch.equal(sample(logits, greedy).tokens, sample(logits, greedy._replace(any_random=True)).tokens)


def test_a_preempted_request_draws_the_same_again_and_nothing_hidden_moves() -> None:
    rows = varied_rows(300, 10, 4)
    first, before = tokens_of(rows), torch.get_rng_state()
    torch.manual_seed(99)
    sample(*batch(varied_rows(300, 30, 5)))
    assert tokens_of(rows[5:]) + tokens_of(rows[:5]) == first[5:] + first[:5]
    torch.set_rng_state(before)
    assert tokens_of(rows) == first
    assert torch.equal(torch.get_rng_state(), before)


PROCESS = """
import torch
from vnext.sampling.sampling import SamplingInputs, sample
size = 64
logits = ((torch.arange(size) * 37 % 64).float() / 16).expand(size, size)
share, off, seed = torch.full((size,), 0.9), torch.zeros(size), torch.full((size,), -3)
inputs = SamplingInputs(share, torch.zeros(size, dtype=torch.int64), share, off, seed, torch.arange(size))
print(sample(logits, inputs).tokens.tolist())
"""


def test_another_process_draws_the_same_tokens() -> None:
    """Two ranks, or an engine and the replay of its log; the ends are pinned so that old logs stay true."""
    other = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, timeout=60)
    logits = (torch.arange(64) * 37 % 64).float() / 16
    rows = [Row(logits, seed=2**64 - 3, position=place, temperature=0.9, top_p=0.9) for place in range(64)]
    here = tokens_of(rows)
    assert other.stdout.strip() == str(here)
    assert here[:8] == PINNED


PINNED = [31, 5, 43, 39, 19, 22, 10, 10]


def test_the_n_answers_of_one_seeded_prompt_differ() -> None:
    logits = torch.zeros(50_000)
    seeds = [answer_seed(123, answer) for answer in range(32)]
    tokens = tokens_of([Row(logits, seed=seed, position=9) for seed in seeds])
    assert len(set(tokens)) > 28
    assert tokens == tokens_of([Row(logits, seed=seed, position=9) for seed in seeds])


def test_every_bit_of_the_seed_and_of_the_position_counts() -> None:
    logits = torch.zeros(2**17)
    seeds = [0, *(1 << bit for bit in range(64))]
    assert len(set(tokens_of([Row(logits, seed=seed) for seed in seeds]))) == len(seeds)
    places = [0, *(1 << bit for bit in range(31))]
    assert len(set(tokens_of([Row(logits, position=place) for place in places]))) == len(places)


# ---- greedy, extremes, reports -----------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals_and_ignores_filters() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0, 5.0])
    rows = [Row(logits, temperature=0.0), Row(logits, temperature=0.0, top_k=1, top_p=0.01, min_p=1.0, seed=5)]
    assert tokens_of([*rows, Row(logits, top_k=2)])[:2] == [1, 1]


@pytest.mark.parametrize("draw", DRAWS)
def test_extremes(draw) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(9)) * 5
    best = int(logits.argmax())
    only = tuple(token for token in range(1000) if token != 17)
    assert tokens_of([Row(logits, temperature=1e-5, position=place) for place in range(30)], draw) == [best] * 30
    assert tokens_of([Row(logits, top_p=1e-9, position=place) for place in range(30)], draw) == [best] * 30
    assert tokens_of([Row(logits, temperature=0.0, banned=only), Row(logits, banned=only)], draw) == [17, 17]
    hot = tokens_of([Row(logits, temperature=100.0, position=place) for place in range(500)], draw)
    assert len(set(hot)) > 350
    plain = [Row(logits, temperature=2.0, position=place) for place in range(50)]
    assert tokens_of([row._replace(top_k=5000) for row in plain], draw) == tokens_of(plain, draw)
    holes = logits.clone().masked_fill_(torch.arange(1000) % 2 == 0, NEGATIVE_INFINITY)
    wide = Row(holes, temperature=50.0, top_k=900, top_p=0.999)
    found = tokens_of([wide._replace(position=place) for place in range(200)], draw)
    assert all(token % 2 == 1 for token in found)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_that_no_draw_can_serve_spoils_no_mate(draw) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(10))
    mates = [Row(logits, position=place, top_p=0.9) for place in range(5)]
    broken = logits.clone()
    broken[3] = float("nan")
    found = tokens_of([Row(torch.full((100,), NEGATIVE_INFINITY)), Row(broken, top_k=3), *mates], draw)
    assert found[2:] == tokens_of(mates, draw)
    assert found[:2] == [0, 3]


def test_reports_are_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -0.0, 0.0, NEGATIVE_INFINITY, -2.0])
    row = Row(logits, temperature=0.0, bias={6: 50.0}, logprobs=7)
    result = sample(*batch([row]))
    exact = logits.double().log_softmax(-1)
    assert result.tokens.tolist() == [6] and result.rank.tolist() == [5]
    assert result.top_tokens.tolist() == [[1, 2, 0, 3, 4, 6, 5]]
    torch.testing.assert_close(result.logprob, exact[6:7].float())
    torch.testing.assert_close(result.top_logprobs, exact[result.top_tokens].float())


def test_reports_only_what_was_asked_for() -> None:
    logits = torch.tensor([1.0, 2.0])
    assert sample(*batch([Row(logits)]))[1:] == (None, None, None, None)
    none = sample(*batch([Row(logits, logprobs=0)]))
    assert none.logprob.shape == (1,) and none.top_tokens.shape == (1, 0) and none.top_logprobs.shape == (1, 0)
    assert sample(*batch([Row(logits, logprobs=20)])).top_tokens.shape == (1, 2)


def test_logits_are_left_alone_and_an_empty_batch_is_legal() -> None:
    logits, inputs = batch(varied_rows(200, 12, 6))
    kept = logits.clone()
    sample(logits, inputs)
    assert torch.equal(logits, kept)
    columns = {name: column[:0] for name, column in zip(ROW_DTYPES, inputs.columns())}
    nothing = sample(logits[:0], SamplingInputs(**columns, logprobs=2))
    assert nothing.tokens.shape == (0,) and nothing.top_tokens.shape == (0, 2)


def test_no_value_is_read_back_from_a_device() -> None:
    """Shapes alone must be enough: the meta device has no values to wait for."""
    logits, inputs = batch(varied_rows(200, 12, 6))
    columns = {name: on_meta(getattr(inputs, name)) for name in inputs._fields}
    result = sample(logits.to("meta"), SamplingInputs(**columns))
    assert result.tokens.shape == (12,) and result.top_tokens.shape == (12, 20)


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return type(value)(*map(on_meta, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": torch.ones(3)}, "temperature must be"),
        ({"seed": torch.ones(2)}, "seed must be"),
        ({"position": torch.zeros(2, dtype=torch.int64, device="meta")}, "position must be"),
    ],
)
def test_broken_contracts_are_refused(change: dict, message: str) -> None:
    logits, inputs = batch([Row(torch.zeros(4)), Row(torch.zeros(4))])
    with pytest.raises(ValueError, match=message):
        sample(logits, inputs._replace(**change))
    with pytest.raises(ValueError, match="logits must be"):
        sample(logits.bfloat16(), inputs)
    with pytest.raises(ValueError, match=r"penalties\.prompt_mask"):
        sample(torch.zeros(1, 4), batch([Row(torch.zeros(5), penalties=(1.0, 0.0, 0.0))])[1])
