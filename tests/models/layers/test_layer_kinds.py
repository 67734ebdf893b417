"""What differs from layer to layer in one model: how heads turn, how many and how large they are, whose cache they read."""

from __future__ import annotations

import pytest
import torch
from model_helpers import tiny_config
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vnext.models.config.layer_kinds import Heads
from vnext.models.config.model_config import ModelConfig, check_heads, without_windows
from vnext.models.config.rope_config import parse_rope
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_bytes_per_page, kv_groups, make_kv_cache, page_rows
from vnext.models.layers.rope import inverse_frequencies, rotary_angles
from vnext.models.layers.sharding import Parallel, Part, Sized, alone, axis_part, check_world_size

SLIDING, WHOLE = 512, 0
# layers of Gemma 4 E2B, 31B and 26B-A4B: windows, key-value heads and sizes, the layers that read another's cache, and the groups
SHAPES = {
    "E2B": (([SLIDING] * 4 + [WHOLE]) * 7, (1, 256), (1, 512), 20, [SLIDING, SLIDING, WHOLE], 2 * 6 * 256),
    "31B": (([SLIDING] * 5 + [WHOLE]) * 10, (16, 256), (4, 512), 0, [SLIDING] * 10 + [WHOLE], 2 * 10 * 4 * 512),
    "26B": (([SLIDING] * 5 + [WHOLE]) * 5, (8, 256), (2, 512), 0, [SLIDING] * 13 + [WHOLE], 2 * 5 * 2 * 512),
}


def config_of(name: str) -> tuple[ModelConfig, list[int], int]:
    """A configuration with these layers, the windows of its groups and the numbers of a token in a page."""
    windows, (kv_heads, head_dim), (whole, wide), shared, groups, numbers = SHAPES[name]
    first = len(windows) - shared
    own = {window: max(layer for layer in range(first) if windows[layer] == window) for window in windows}
    config = tiny_config(
        layer_count=len(windows), head_count=16, kv_head_count=kv_heads, head_dim=head_dim, windows=tuple(windows),
        whole_heads=Heads(kv_head_count=whole, head_dim=wide),
        cache_layers=tuple(layer if layer < first else own[window] for layer, window in enumerate(windows)) if shared else (),
    )  # fmt: skip
    return config, groups, numbers


@pytest.mark.parametrize("name", SHAPES)
def test_layers_that_take_equally_much_share_pages(name: str) -> None:
    config, windows, numbers = config_of(name)
    groups = kv_groups(config)
    assert sorted(groups.windows) == sorted(windows)
    assert kv_bytes_per_page(config, 16, torch.bfloat16, alone()) == 16 * 2 * numbers


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_each_layer_that_writes_has_its_own_part_of_a_page(name: str, dtype: torch.dtype) -> None:
    """On one of two ranks: layers of a group do not touch each other, those without a cache read that of the layer they name."""
    config, _, _ = config_of(name)
    half = Parallel(rank=1, world_size=2, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)
    cache, groups = make_kv_cache(config, 3, 4, dtype, "cpu", half), kv_groups(config)
    rows = page_rows(cache)
    assert rows.shape == (3, kv_bytes_per_page(config, 4, dtype, half))
    for layer, (keys, values) in enumerate(cache):
        own = without_windows(config) if config.windows[layer] == WHOLE else config
        assert keys.shape[:3] == values.shape[:3] == (3, max(1, own.kv_head_count // 2), 4)
        assert keys.shape[3] == own.head_dim + (own.head_dim // 32 if dtype is torch.int8 else 0)
        if config.cache_layers and config.cache_layers[layer] != layer:
            assert keys.data_ptr() == cache[config.cache_layers[layer]][0].data_ptr()
            continue
        for group in set(groups.group_of):
            members = [at for at, each in enumerate(groups.group_of) if each == group and at in (config.cache_layers or range(99))]
            if layer not in members:
                continue
            for at in members:
                for each in cache[at]:
                    each.fill_(1 + members.index(at))
            assert all((each == 1 + members.index(at)).all() for at in members for each in cache[at])


def test_neighbours_share_the_few_heads_of_a_layer() -> None:
    config, _, _ = config_of("26B")
    rank = Parallel(rank=3, world_size=4, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)
    assert axis_part(Sized(2 * 512, True, 512), config, rank) == Part(start=512, stop=1024, size=512)
    check_world_size(config, 4)
    with pytest.raises(ModelError, match="do not split over 3 ranks"):
        check_world_size(config, 3)
    with pytest.raises(ModelError, match="correct num_global_key_value_heads"):
        check_heads(tiny_config(whole_heads=Heads(kv_head_count=3, head_dim=16)))


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_pairs_turns_as_if_all_did_and_the_others_stand(share: float) -> None:
    """Within a rounding of transformers' powers, which are float32."""
    named = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share, "factor": 2.0}
    config = Gemma4TextConfig(global_head_dim=32, rope_parameters={"full_attention": named, "sliding_attention": named})
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config, layer_type="full_attention")
    rope = parse_rope({}, named, 32)
    found = inverse_frequencies(rope, 32)
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-6, atol=0.0)
    cosine, sine = rotary_angles(torch.tensor([300]).numpy(), found, rope)
    still = round(16 * (1 - share))
    assert (cosine[0, 16 - still :] == 1).all() and (sine[0, 16 - still :] == 0).all()
