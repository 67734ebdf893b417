"""POST /v1/completions: a text, or several, is continued.

Owns the translation of that body and the shapes of its answers. What happens in between is `generation`'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from vnext.sampling_params import InvalidRequest, SamplingParams
from vnext.server.edge import EDGE, Edge
from vnext.server.generation import Choice, Generation
from vnext.server.logprobs import completion_logprobs
from vnext.server.openai_types import (
    UNSUPPORTED,
    CompletionBody,
    decode_completion,
    include_usage,
    refuse_unsupported,
    sampling_params,
)
from vnext.server.streaming import respond
from vnext.server.text.answer import Delta

_UNSUPPORTED = (*UNSUPPORTED, "suffix")
KIND = "text_completion"

Prompt = str | list[int]


async def create_completion(request: web.Request) -> web.StreamResponse:
    """The view."""
    edge = request.app[EDGE]
    data = await request.read()
    started_s = time.monotonic()
    body = decode_completion(data)
    params = _params(body, edge)
    with_usage = include_usage(body)
    prompts = _prompts(body)
    with edge.gate.enter(len(prompts) * max(params.n, 1)):
        tokens = [await _encode(edge, prompt, place, body) for place, prompt in enumerate(prompts)]
        generation = Generation(edge, kind="cmpl", body=body, prompts=tokens, params=params, started_s=started_s)
        texts = _echoed(edge, prompts) if body.echo else None
        with_ids = bool(body.return_token_ids)
        views = [_View(edge, choice, params, texts, with_ids) for choice in generation.choices]
        if body.stream:
            return await respond(request, _chunks(generation, views, with_usage))
        return web.json_response(body=msgspec.json.encode(await _complete(generation, views)))


class _View:
    """One choice in this API's shape: what is still to be shown of it, at first the echoed prompt."""

    def __init__(
        self, edge: Edge, choice: Choice, params: SamplingParams, echoed: list[str] | None, with_ids: bool
    ) -> None:
        self._edge = edge
        self._choice = choice
        self._logprobs = params.logprobs
        self._with_ids = with_ids
        self._ids: list[int] = []
        prefix = echoed[choice.prompt_index] if echoed else ""
        self._prefix_length = len(prefix)
        self.texts = [prefix]
        self.shown: dict[str, list[Any]] | None = None
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, delta: Delta) -> None:
        """Add to what is to be shown."""
        if self._logprobs is not None:
            more = completion_logprobs(self._edge.tokenizer, delta, self._logprobs, self._prefix_length)
            self.shown = more if self.shown is None else {name: self.shown[name] + more[name] for name in more}
        self._ids += delta.tokens
        self.texts.append(delta.text)
        self.finish, self.stop_reason = delta.finish or None, delta.stop_reason

    def take(self) -> dict[str, Any] | None:
        """What is to be shown and was not yet, as a choice; None when there is nothing."""
        text, shown, ids = "".join(self.texts), self.shown, {"token_ids": self._ids} if self._with_ids else {}
        self.texts, self.shown, self._ids = [], None, []
        if not (text or self.finish or (shown and shown["tokens"]) or ids.get("token_ids")):
            return None
        return {
            "index": self._choice.index,
            "text": text,
            "logprobs": shown,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
            **ids,
        }


async def _complete(generation: Generation, views: list[_View]) -> dict[str, Any]:
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            views[choice.index].push(delta)
    return generation.envelope(KIND, [view.take() for view in views]) | {"usage": generation.usage()}


async def _chunks(
    generation: Generation, views: list[_View], with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    usage = {"usage": None} if with_usage else {}
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            views[choice.index].push(delta)
            if (shown := views[choice.index].take()) is not None:
                yield generation.envelope(KIND, [shown]) | usage
    if with_usage:
        yield generation.envelope(KIND, []) | {"usage": generation.usage()}


def _params(body: CompletionBody, edge: Edge) -> SamplingParams:
    refuse_unsupported(body, _UNSUPPORTED)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(f"best_of is {body.best_of}: only the value of n is supported, leave it out.", "best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo cannot be combined with logprobs: prompts are not scored, leave one out.", "echo")
    given = {} if body.logprobs is None else {"logprobs": body.logprobs}
    return sampling_params(body, **edge.settings.sampling_defaults.sampling(), **given)


def _prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts, one or many. Raises InvalidRequest for an empty or a mixed list."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list: give a text, a list of tokens, or a list of either.", "prompt")
    kinds = {type(entry) for entry in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("prompt mixes texts, tokens and lists: all its entries must be of one kind.", "prompt")
    return [prompt] if kinds == {int} else prompt


async def _encode(edge: Edge, prompt: Prompt, place: int, body: CompletionBody) -> list[int]:
    """Token ids of one prompt, which must not be empty."""
    param = f"prompt[{place}]" if len(body.prompt) > 1 and not isinstance(body.prompt[0], int) else "prompt"
    if isinstance(prompt, str):
        tokens = await edge.encode(prompt, body.add_special_tokens is not False)
    else:
        edge.check_tokens(prompt, param)
        tokens = prompt
    if not tokens:
        raise InvalidRequest(f"{param} is empty: send at least one token.", param)
    return tokens


def _echoed(edge: Edge, prompts: list[Prompt]) -> list[str]:
    return [prompt if isinstance(prompt, str) else edge.tokenizer.decode(prompt) for prompt in prompts]
