"""Sizing: from settings, the model and the ranks' memory to the configuration that decisions depend on.

Pure. Owns the defaults that depend on the model and the refusals of what cannot work, one sentence each.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnext.runtime.messages import ModelFacts, RankReady
from vnext.runtime.settings import EngineSettings, SettingsError
from vnext.sched.policies import PolicyError, policy_of
from vnext.state.config import SchedulerConfig
from vnext.state.state import blocks_for

ASYNC_DEPTH = 2


def scheduler_config(settings: EngineSettings, model: ModelFacts, ranks: Sequence[RankReady]) -> SchedulerConfig:
    """The engine's bounds. Raises SettingsError."""
    wanted = model_length(settings, model)
    block_count = cache_blocks(settings, wanted, ranks)
    length = fitting_length(settings, wanted, block_count)
    if not settings.enable_chunked_prefill and settings.max_num_batched_tokens < length:
        raise SettingsError(
            f"--max-num-batched-tokens is {settings.max_num_batched_tokens}, less than the model length {length}, and "
            "chunked prefill is off: raise it or lower --max-model-len"
        )
    return SchedulerConfig(
        block_size=settings.block_size,
        block_count=block_count,
        batch_tokens_max=settings.max_num_batched_tokens,
        running_max=settings.max_num_seqs,
        model_len_max=length,
        prefill_threshold=settings.long_prefill_token_threshold if settings.enable_chunked_prefill else 0,
        prefix_caching=settings.enable_prefix_caching,
        chunked_prefill=settings.enable_chunked_prefill,
        pipeline_depth=ASYNC_DEPTH if settings.async_scheduling else 1,
        policy=settings.scheduling_policy,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        digest_interval=settings.digest_interval,
    )


def require_policy(settings: EngineSettings) -> None:
    """Find and try the scheduling policy, before a model is loaded. Raises SettingsError."""
    try:
        policy_of(settings.scheduling_policy)
    except PolicyError as error:
        raise SettingsError(str(error)) from error


def model_length(settings: EngineSettings, model: ModelFacts) -> int:
    """Tokens a request may have, before the cache is looked at."""
    if settings.max_model_len is None:
        return model.position_count_max
    if settings.max_model_len > model.position_count_max:
        raise SettingsError(
            f"--max-model-len is {settings.max_model_len}, more than the {model.position_count_max} positions the model "
            f"was trained for: ask for at most {model.position_count_max}"
        )
    return settings.max_model_len


def cache_blocks(settings: EngineSettings, length: int, ranks: Sequence[RankReady]) -> int:
    """Blocks of the cache: what fits into the smallest memory, and no more than a full batch could ever use."""
    if settings.num_blocks_override is not None:
        return settings.num_blocks_override
    fitting = min(rank.block_count_max for rank in ranks)
    if fitting < 1:
        block_bytes = max(rank.block_bytes for rank in ranks)
        raise SettingsError(
            f"the cache's memory is too small for one block of {block_bytes} bytes: raise --kv-cache-memory "
            "or lower --block-size"
        )
    return min(fitting, settings.max_num_seqs * blocks_for(length, settings.block_size))


def fitting_length(settings: EngineSettings, length: int, block_count: int) -> int:
    """The model length, lowered to the cache where the user did not ask for it."""
    capacity = block_count * settings.block_size
    if settings.max_model_len is not None and capacity < settings.max_model_len:
        raise SettingsError(
            f"the cache holds {capacity} tokens, less than --max-model-len {settings.max_model_len}: raise "
            "--kv-cache-memory or --num-blocks-override, or lower --max-model-len"
        )
    return min(length, capacity)
