"""Sizing: from settings, the model and the ranks' memory to the configuration that decisions depend on.

Pure. Owns the defaults that depend on the model, and rejects settings that cannot work, with one sentence each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from vnext.runtime.protocol.messages import ModelFacts, RankReady
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.runtime.protocol.speculation import speculation_of
from vnext.sched.policies import PolicyError, policy_of
from vnext.state.config import MEASURED, UNIT_SPAN, SchedulerConfig
from vnext.state.drafting import drafts_a_step
from vnext.state.recurrent import pages_held
from vnext.state.windows import pages_needed

ASYNC_DEPTH = 2
INPUTS_A_STEP = 1
"""Streams wait at most for the encoder's work on one tile of an image, or one sound."""
INPUT_TOKENS = 8
"""Of inputs beside requests that decode, and as much encoding. A step of few such requests, which reads all weights, takes as long
as the products of twenty tokens or more, and becomes about half as long again. Who listens is read when all is heard: whole."""
STATES_PER_ROW = 3
"""State pages for each that a full batch holds; the others are for snapshots that nobody holds."""


def scheduler_config(settings: EngineSettings, model: ModelFacts, ranks: Sequence[RankReady]) -> SchedulerConfig:
    """The engine's bounds. Raises SettingsError."""
    bounds = _bounds(settings, model, ranks[0].environment.get("device", "cpu") != "cpu")
    if bounds.speculation is not None and bounds.speculation.row_cost == MEASURED:
        row_cost, step_cost, many = ranks[0].draft_costs
        costs = replace(bounds.speculation, row_cost=row_cost, step_cost=step_cost, row_cost_many=many)
        bounds = replace(bounds, speculation=costs)
    if ranks[0].state_bytes:
        bounds = with_states(settings, bounds, ranks)
    bounds = replace(bounds, page_count=cache_blocks(settings, bounds, ranks))
    length = fitting_length(settings, bounds)
    if not settings.enable_chunked_prefill and bounds.max_num_batched_tokens < length:
        raise SettingsError(
            f"--max-num-batched-tokens is {bounds.max_num_batched_tokens}, less than the model length {length}, and "
            "chunked prefill is off: raise it or lower --max-model-len"
        )
    return replace(bounds, max_model_len=length)


def _bounds(settings: EngineSettings, model: ModelFacts, on_gpu: bool) -> SchedulerConfig:
    """The bounds before the memory is known: the longest model length allowed, and no cache. A step of whole prompts has room for
    the longest."""
    parts, length = microbatches(settings), model_length(settings, model)
    chunked, cached = (
        is_on and not model.whole_prompts for is_on in (settings.enable_chunked_prefill, settings.enable_prefix_caching)
    )
    encodes, limit = model.reads_inputs and chunked, settings.input_tokens
    limit = (0 if model.listens else INPUT_TOKENS) if limit is None else limit
    return SchedulerConfig(
        block_size=settings.block_size,
        page_count=0,
        max_num_batched_tokens=max(settings.step_tokens(on_gpu), length * model.whole_prompts),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=length,
        long_prefill_token_threshold=settings.long_prefill_token_threshold if chunked else 0,
        prefix_caching=cached,
        chunked_prefill=chunked,
        pipeline_depth=max(ASYNC_DEPTH, settings.pipeline_parallel_size, parts) if settings.async_scheduling else 1,
        policy=settings.scheduling_policy,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        digest_interval=settings.digest_interval,
        windows=windows_of(settings, model),
        guidance=settings.enable_guidance,
        guided_hits=settings.enable_guidance,
        speculation=speculation_of(settings.speculative_config),
        max_loras=settings.max_loras if settings.enable_lora else 0,
        pinned_kv_fraction=settings.pinned_kv_fraction if cached else 0.0,
        microbatches=parts,
        inputs_a_step=INPUTS_A_STEP if encodes else 0,
        input_units=ceil(model.input_cost * UNIT_SPAN / limit) if encodes and limit else 0,
        input_tokens=limit if encodes and not model.mutual_inputs else 0,
        counts_alone=False,
        grids=model.grids,
    )


def windows_of(settings: EngineSettings, model: ModelFacts) -> tuple[int, ...]:
    """Those of the groups of layers, and of the same for unconditional halves, which are behind their requests and lose no page."""
    if settings.enable_guidance:
        return *model.windows, *(0 for _ in model.windows)
    return model.windows if any(model.windows) else ()


