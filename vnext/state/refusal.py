"""Refusals: what no amount of waiting could serve is said at arrival, before it becomes an event.

The reducer asserts the same function, so a log cannot hold such a request either.
"""

from __future__ import annotations

from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestArrived
from vnext.state.windows import pages_needed


def refusal(config: SchedulerConfig, arrival: RequestArrived) -> str | None:
    """One sentence why this request can never be served, or None."""
    prompt, wanted = len(arrival.prompt) // 4, arrival.sampling.max_tokens
    if prompt == 0 or len(arrival.prompt) % 4:
        return "the prompt is empty: send at least one token"
    if wanted < 1:
        return f"max_tokens is {wanted}: ask for at least 1"
    if prompt + wanted > config.model_len_max:
        return (
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, together more than the model's "
            f"{config.model_len_max}: shorten the prompt or ask for at most {max(config.model_len_max - prompt, 0)} tokens"
        )
    if pages_needed(config, prompt + wanted - 1) > config.block_count:
        return _too_large(config, prompt, wanted)
    if not config.chunked_prefill and prompt + wanted - 1 > config.batch_tokens_max:
        return (
            f"the request may reach {prompt + wanted} tokens, more than the {config.batch_tokens_max} of one step, and "
            "chunked prefill is off: shorten it, raise --max-num-batched-tokens or switch chunked prefill on"
        )
    return None


def _too_large(config: SchedulerConfig, prompt: int, wanted: int) -> str:
    if not config.windows:
        capacity = config.block_count * config.block_size
        return (
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, more than the cache's {capacity}: "
            "shorten the request or start the engine with a larger cache"
        )
    pages = pages_needed(config, prompt + wanted - 1)
    return (
        f"the prompt has {prompt} tokens and max_tokens is {wanted}, which may take {pages} blocks at once where the cache has "
        f"{config.block_count}: shorten the request, lower --max-num-batched-tokens or start the engine with a larger cache"
    )
