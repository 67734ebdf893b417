"""A hybrid's whole step in one call gives every token, and every bit of caches and pools, of layer by layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import VOCAB_SIZE
from hybrids import PAGES, save_hybrid
from model_helpers import ThreadGroup, make_batch

from vnext.kernels.arrays import as_tensor
from vnext.models.layers import whole_step as module
from vnext.models.layers.batch import ForwardBatch, RecurrentBatch
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.recurrent import make_state_pools
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.layers.whole_step import WholeStep, whole_step
from vnext.sampling.sampling import sample

sys.path += [str(Path(__file__).resolve().parents[2] / "kernels"), str(Path(__file__).resolve().parents[1])]
from cpu_levels import needs_native
from test_whole_step import STEPS, load, sampling_of

pytestmark = needs_native

WHOLE = (
    "lfm2", "lfm2_bias", "lfm2_moe", "qwen3_5", "qwen3_5_wide", "qwen3_next", "granite_h", "granite_h_moe", "bamba",
    "olmo_hybrid", "lfm3", "jamba", "jamba_dense", "minimax", "kimi_linear", "ling_3",
    "nemotron_h", "nemotron_h_moe", "nemotron_h_narrow", "mamba", "falcon_mamba", "mamba2", "falcon_h1", "falcon_h1_norm",
)  # fmt: skip
ROWS = ((3, 5), (3, 5, 7), (3,))
"""The pages of the rows of STEPS."""


def pools_of(config: Any, dtype: torch.dtype, ranks: int) -> list[Any]:
    """Twice the pools of a model, with what no request left there."""
    found = [make_state_pools(config, PAGES, dtype, ranks) for _ in range(2)]
    for part in (part for pools in found for parts in pools for part in parts):
        part.fill_(float("nan"))
    return found


def with_states(batch: ForwardBatch, rows: tuple[int, ...], chunks: Any, pools: Any) -> ForwardBatch:
    fresh = torch.tensor([chunk.computed == 0 for chunk in chunks])
    return batch._replace(recurrent=RecurrentBatch(pools, torch.tensor(rows, dtype=torch.int32), fresh))


def same(ours: Any, theirs: Any) -> bool:
    pairs = [pair for parts in zip(ours, theirs) for pair in zip(*parts)]
    return all(torch.equal(mine.nan_to_num(9.0), other.nan_to_num(9.0)) for mine, other in pairs)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WHOLE)
def test_one_call_is_layer_by_layer(tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples or the last ones; also the states of samples, without tokens. Each step is run again on other tokens."""
    monkeypatch.setattr(module, "POSITIONS_MIN", 3)
    save_hybrid(tmp_path / name, name)
    chosen, params, kv, plain_kv, config = load(tmp_path / name, dtype, "none", alone())
    pools, plain_pools = pools_of(config, dtype, 1)
    whole = whole_step(params, kv, config, alone(), pools=pools)
    assert isinstance(whole, WholeStep) and whole_step(params, kv, config, alone()) is None
    for chunks, rows, every in zip(STEPS, ROWS, (1, 2, 1)):
        batch = make_batch(chunks, 16, len(kv_groups(config).windows))
        batch = with_states(batch._replace(sample_at=batch.sample_at[every - 1 :: every].clone()), rows, chunks, pools)
        plain, sampling = with_states(batch, rows, chunks, plain_pools), sampling_of(batch.positions[batch.sample_at])
        for _ in range(2):
            hidden, _ = chosen.forward(params, plain_kv, plain, config, alone())
            expected = sample(chosen.logits(params, hidden, config, alone()), sampling).tokens
            assert whole.run(batch, sampling).tolist() == expected.tolist()
            assert same(kv, plain_kv) and same(pools, plain_pools)
            batch.token_ids.copy_((batch.token_ids + 11) % VOCAB_SIZE)
            sampling.position.add_(1)
        hidden, _ = chosen.forward(params, plain_kv, plain, config, alone())
        assert torch.equal(as_tensor(whole.hidden(batch)), hidden) and same(pools, plain_pools)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "bamba", "olmo_hybrid", "lfm3", "jamba", "minimax", "kimi_linear", "ling_3", "nemotron_h_narrow", "mamba", "falcon_mamba", "falcon_h1"])
def test_ranks_sum_in_one_call_as_layer_by_layer(tmp_path: Path, name: str) -> None:
    save_hybrid(tmp_path / name, name)

    @torch.inference_mode()
    def work(parallel: Parallel) -> list[int]:
        chosen, params, kv, plain_kv, config = load(tmp_path / name, torch.bfloat16, "none", parallel)
        pools, plain_pools = pools_of(config, torch.bfloat16, 2)
        whole, found = whole_step(params, kv, config, parallel, pools=pools), []
        assert isinstance(whole, WholeStep)
        for chunks, rows in zip(STEPS, ROWS):
            batch = with_states(make_batch(chunks, 16, len(kv_groups(config).windows)), rows, chunks, pools)
            sampling = sampling_of(batch.positions[batch.sample_at])
            hidden, _ = chosen.forward(params, plain_kv, with_states(batch, rows, chunks, plain_pools), config, parallel)
            expected = sample(chosen.logits(params, hidden, config, parallel), sampling).tokens
            found += whole.run(batch, sampling).tolist()
            assert found[len(found) - len(expected) :] == expected.tolist() and same(pools, plain_pools) and same(kv, plain_kv)
        return found

    ranks = ThreadGroup(2).run(work)
    assert ranks[0] == ranks[1] and len(set(ranks[0])) > 9
