"""Reference paged attention equals dense attention, and a query's bits do not depend on its company."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import attend, dense, make_sequences

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.runtime.processes.determinism import cpu_flags, mkl_branch

HERE = Path(__file__).resolve().parent
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 8, 16), (8, 2, 16, 16), (6, 1, 4, 3), (2, 2, 32, 1), (4, 2, 8, 200)],
)
def test_mixed_steps_equal_dense_attention(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    lengths = [200, 1, 140, 33]
    sequences = make_sequences(lengths, heads, kv_heads, head_dim, block_size)
    expected = [dense(sequences, index) for index in range(len(lengths))]
    for ranges in ([(0, 0, 200), (1, 0, 1), (3, 32, 33), (2, 100, 140)], [(2, 139, 140)], [(0, 30, 31), (0, 31, 90)]):
        for found, (index, start, stop) in zip(attend(sequences, ranges), ranges, strict=True):
            torch.testing.assert_close(found, expected[index][start:stop], **CLOSE)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 100, 128, 129, 190, 500])
@pytest.mark.parametrize("block_size", [1, 3, 16, 200])
def test_windows_equal_dense_attention(window: int, block_size: int) -> None:
    lengths = [300, 1, 140, 33]
    sequences = make_sequences(lengths, 4, 2, 8, block_size)
    expected = [dense(sequences, index, window) for index in range(len(lengths))]
    steps = [[(0, 0, 300), (1, 0, 1), (3, 32, 33), (2, 100, 140)], [(2, 139, 140)], [(0, 290, 291), (2, 1, 90)]]
    for ranges in steps:
        for found, (index, start, stop) in zip(attend(sequences, ranges, window), ranges, strict=True):
            torch.testing.assert_close(found, expected[index][start:stop], **CLOSE)


def test_blocks_before_the_window_are_not_read() -> None:
    sequences = make_sequences([300], 4, 2, 8, 16)
    expected = dense(sequences, 0, 40)
    for ranges, first in (([(0, 299, 300)], 260), ([(0, 270, 300)], 231), ([(0, 295, 300), (0, 280, 281)], 241)):
        gone = sequences.blocks[0][: first // 16]
        caches = sequences.key_cache.clone(), sequences.value_cache.clone()
        for cache in caches:
            cache[gone] = float("nan")
        blocks = [[-1] * len(gone) + sequences.blocks[0][len(gone) :]]
        freed = sequences._replace(blocks=blocks, key_cache=caches[0], value_cache=caches[1])
        for found, (_, start, stop) in zip(attend(freed, ranges, 40), ranges, strict=True):
            torch.testing.assert_close(found, expected[start:stop], **CLOSE)


@pytest.mark.parametrize("window", [0, 30])
def test_softcap_bounds_the_scores(window: int) -> None:
    sequences = make_sequences([200], 4, 2, 16, 16)
    sequences = sequences._replace(query=[sequences.query[0] * 20])
    found = attend(sequences, [(0, 0, 200)], window, 5.0)[0]
    torch.testing.assert_close(found, dense(sequences, 0, window, 5.0), **CLOSE)
    assert (found - dense(sequences, 0, window)).abs().max() > 0.1


@pytest.mark.parametrize("window", [0, 30])
def test_sinks_take_their_part(window: int) -> None:
    sequences, sinks = make_sequences([200, 20], 4, 2, 16, 16), torch.tensor([-2.0, 0.5, 3.0, 300.0])
    found = attend(sequences, [(0, 0, 200), (1, 19, 20)], window, sinks=sinks)
    expected = [dense(sequences, 0, window, sinks=sinks), dense(sequences, 1, window, sinks=sinks)[19:]]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, **CLOSE)
    assert not found[0][:, 3].any(), "a sink far above all scores leaves nothing"


def test_more_tiles_than_one_group_holds() -> None:
    sequences = make_sequences([1300, 20], 2, 1, 4, 16)
    found = attend(sequences, [(0, 0, 1300), (1, 0, 20)] + [(1, place, place + 1) for place in range(20)] * 4)
    torch.testing.assert_close(found[0], dense(sequences, 0), **CLOSE)
    for place in range(20):
        torch.testing.assert_close(found[2 + 60 + place], dense(sequences, 1)[place : place + 1], **CLOSE)


def test_idle_rows_and_padding_tokens_give_zeros() -> None:
    import numpy as np

    from vnext.kernels.table import choose

    sequences = make_sequences([20, 9], 2, 2, 8, 16)
    table = torch.tensor([[-1, -1], sequences.blocks[0], [-1, -1]], dtype=torch.int32)
    starts, lengths = np.array([0, 0, 20, 20], np.int32), np.array([0, 20, 0], np.int32)
    metadata = choose("attention_metadata", "cpu")(AttentionStep(starts, lengths, table, 16, 2))
    query = torch.cat((sequences.query[0], sequences.query[1]))
    caches = sequences.key_cache, sequences.value_cache
    found = choose("paged_attention", "cpu")(query, AttentionCall(*caches, metadata, 8**-0.5))
    torch.testing.assert_close(found[:20], dense(sequences, 0), **CLOSE)
    assert torch.equal(found[20:], torch.zeros(9, 2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches(dtype: torch.dtype) -> None:
    sequences = make_sequences([150], 4, 2, 16, 16)
    halves = sequences._replace(
        query=[sequences.query[0].to(dtype)],
        key_cache=sequences.key_cache.to(dtype),
        value_cache=sequences.value_cache.to(dtype),
    )
    found = attend(halves, [(0, 0, 150)])[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), dense(sequences, 0), rtol=0.03, atol=0.03)


def test_bits_do_not_depend_on_company_or_chunks() -> None:
    settings = {"MKL_CBWR": mkl_branch(cpu_flags()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    environment = {**os.environ, **settings}
    program = [sys.executable, str(HERE / "attention_invariance.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "invariant" in done.stdout, done.stderr
