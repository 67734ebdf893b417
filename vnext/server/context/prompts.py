"""Prompts: texts and lists of tokens as OpenAI's API takes them, one or many, and their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.server_context import ServerContext

Prompt = str | list[int]


def prompts_of(given: str | Sequence[str | int | list[int]], name: str = "prompt") -> list[Prompt]:
    """The prompts of the field `name`, one or many. Raises InvalidRequest for an empty or a mixed list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{name} is an empty list: give a text, a list of tokens, or a list of either.", name)
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise InvalidRequest(f"{name} mixes texts, tokens and lists: all its entries must be of one kind.", name)
    return [cast(list[int], given)] if kinds == {int} else cast(list[Prompt], given)


def params_of(name: str, count: int) -> list[str]:
    """The names of a field's entries; a single one has the field's."""
    return [name] if count == 1 else [f"{name}[{place}]" for place in range(count)]


async def with_suffix(
    context: ServerContext, prompts: list[Prompt], suffix: str, add_special_tokens: bool, client: str
) -> list[list[int]]:
    """The tokens of each prompt with the suffix behind its answer, as the model's own tokens for a gap say. Raises InvalidRequest
    where it has none, and as `tokens_of` does."""
    infill = context.infill
    if infill is None:
        message = "suffix needs a model with tokens for a gap, such as <|fim_prefix|>, and this one has none: leave it out."
        raise InvalidRequest(message, "suffix")
    begin = context.tokenizer.encode("") if add_special_tokens else []
    (behind,) = await context.encode([suffix], False, client, ["suffix"], "suffix", 0)
    return [infill.joined(begin, before, behind) for before in await tokens_of(context, prompts, False, client)]


async def tokens_of(
    context: ServerContext,
    prompts: list[Prompt],
    add_special_tokens: bool,
    client: str,
    name: str = "prompt",
    count_max: int = 0,
) -> list[list[int]]:
    """Token ids of each prompt of the field `name`, none of which may be empty. Raises InvalidRequest, Overloaded."""
    params = params_of(name, len(prompts))
    if isinstance(prompts[0], str):
        tokens = await context.encode(cast(list[str], prompts), add_special_tokens, client, params, name, count_max)
    else:
        tokens = cast(list[list[int]], prompts)
        for place, (prompt, param) in enumerate(zip(tokens, params)):
            if place:
                await asyncio.sleep(0)  # let other tasks run
            context.check_tokens(prompt, param, count_max or context.bounds.prompt_tokens_max)
    if [] in tokens:
        param = params[tokens.index([])]
        raise InvalidRequest(f"{param} is empty: send at least one token.", param)
    return tokens