def with_states(settings: EngineSettings, bounds: SchedulerConfig, ranks: Sequence[RankReady]) -> SchedulerConfig:
    """The bounds with pages for the states of recurrent layers: what a full batch holds and as many snapshots and more, in half of
    the cache's memory at most. Raises SettingsError."""
    if not settings.enable_chunked_prefill:
        raise SettingsError("chunked prefill is off and the model has recurrent layers, whose snapshots cut prompts: leave it on")
    hands_over = settings.role != "both" or settings.prefill_engines
    if (settings.kv_disk_dir or hands_over) and not settings.snapshot_interval:
        who = "a hand-over" if hands_over else "--kv-disk-dir"
        raise SettingsError(f"{who} needs snapshots of recurrent layers, and --snapshot-interval 0 makes none: leave it out")
    interval = -(-settings.snapshot_interval // settings.block_size) * settings.block_size
    bounds = replace(bounds, microbatches=1, snapshot_interval=interval, state_pages=1)
    held, few = pages_held(bounds), bounds.speculation.num_speculative_tokens if bounds.speculation else 0
    least = held + bounds.takes_snapshots
    fitting = min(rank.page_count_max * rank.block_bytes // 2 // rank.state_bytes for rank in ranks)
    fitting = min(fitting - few, fitting * 4 // 5) if few else fitting  # what drafts_a_step takes beside
    if fitting < least:
        needed = 2 * (least + few) * max(rank.state_bytes for rank in ranks)
        raise SettingsError(
            f"the cache's memory is too small for one request's {least} pages of recurrent states: raise --kv-cache-memory to "
            f"{needed} bytes"
        )
    return replace(bounds, state_pages=max(least, min(fitting, STATES_PER_ROW * held * settings.max_num_seqs)))


def microbatches(settings: EngineSettings) -> int:
    """The parts of the requests that decode. With drafts, which follow from the tokens before, every step waits for those: one."""
    if not settings.async_scheduling or settings.speculative_config:
        return 1
    return settings.pipeline_microbatches or settings.pipeline_parallel_size


def require_policy(settings: EngineSettings) -> None:
    """Find and try the scheduling policy, before a model is loaded. Raises SettingsError."""
    try:
        policy_of(settings.scheduling_policy)
    except PolicyError as error:
        raise SettingsError(str(error)) from error


def model_length(settings: EngineSettings, model: ModelFacts) -> int:
    """Tokens that a request may have, before the cache size is known."""
    if settings.max_model_len is None:
        return model.position_count_max
    if settings.max_model_len > model.position_count_max:
        raise SettingsError(
            f"--max-model-len is {settings.max_model_len}, more than the {model.position_count_max} positions the model "
            f"was trained for: ask for at most {model.position_count_max}"
        )
    return settings.max_model_len


def cache_blocks(settings: EngineSettings, bounds: SchedulerConfig, ranks: Sequence[RankReady]) -> int:
    """Pages of the cache: as many as fit into the smallest rank's memory, and no more than a full batch could ever use."""
    if settings.num_blocks_override is not None:
        return settings.num_blocks_override
    drafts = drafts_a_step(bounds) if bounds.state_pages else 0
    fitting = min(rank.page_count_max - -(-(bounds.state_pages + drafts) * rank.state_bytes // rank.block_bytes) for rank in ranks)
    if fitting < bounds.group_count:
        block_bytes = max(rank.block_bytes for rank in ranks) * bounds.group_count
        raise SettingsError(
            f"the cache's memory is too small for one block of {block_bytes} bytes: raise --kv-cache-memory "
            "or lower --block-size"
        )
    return min(fitting, settings.max_num_seqs * pages_needed(bounds, bounds.max_model_len))


def fitting_length(settings: EngineSettings, bounds: SchedulerConfig) -> int:
    """The model length, lowered to what the cache holds of one request unless the user set it."""
    capacity = length_that_fits(bounds)
    if settings.max_model_len is not None and capacity < settings.max_model_len:
        raise SettingsError(
            f"the cache holds {capacity} tokens, less than --max-model-len {settings.max_model_len}: raise "
            "--kv-cache-memory or --num-blocks-override, or lower --max-model-len"
        )
    if capacity == 0:
        raise SettingsError(
            f"the cache has {bounds.page_count} blocks, less than one for each of the model's {bounds.group_count} groups of "
            "layers: raise --num-blocks-override"
        )
    return min(bounds.max_model_len, capacity)


def length_that_fits(bounds: SchedulerConfig) -> int:
    """Tokens that a request may have computed, alone in the cache; with windows, at most the model's length."""
    if not bounds.windows:
        return bounds.page_count * bounds.block_size
    lengths = range(1, bounds.max_model_len + 1)
    return bisect_right(lengths, bounds.page_count, key=lambda length: pages_needed(bounds, length))
