"""One sequence gives the same logits whole, in chunks, token by token, beside others and on shared blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from model_helpers import Chunk, Model, load_model

TOKENS = [int(token) for token in torch.randint(0, 61, (90,), generator=torch.Generator().manual_seed(5))]
OTHERS = [int(token) for token in torch.randint(0, 61, (90,), generator=torch.Generator().manual_seed(6))]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("paged"))


def whole(path: Path, tokens: list[int], block_size: int = 128) -> torch.Tensor:
    """The logits of a row alone, contiguous, in one step."""
    model = load_model(path, block_size=block_size)
    return model.logits(Chunk(tokens, 0, list(range(-(-len(tokens) // block_size)))))


def in_chunks(model: Model, tokens: list[int], sizes: list[int], blocks: list[int]) -> torch.Tensor:
    """The logits of a row computed in chunks of these sizes."""
    parts, done = [], 0
    for size in sizes:
        parts.append(model.logits(Chunk(tokens[done : done + size], done, blocks)))
        done += size
    assert done == len(tokens)
    return torch.cat(parts)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_scattered_blocks_are_as_good_as_contiguous_ones(checkpoint: Path, block_size: int) -> None:
    count = -(-len(TOKENS) // block_size)
    blocks = torch.randperm(count + 5, generator=torch.Generator().manual_seed(7))[:count].tolist()
    model = load_model(checkpoint, page_count=count + 5, block_size=block_size)
    torch.testing.assert_close(model.logits(Chunk(TOKENS, 0, blocks)), whole(checkpoint, TOKENS), **CLOSE)


@pytest.mark.parametrize("sizes", [[1] * 90, [17, 1, 40, 32], [89, 1], [16] * 5 + [10]])
def test_chunks_give_the_logits_of_the_whole(checkpoint: Path, sizes: list[int]) -> None:
    model = load_model(checkpoint)
    found = in_chunks(model, TOKENS, sizes, [9, 2, 30, 4, 11, 8])
    torch.testing.assert_close(found, whole(checkpoint, TOKENS), **CLOSE)


def test_decode_and_prefill_rows_share_a_step(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    first, second = [9, 2, 30, 4, 11, 8], [1, 3, 5, 7, 6, 10]
    model.logits(Chunk(TOKENS[:-1], 0, first))
    model.logits(Chunk(OTHERS[:20], 0, second))
    found = model.logits(Chunk(OTHERS[20:], 20, second), Chunk(TOKENS[-1:], 89, first))
    expected = torch.cat((whole(checkpoint, OTHERS)[20:], whole(checkpoint, TOKENS)[-1:]))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_row_reads_a_block_that_another_row_writes_in_this_step(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    tokens = TOKENS[:40]
    found = model.logits(Chunk(tokens[32:], 32, [5, 6, 8]), Chunk(tokens[:32], 0, [5, 6]))
    expected = whole(checkpoint, tokens)
    torch.testing.assert_close(found[:8], expected[32:], **CLOSE)
    torch.testing.assert_close(found[8:], expected[:32], **CLOSE)


def test_a_strangers_infinities_in_reused_blocks_do_no_harm(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    for key, value in model.kv:
        key.fill_(float("nan"))
        value.fill_(float("inf"))
    found = model.logits(Chunk(TOKENS, 0, [9, 2, 30, 4, 11, 8]))
    torch.testing.assert_close(found, whole(checkpoint, TOKENS), **CLOSE)


def test_only_asked_rows_are_returned_and_none_is_fine(checkpoint: Path) -> None:
    from model_helpers import make_batch

    model = load_model(checkpoint)
    batch = make_batch([Chunk(TOKENS[:8], 0, [0])], 16)
    for places in ([7], []):
        asked = batch._replace(sample_at=torch.tensor(places, dtype=torch.int64), host=None)
        hidden, _ = model.family.forward(model.params, model.kv, asked, model.config, model.parallel)
        found = model.family.logits(model.params, hidden, model.config, model.parallel)
        torch.testing.assert_close(found, whole(checkpoint, TOKENS[:8])[places], **CLOSE)


def test_bfloat16_stays_near_float32(checkpoint: Path) -> None:
    from vnext.models.layers.kv_cache import make_kv_cache
    from vnext.models.loading.weights import load_params

    model = load_model(checkpoint)
    params = load_params(checkpoint, model.config, model.parallel, torch.bfloat16, "cpu")
    kv = make_kv_cache(model.config, 16, 16, torch.bfloat16, "cpu", model.parallel)
    found = model._replace(params=params, kv=kv).logits(Chunk(TOKENS, 0, list(range(6))))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole(checkpoint, TOKENS), rtol=0.1, atol=0.1)
