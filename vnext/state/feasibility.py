"""Feasibility: a request that could never be served is refused at arrival, before it becomes an event.

The reducer asserts the same function, so a log cannot hold such a request either.
"""

from __future__ import annotations

from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestArrived, generated_by, unpack_tokens
from vnext.state.params import NO_LOGPROBS, NO_POOLING, RETENTION_MAX_S, WEIGHT_MAX, Guidance, Sampling
from vnext.state.store.inputs import are_whole, has_inputs, inputs_in, rows_of
from vnext.state.windows import pages_needed


def refusal(config: SchedulerConfig, arrival: RequestArrived) -> str | None:
    """One sentence that says why this request can never be served, or None."""
    prompt, wanted = len(arrival.prompt) // 4, arrival.sampling.max_tokens
    if prompt == 0 or len(arrival.prompt) % 4:
        return "the prompt is empty: send at least one token"
    if wanted < 1:
        return f"max_tokens is {wanted}: ask for at least 1"
    if not 1 <= arrival.weight <= WEIGHT_MAX:
        return f"the weight is {arrival.weight}: it must be 1 to {WEIGHT_MAX}"
    if has_inputs(arrival.prompt) and (why_not := _inputs_refusal(config, arrival)):
        return why_not
    if prompt + wanted > config.max_model_len:
        return (
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, together more than the model's "
            f"{config.max_model_len}: shorten the prompt or ask for at most {max(config.max_model_len - prompt, 0)} tokens"
        )
    if (generated := generated_by(arrival)) and (why_not := _has_ended(config, arrival.sampling, generated)):
        return why_not
    for tokens, seconds in arrival.sampling.retention:
        if tokens < 0 or not 0 < seconds <= RETENTION_MAX_S:
            unkept = f"{tokens} tokens are to stay in the cache for {seconds} s"
            return f"{unkept}: ask for 0 or more tokens and 1 to {RETENTION_MAX_S} s"
    if arrival.sampling.adapter and not config.max_loras:
        return "the request names an adapter and this engine serves none: start it with --enable-lora"
    if (guidance := arrival.sampling.guidance) and (why_not := _guidance_refusal(config, arrival, guidance)):
        return why_not
    if pages_needed(config, prompt + wanted - 1) > config.page_count:
        return _too_large(config, prompt, wanted)
    if not config.chunked_prefill and prompt + wanted - 1 > config.max_num_batched_tokens:
        return (
            f"the request may reach {prompt + wanted} tokens, more than the {config.max_num_batched_tokens} of one step, and "
            "chunked prefill is off: shorten it, raise --max-num-batched-tokens or switch chunked prefill on"
        )
    return None


def _has_ended(config: SchedulerConfig, sampling: Sampling, generated: bytes) -> str | None:
    """Why a request resumed behind these tokens has nothing left to be asked for; None for one that has."""
    count, last = len(generated) // 4, int.from_bytes(generated[-4:], "little", signed=True)
    if len(generated) % 4 or count >= sampling.max_tokens:
        return f"the request has {count} tokens already and max_tokens is {sampling.max_tokens}: it has ended"
    ends = last in sampling.stop_token_ids or (last in config.eos_token_ids and not sampling.ignore_eos)
    return f"the request has ended with token {last}" if ends and count > sampling.min_tokens else None


def _inputs_refusal(config: SchedulerConfig, arrival: RequestArrived) -> str | None:
    """Why a prompt with tokens below 0 is refused; None if it is not."""
    tokens = unpack_tokens(arrival.prompt)
    if not are_whole(tokens):
        return f"token id {tokens.min()} is below 0: give images as images, not as tokens"
    for _, length, digest in inputs_in(tokens) if config.grids else ():
        if (rows := rows_of(digest)) and length % rows:
            return f"an image of the prompt has {length} tokens, which are not {rows} rows: give images as images, not as tokens"
    if arrival.sampling.prompt_logprobs != NO_LOGPROBS:
        return "prompt_logprobs does not go with images: leave one of them out"
    return None


def _guidance_refusal(config: SchedulerConfig, arrival: RequestArrived, guidance: Guidance) -> str | None:
    count, length, sampling = len(guidance.beside) // 4, len(arrival.prompt) // 4, arrival.sampling
    if not config.guidance:
        return "the request asks for guidance and this engine gives none: start it with --enable-guidance"
    if len(guidance.beside) % 4 or not 0 < count <= length:
        beside, own = ("prompt", "negative prompt") if guidance.is_prompt else ("negative prompt", "prompt")
        return f"the {beside} has {count} tokens and the {own} {length}: give it at least one and no more than those"
    if guidance.is_prompt and (has_inputs(guidance.beside) or sampling.prompt_logprobs != NO_LOGPROBS):
        what = "prompt_logprobs do" if sampling.prompt_logprobs != NO_LOGPROBS else "an image does"
        return f"{what} not go with a negative prompt that is longer than the prompt: shorten it"
    return "an embedding has no guidance: leave one of the two out" if sampling.pooling != NO_POOLING else None


def _too_large(config: SchedulerConfig, prompt: int, wanted: int) -> str:
    if not config.windows:
        capacity = config.page_count * config.block_size
        return (
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, more than the cache's {capacity}: "
            "shorten the request or start the engine with a larger cache"
        )
    pages = pages_needed(config, prompt + wanted - 1)
    return (
        f"the prompt has {prompt} tokens and max_tokens is {wanted}, which may take {pages} blocks at once where the cache has "
        f"{config.page_count}: shorten the request, lower --max-num-batched-tokens or start the engine with a larger cache"
    )
