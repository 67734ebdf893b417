"""A bias that grows with the distance of a key, as elements of queries and keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hosted_cases import save_hosted
from model_helpers import Chunk, load_model
from safetensors.torch import load_file, save_file

from vnext.models.errors import ModelError
from vnext.models.hosted.own_code import POSITIONS_MAX, biased, with_bias, with_terms
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.loading.unread import unread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_have_the_bias(dtype: torch.dtype) -> None:
    """At the last positions too: to the 16 bits of a slope in two summands, between any two keys."""
    slopes, scale, size = torch.tensor([0.8409, 0.5, 0.0039, 0.3333]), 20**-0.5, 20
    positions = torch.tensor([0, 1, 255, 256, 300, 2047, POSITIONS_MAX - 300, POSITIONS_MAX - 1])
    query, key, value = (torch.zeros(len(positions), heads, size, dtype=dtype) for heads in (4, 2, 2))
    query, key, value = biased((query, key, value), slopes, scale, positions)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] == with_bias(size) == 32 and not value.any()
    scores = scale * torch.einsum("qhd,khd->hqk", query.double(), key.double().repeat_interleave(2, 1))
    wanted = slopes.double()[:, None, None] * positions
    assert float(((scores - wanted) / wanted.clamp(min=1e-3)).abs().max()) < 2**-16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_have_what_keys_add(dtype: torch.dtype) -> None:
    """Of each head of keys, to the 16 bits of two summands."""
    terms = torch.tensor([[0.1, -55.3], [3.7, 1234.5], [-0.007, 1.0], [0.0, 7e-4]])
    query, key, value = (torch.zeros(len(terms), heads, 20, dtype=dtype) for heads in (4, 2, 2))
    query, key, value = with_terms((query, key, value), terms)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] == with_bias(20) and not value.any()
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double().repeat_interleave(2, 1))
    wanted = terms.double().T.repeat_interleave(2, 0)[:, None]
    assert float(((scores - wanted).abs() / wanted.abs().clamp(min=1e-9)).max()) < 2**-16


def test_bloom_without_what_its_head_adds(tmp_path: Path) -> None:
    """As its authors published it: names begin behind "transformer."."""
    save_hosted(tmp_path, "bloom")
    before = load_model(tmp_path).logits(Chunk([5, 6, 7], 0, [0]))
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): each for name, each in load_file(file).items()}, file, {"format": "pt"})
    assert torch.equal(load_model(tmp_path).logits(Chunk([5, 6, 7], 0, [0])), before) and "tensors" not in unread(tmp_path)


def test_an_8_bit_cache_is_refused(tmp_path: Path) -> None:
    """Its digits would round positions."""
    save_hosted(tmp_path, "mpt")
    config = load_model(tmp_path).config
    with pytest.raises(ModelError, match=r"^--kv-cache-dtype int8 is not for keys that hold what they add to scores \(ALiBi, Doge\): leave it out$"):
        make_kv_cache(config, 4, 16, torch.int8, "cpu", alone())
