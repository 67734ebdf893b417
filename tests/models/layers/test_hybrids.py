"""Families with recurrent layers give transformers' logits and greedy tokens, and the same bits for any cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_cases import VOCAB_SIZE
from hybrids import CASES, Hybrid, Row, load_hybrid, load_oracle, save_hybrid
from model_helpers import Chunk, ThreadGroup

from vnext.models.errors import ModelError
from vnext.models.layers.sharding import check_world_size
from vnext.models.loading.unread import unread

PROMPT = [int(token) for token in torch.randint(0, VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(1))]
BLOCKS = list(range(40, 64))
OTHER = [9, 2, 30, 4, 11, 8, 20, 21, 22, 23, 0, 1, 31, 32, 33, 34, 35, 36, 37, 38]
TOKEN_COUNT = 64
ERROR_MAX = 1e-4


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("hybrids") / request.param
    return path, save_hybrid(path, request.param)


def in_chunks(model: Hybrid, size: int, page: int = 3, blocks: list[int] = BLOCKS, tokens: list[int] = PROMPT) -> torch.Tensor:
    """Logits [300, V] of the prompt, so many tokens a step."""
    starts = range(0, len(tokens), size)
    return torch.cat([model.logits(Row(Chunk(tokens[first : first + size], first, blocks), page)) for first in starts])


def greedy(model: Hybrid, logits: torch.Tensor) -> list[int]:
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < TOKEN_COUNT:
        step = model.logits(Row(Chunk(tokens[-1:], len(PROMPT) + len(tokens) - 1, BLOCKS), 3))
        tokens.append(int(step[-1].argmax()))
    return tokens


@torch.inference_mode()
def test_logits_and_greedy_tokens(saved: tuple[Path, torch.nn.Module]) -> None:
    path, oracle = saved
    expected = oracle(torch.tensor([PROMPT])).logits[0]
    model = load_hybrid(path)
    logits = in_chunks(model, 300)
    assert (logits - expected).abs().max() <= ERROR_MAX * expected.abs().max()
    tokens = greedy(model, logits)
    again = oracle(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == again.argmax(-1).tolist() and len(set(tokens)) > 3


def test_nothing_is_left_of_what_transformers_writes(saved: tuple[Path, torch.nn.Module]) -> None:
    assert unread(saved[0]) == ""


@torch.inference_mode()
def test_the_same_bits_for_any_cut_and_company(saved: tuple[Path, torch.nn.Module]) -> None:
    """In chunks of 7, beside another request at other pages, and resumed from a copy of a page."""
    model = load_hybrid(saved[0])
    expected = in_chunks(model, 300)
    assert torch.equal(in_chunks(model, 7, page=0, blocks=OTHER), expected)
    beside, found = PROMPT[40:120], []
    for first in range(0, 80, 40):
        mine = Row(Chunk(PROMPT[first : first + 40], first, BLOCKS), 11)
        found.append(model.logits(Row(Chunk(beside[first : first + 33], first, OTHER), 5), mine)[-40:])
    assert torch.equal(torch.cat(found), expected[:80])
    for part in (part for parts in model.pools for part in parts):
        part[7] = part[11]
    assert torch.equal(model.logits(Row(Chunk(PROMPT[80:110], 80, BLOCKS), 7)), expected[80:110])


@torch.inference_mode()
def test_bfloat16_is_as_near_to_the_truth_as_transformers(saved: tuple[Path, torch.nn.Module]) -> None:
    """As in test_families_transformers.py, on the weights as bfloat16 has them."""
    path, _ = saved
    oracle = load_oracle(path, torch.bfloat16).float()
    prompt = torch.tensor([PROMPT[:100]])
    truth, theirs = oracle(prompt).logits[0], load_oracle(path, torch.bfloat16)(prompt).logits[0].float()
    ours = load_hybrid(path, dtype=torch.bfloat16).logits(Row(Chunk(PROMPT[:100], 0, BLOCKS), 3))

    def error(found: torch.Tensor) -> float:
        return float(((found - truth).square().mean(1).sqrt() / truth.square().mean(1).sqrt()).median())

    assert 0.0 < error(ours) <= 2**0.5 * error(theirs) < 0.1


@torch.inference_mode()
def test_two_ranks_give_the_bits_of_one(saved: tuple[Path, torch.nn.Module]) -> None:
    model = load_hybrid(saved[0])
    if model.model.config.recurrent.key_heads == 1:
        with pytest.raises(ModelError, match="and a state of 1 heads do not split over 2 ranks; choose a world size out of 1"):
            check_world_size(model.model.config, 2)
        return
    expected = in_chunks(model, 150)
    ranks = ThreadGroup(2).run(torch.inference_mode()(lambda parallel: in_chunks(load_hybrid(saved[0], parallel), 150)))
    assert all(torch.equal(logits, expected) for logits in ranks)
