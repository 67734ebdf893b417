"""The sharding table: parts cover each axis once, key-value heads are shared, impossible sizes are refused."""

from __future__ import annotations

import pytest
import torch
from model_helpers import tiny_config

from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_bytes_per_page, make_kv_cache
from vnext.models.layers.sharding import (
    Axis,
    Layout,
    Parallel,
    alone,
    axis_part,
    axis_size,
    check_world_size,
    layout_of,
    matrix,
)


def rank_of(world_size: int, rank: int) -> Parallel:
    one = alone()
    return Parallel(rank=rank, world_size=world_size, all_reduce=one.all_reduce, all_gather=one.all_gather)


@pytest.mark.parametrize("axis", [Axis.HEADS, Axis.MLP, Axis.VOCAB])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_divided_axes_are_covered_once(axis: Axis, ranks: int) -> None:
    config = tiny_config()
    parts = [axis_part(axis, config, rank_of(ranks, rank)) for rank in range(ranks)]
    covered = [place for part in parts for place in range(part.start, part.stop)]
    assert covered == list(range(axis_size(axis, config)))
    assert len({part.size for part in parts}) == 1


def test_a_vocabulary_smaller_than_the_padding_leaves_ranks_empty() -> None:
    config = tiny_config(vocab_size=5)
    parts = [axis_part(Axis.VOCAB, config, rank_of(4, rank)) for rank in range(4)]
    assert [(part.start, part.stop) for part in parts] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_neighbours_share_a_key_value_head() -> None:
    config = tiny_config()
    starts = [axis_part(Axis.KV_HEADS, config, rank_of(4, rank)).start for rank in range(4)]
    assert starts == [0, 0, 8, 8]


def test_names_have_layouts() -> None:
    assert layout_of("model.layers.3.self_attn.q_proj.weight") == matrix(Axis.HEADS, Axis.HIDDEN)
    assert layout_of("model.layers.3.self_attn.o_proj.bias") == Layout((Axis.HIDDEN,))
    assert layout_of("model.norm.weight") == Layout((Axis.HIDDEN,))
    assert layout_of("lm_head.weight") == matrix(Axis.VOCAB, Axis.HIDDEN)


def test_the_longer_name_comes_first() -> None:
    own = {"c_proj": matrix(Axis.HIDDEN, Axis.HEADS), "mlp.c_proj": matrix(Axis.HIDDEN, Axis.MLP)}
    assert layout_of("h.3.mlp.c_proj.weight", own).inner == Axis.MLP
    assert layout_of("h.3.attn.c_proj.weight", own).inner == Axis.HEADS
    table = {"experts.up_proj": matrix(Axis.EXPERT_MLP, Axis.HIDDEN), "up_proj": matrix(Axis.MLP, Axis.HIDDEN)}
    assert layout_of("model.layers.0.mlp.experts.7.up_proj.weight", table).out == (Axis.EXPERT_MLP,)


@pytest.mark.parametrize("world_size", [0, 3, 8])
def test_a_world_size_that_does_not_divide_is_refused(world_size: int) -> None:
    with pytest.raises(ModelError, match=rf"4 attention heads.* over {world_size} ranks; choose .* 1, 2, 4$"):
        check_world_size(tiny_config(), world_size)


def test_cache_size_is_what_a_block_costs() -> None:
    config = tiny_config()
    for ranks in (1, 2, 4):
        kv = make_kv_cache(config, 7, 16, torch.bfloat16, "cpu", rank_of(ranks, 0))
        size = sum(tensor.nbytes for pair in kv for tensor in pair)
        assert size == 7 * kv_bytes_per_page(config, 16, torch.bfloat16, rank_of(ranks, 0))
        assert kv[0][0].shape == (7, max(1, 2 // ranks), 16, 8)
