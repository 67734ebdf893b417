"""Sizing: defaults that depend on the model and the memory, and one sentence for each setting that cannot work."""

from __future__ import annotations

import pytest

from vnext.runtime.messages import ModelFacts, RankReady
from vnext.runtime.settings import EngineSettings, SettingsError
from vnext.runtime.sizing import scheduler_config

MODEL = ModelFacts(vocab_size=100, position_count_max=512, eos_token_ids=(2,))


def ranks(*blocks: int) -> tuple[RankReady, ...]:
    return tuple(
        RankReady(model=MODEL, rank=rank, block_count_max=count, block_bytes=512, model_digest="", environment={})
        for rank, count in enumerate(blocks)
    )


def test_defaults_come_from_the_model() -> None:
    config = scheduler_config(EngineSettings(), MODEL, ranks(10**6))
    assert (config.model_len_max, config.eos_token_ids, config.vocab_size) == (512, (2,), 100)
    assert config.pipeline_depth == 2 and config.prefix_caching and config.chunked_prefill


def test_the_cache_is_the_smallest_rank_s_and_no_more_than_a_full_batch_needs() -> None:
    assert scheduler_config(EngineSettings(), MODEL, ranks(900, 700)).block_count == 700
    assert scheduler_config(EngineSettings(max_num_seqs=4), MODEL, ranks(10**6)).block_count == 4 * 512 // 16
    assert scheduler_config(EngineSettings(num_blocks_override=33), MODEL, ranks(5)).block_count == 33


def test_the_model_length_is_lowered_to_the_cache_unless_it_was_asked_for() -> None:
    assert scheduler_config(EngineSettings(), MODEL, ranks(3)).model_len_max == 48
    with pytest.raises(SettingsError, match="holds 48 tokens, less than --max-model-len 100"):
        scheduler_config(EngineSettings(max_model_len=100), MODEL, ranks(3))


def test_synchronous_scheduling_is_a_pipeline_of_one() -> None:
    assert scheduler_config(EngineSettings(async_scheduling=False), MODEL, ranks(99)).pipeline_depth == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (EngineSettings(max_model_len=513), "513, more than the 512 positions"),
        (EngineSettings(enable_chunked_prefill=False, max_num_batched_tokens=100), "100, less than the model length"),
    ],
)
def test_what_cannot_work_is_one_sentence(settings: EngineSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        scheduler_config(settings, MODEL, ranks(99))


def test_a_cache_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(SettingsError, match="too small for one block of 512 bytes"):
        scheduler_config(EngineSettings(), MODEL, ranks(0))
