"""Towers: their vectors are transformers', whatever else is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tower_cases import SIDE, TILE_TOKENS, save_model
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from vnext.models.config.model_config import load_config
from vnext.models.families.towers import idefics3
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.layers.tower import BLOCK_SIZE, encode, page_count, place_numbers, whole
from vnext.models.loading.unread import unread
from vnext.models.loading.weights import load_params


@pytest.mark.parametrize("name", ["Idefics3", "SmolVLM"])
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_model(tmp_path, name)
    config = idefics3.tower_config(load_config(tmp_path))
    assert config.tower.vectors == TILE_TOKENS and config.tower.side == SIDE and unread(tmp_path) == ""
    params = load_params(tmp_path, config, alone(), torch.float32, "cpu", assemble=idefics3.assemble_tower)
    pixels = torch.randn(3, 3, SIDE, SIDE)
    kv = make_kv_cache(config, page_count(config.tower.grid**2), BLOCK_SIZE, torch.float32, "cpu", alone())
    with torch.inference_mode():
        found = [idefics3.project(params, whole(encode(params, kv, each[None], config)), (), config) for each in pixels]
        right = torch.cat(oracle.model.get_image_features(pixels[None]).pooler_output).reshape(3, TILE_TOKENS, -1)
        for units in (1, 3, 5, 99):
            assert torch.equal(idefics3.project(params, whole(encode(params, kv, pixels[:1], config, units)), (), config), found[0])
            parts = list(encode(params, kv, pixels[:1], config, units))
            assert {*parts} == {len(parts)}
    for ours, theirs in zip(found, right):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-4


@pytest.mark.parametrize("grid", [1, 2, 3, 7, 8, 14, 16, 23, 26, 32, 64, 70])
def test_positions_are_those_of_transformers(grid: int) -> None:
    """Fractions that are not exact put some patches at others' positions."""

    class Config:
        hidden_size, image_size, patch_size, num_channels = 1, grid, 1, 1

    embeddings = Idefics3VisionEmbeddings(Config())
    torch.nn.init.zeros_(embeddings.patch_embedding.weight)
    torch.nn.init.zeros_(embeddings.patch_embedding.bias)
    embeddings.position_embedding.weight.data = torch.arange(grid**2, dtype=torch.float32)[:, None]
    with torch.inference_mode():
        right = embeddings(torch.zeros(1, 1, grid, grid), torch.ones(1, grid, grid, dtype=torch.bool))
    assert np.array_equal(place_numbers(grid), right[0, :, 0].numpy().astype(np.int64))
