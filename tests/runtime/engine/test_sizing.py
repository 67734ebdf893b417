"""Sizing: defaults that depend on the model and the memory, and one sentence for each setting that cannot work."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vnext.runtime.engine.process import gpu_settings
from vnext.runtime.engine.sizing import scheduler_config
from vnext.runtime.protocol.messages import ModelFacts, RankReady
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.state.config import SchedulerConfig
from vnext.state.drafting import drafts_a_step
from vnext.state.windows import pages_needed

MODEL = ModelFacts(vocab_size=100, position_count_max=512, eos_token_ids=(2,))


def ranks(*blocks: int) -> tuple[RankReady, ...]:
    return tuple(
        RankReady(model=MODEL, rank=rank, page_count_max=count, block_bytes=512, model_digest="", environment={})
        for rank, count in enumerate(blocks)
    )


def test_defaults_come_from_the_model() -> None:
    config = scheduler_config(EngineSettings(), MODEL, ranks(10**6))
    assert (config.max_model_len, config.eos_token_ids, config.vocab_size) == (512, (2,), 100)
    assert config.pipeline_depth == 2 and config.prefix_caching and config.chunked_prefill


def test_a_step_of_whole_prompts_has_room_for_the_longest_and_finds_nothing_in_the_cache() -> None:
    encoder = replace(MODEL, whole_prompts=True)
    settings = EngineSettings(max_num_batched_tokens=64, long_prefill_token_threshold=8, pinned_kv_fraction=0.5)
    config = scheduler_config(settings, encoder, ranks(10**6))
    assert config.max_num_batched_tokens == config.max_model_len == 512
    assert (config.chunked_prefill, config.prefix_caching, config.long_prefill_token_threshold) == (False, False, 0)
    assert config.pinned_kv_fraction == 0.0 and config.windows == ()
    assert scheduler_config(EngineSettings(), encoder, ranks(10**6)).max_num_batched_tokens == 2048


def test_a_limit_for_images_beside_answers_sets_their_units() -> None:
    seeing = replace(MODEL, reads_inputs=True, input_cost=15.5)
    config = scheduler_config(EngineSettings(input_tokens=16), seeing, ranks(10**6))
    assert (config.inputs_a_step, config.input_units, config.input_tokens) == (1, 992, 16)
    usual = scheduler_config(EngineSettings(), seeing, ranks(10**6))
    assert (usual.input_units, usual.input_tokens) == (1984, 8)
    cases = (MODEL, EngineSettings(input_tokens=16)), (seeing, EngineSettings(input_tokens=0)), (replace(seeing, listens=True), EngineSettings())
    for model, settings in (*cases, (seeing, EngineSettings(enable_chunked_prefill=False))):
        whole = scheduler_config(settings, model, ranks(10**6))
        assert (whole.input_units, whole.input_tokens) == (0, 0)
    mutual = scheduler_config(EngineSettings(input_tokens=16), replace(seeing, mutual_inputs=True), ranks(10**6))
    assert (mutual.input_units, mutual.input_tokens) == (992, 0), "a part of such an image costs as much as all of it"


def test_a_step_has_more_tokens_on_a_gpu_unless_the_user_says_how_many() -> None:
    def tokens(device: str, **settings: int) -> int:
        found = (replace(ranks(10**6)[0], environment={"device": device}),)
        return scheduler_config(EngineSettings(**settings), MODEL, found).max_num_batched_tokens

    assert (tokens("cpu"), tokens("NVIDIA H200")) == (2048, 8192)
    assert {tokens(device, max_num_batched_tokens=512) for device in ("cpu", "NVIDIA H200")} == {512}
    assert gpu_settings(EngineSettings(), 0).tokens_max == 8192
    assert gpu_settings(EngineSettings(max_num_batched_tokens=64), 0).tokens_max == 64


def test_the_cache_is_the_smallest_rank_s_and_no_more_than_a_full_batch_needs() -> None:
    assert scheduler_config(EngineSettings(), MODEL, ranks(900, 700)).page_count == 700
    assert scheduler_config(EngineSettings(max_num_seqs=4), MODEL, ranks(10**6)).page_count == 4 * 512 // 16
    assert scheduler_config(EngineSettings(num_blocks_override=33), MODEL, ranks(5)).page_count == 33


def test_the_model_length_is_lowered_to_the_cache_unless_it_was_asked_for() -> None:
    assert scheduler_config(EngineSettings(), MODEL, ranks(3)).max_model_len == 48
    with pytest.raises(SettingsError, match="holds 48 tokens, less than --max-model-len 100"):
        scheduler_config(EngineSettings(max_model_len=100), MODEL, ranks(3))


def test_synchronous_scheduling_is_a_pipeline_of_one() -> None:
    assert scheduler_config(EngineSettings(async_scheduling=False), MODEL, ranks(99)).pipeline_depth == 1


@pytest.mark.parametrize(
    ("changes", "depth", "microbatches"),
    [
        ({}, 2, 2), ({"pipeline_parallel_size": 4}, 4, 4), ({"pipeline_microbatches": 1}, 2, 1), ({"pipeline_microbatches": 3}, 3, 3),
        ({"async_scheduling": False}, 1, 1), ({"speculative_config": '{"method": "ngram"}'}, 2, 1),
    ],
)  # fmt: skip
def test_stages_have_a_microbatch_each(changes: dict[str, object], depth: int, microbatches: int) -> None:
    config = scheduler_config(EngineSettings(**{"pipeline_parallel_size": 2, **changes}), MODEL, ranks(99, 99))
    assert (config.pipeline_depth, config.microbatches) == (depth, microbatches)


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


# ---- layers with windows -----------------------------------------------------------------------------------------

# Three groups of layers: one sees everything, two see 32 tokens. A step computes at most 64.
HYBRID = ModelFacts(vocab_size=100, position_count_max=512, eos_token_ids=(2,), windows=(0, 32, 32))


def hybrid(page_count: int, **settings: object) -> SchedulerConfig:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4, **settings}
    return scheduler_config(EngineSettings(**settings), HYBRID, ranks(page_count))


def most_held(config: SchedulerConfig, length: int) -> int:
    """Pages that a request of `length` tokens holds at its worst: at any place, in a step of any size."""
    size, most = config.block_size, 0
    for computed in range(length):
        for end in range(computed + 1, min(length, computed + config.max_num_batched_tokens) + 1):
            kept = (max(0, computed - window + 1) // size if window else 0 for window in config.windows)
            most = max(most, sum(-(-end // size) - first for first in kept))
    return most


def test_a_full_batch_of_a_model_with_windows_needs_less_than_three_whole_caches() -> None:
    config = hybrid(10**6)
    assert config.windows == (0, 32, 32)
    assert config.page_count == 4 * pages_needed(config, 512) < 4 * 3 * (512 // 16)


@pytest.mark.parametrize("chunk", [16, 64, 100, 2048])
def test_a_request_of_the_model_s_length_fits_while_it_is_computed(chunk: int) -> None:
    """Against every step that could be; the bound is never too low, and at most a page a window too high."""
    config = hybrid(10**6, max_num_batched_tokens=chunk)
    for length in (1, 15, 16, 17, 63, 64, 65, 200):
        assert 0 <= pages_needed(config, length) - most_held(config, length) <= 2


def test_the_length_of_a_model_with_windows_is_what_its_pages_hold() -> None:
    for page_count in (3, 7, 20, 30, 41):
        config = hybrid(page_count)
        assert pages_needed(config, config.max_model_len) <= page_count
        assert config.max_model_len == 512 or pages_needed(config, config.max_model_len + 1) > page_count


def test_one_block_for_each_group_is_the_least() -> None:
    with pytest.raises(SettingsError, match="too small for one block of 1536 bytes"):
        hybrid(2)
    with pytest.raises(SettingsError, match="has 2 blocks, less than one for each of the model's 3 groups"):
        hybrid(99, num_blocks_override=2)
    assert hybrid(3).max_model_len == 16
    with pytest.raises(SettingsError, match="holds 16 tokens, less than --max-model-len 17"):
        hybrid(3, max_model_len=17)


def test_windows_of_no_layer_leave_the_plain_rule() -> None:
    model = ModelFacts(vocab_size=100, position_count_max=512, eos_token_ids=(2,), windows=(0, 0))
    config = scheduler_config(EngineSettings(), model, ranks(3))
    assert config.windows == () and config.max_model_len == 48


@pytest.mark.parametrize(("asked", "interval"), [(1024, 1024), (100, 112), (16, 16), (0, 0)])
def test_snapshots_stand_at_edges_of_blocks_as_often_as_asked(asked: int, interval: int) -> None:
    found = (replace(ranks(10**6)[0], state_bytes=4096),)
    config = scheduler_config(EngineSettings(snapshot_interval=asked, max_num_seqs=4), MODEL, found)
    held = 3 if interval else 1
    assert (config.snapshot_interval, config.takes_snapshots, config.state_pages) == (interval, interval > 0, 3 * held * 4)
    assert config.pinned_kv_fraction == 0.25


@pytest.mark.parametrize("drafts", [1, 4, 20])
def test_states_before_drafts_share_the_memory_of_states(drafts: int) -> None:
    """No more than half of the memory goes to both; the least that suffices is said and does."""
    settings = EngineSettings(max_num_seqs=4, speculative_config=f'{{"num_speculative_tokens": {drafts}, "row_cost": 0}}')

    def of(kib: int) -> SchedulerConfig:
        return scheduler_config(settings, MODEL, (replace(ranks(kib)[0], state_bytes=4096),))

    for pages in (500, 900, 10**6):
        config = of(pages)
        block_bytes = ranks(1)[0].block_bytes
        assert 0 < drafts_a_step(config) <= 4 * drafts and config.state_pages >= 4
        assert 2 * (config.state_pages + drafts_a_step(config)) * 4096 <= pages * block_bytes
    with pytest.raises(SettingsError, match="raise --kv-cache-memory to") as error:
        of(10)
    needed = int(str(error.value).rpartition(" to ")[2].split()[0])
    assert of(-(-needed // block_bytes)).state_pages == 4
