"""Encoders give the states of transformers, with the same bits alone and in company, on any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from encoder_cases import CASES, VOCAB_SIZE, save_encoder
from model_helpers import Chunk, Model, ThreadGroup, load_model, make_batch

from vnext.kernels.references import gelu
from vnext.models.layers.sharding import Parallel

TEXT = torch.randint(5, VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = [9, 2, 30, 4, 11, 8, 50, 51, 52, 53, 0, 1, 20, 21, 22, 23, 24, 25, 26, 27]
OTHERS = ([40, 41], [42], [43, 44, 45])


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("encoders") / request.param
    return path, save_encoder(path, request.param)


def states(model: Model, *chunks: Chunk) -> torch.Tensor:
    """Those of all tokens of one step [T, hidden]."""
    batch = make_batch(chunks, model.kv[0][0].shape[2])
    found: torch.Tensor = model.family.forward(model.params, model.kv, batch, model.config, model.parallel)[0]
    return found


@torch.inference_mode()
def test_states_are_those_of_transformers(saved: tuple[Path, torch.nn.Module]) -> None:
    path, oracle = saved
    model = load_model(path)
    for count in (1, 17, 300):
        expected = oracle(torch.tensor([TEXT[:count]])).last_hidden_state[0]
        found = states(model, Chunk(TEXT[:count], 0, BLOCKS))
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.inference_mode()
def test_the_same_bits_in_company_and_on_two_ranks(saved: tuple[Path, torch.nn.Module]) -> None:
    mine, others = Chunk(TEXT, 0, BLOCKS), [Chunk(TEXT[at : at + 15], 0, blocks) for at, blocks in enumerate(OTHERS)]

    def on_a_rank(parallel: Parallel) -> torch.Tensor:
        with torch.inference_mode():
            return states(load_model(saved[0], parallel=parallel), mine)

    alone = states(load_model(saved[0]), mine)
    beside = states(load_model(saved[0]), others[0], mine, *others[1:])
    assert torch.equal(beside[15:315], alone)
    assert all(torch.equal(each, alone) for each in ThreadGroup(2).run(on_a_rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_has_the_bits_of_float64_rounded_once(dtype: torch.dtype) -> None:
    """In any number of rows, of which a few are computed at a time."""
    x = torch.randn((37, 1536), generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    wide = x.double()
    right = (wide * (1 + (wide * 0.5**0.5).erf()) / 2).to(dtype)
    assert all(torch.equal(gelu(x[first:]), right[first:]) for first in (0, 1, 20, 36))
