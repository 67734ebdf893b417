"""POST /v1/completions: continues one text or several.

Owns the translation of the body and the shapes of the answers; `generation` does the work in between.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from vnext.sampling_params import CHOICES_MAX, InvalidRequest, SamplingParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.logprobs import completion_logprobs, speller
from vnext.server.answers.readers import Streamed, Whole
from vnext.server.context.identity import answer_id, identify
from vnext.server.context.openai_types import CompletionBody, continuous_usage, include_usage, sampling_params
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, client_of
from vnext.server.http.bodies import read_body
from vnext.server.http.streaming import Events, frame_of, respond
from vnext.text.answer import Delta

KIND = "text_completion"

Prompt = str | list[int]

_DECODER = msgspec.json.Decoder(CompletionBody)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """The view."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _DECODER, CompletionBody)
    started_s = time.monotonic()
    identify(request, body.request_id)
    call_id = answer_id(request, "cmpl")
    params = _params(body, context)
    include_usage(body)
    prompts = _prompts(body)
    client = client_of(request)
    sampled = _sampled(body, params)
    with context.limiter.enter(len(prompts) * max(sampled.n, 1), client):
        constraint = await context.constraint(body, client)
        tokens = await _tokens(context, prompts, body, client)
        generation = generation_of(
            context, call_id=call_id, body=body, prompts=tokens, params=sampled, started_s=started_s, constraint=constraint
        )
        echoed = prompts if body.truncate_prompt_tokens is None else generation.prompts
        texts = await _echoed(context, echoed, client) if body.echo else None
        renderers = [
            _ChoiceRenderer(context, choice, params, texts, body, generation.prompts[choice.prompt_index])
            for choice in generation.choices
        ]
        if body.stream:
            return await respond(request, partial(_stream, generation, renderers, body))
        return web.json_response(body=msgspec.json.encode(await _complete(generation, renderers, params.n)))


class _ChoiceRenderer:
    """Renders one choice in this API's shape. Holds the part that is not shown yet, at first the echoed prompt."""

    def __init__(
        self,
        context: ServerContext,
        choice: Choice,
        params: SamplingParams,
        echoed: list[str] | None,
        body: CompletionBody,
        prompt: list[int],
    ) -> None:
        self._spell = speller(context.tokenizer, body.return_tokens_as_token_ids)
        self._choice = choice
        self._logprobs = params.logprobs
        self._with_ids = bool(body.return_token_ids)
        self.is_plain = params.logprobs is None and not self._with_ids and not continuous_usage(body)
        self._prompt: list[int] | None = prompt
        self._ids: list[int] = []
        prefix = echoed[choice.prompt_index] if echoed else ""
        self._prefix_length = len(prefix)
        self.texts = [prefix]
        self.shown: dict[str, list[Any]] | None = None
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, delta: Delta) -> None:
        """Take in a delta."""
        if self._logprobs is not None:
            more = completion_logprobs(self._spell, delta, self._logprobs, self._prefix_length)
            self.shown = more if self.shown is None else {name: self.shown[name] + more[name] for name in more}
        self._ids += delta.token_ids
        self.texts.append(delta.text)
        self.finish, self.stop_reason = delta.finish or None, delta.stop_reason

    def add(self, text: str) -> None:
        """Take in a plain answer's text."""
        self.texts.append(text)

    def take(self) -> list[dict[str, Any]]:
        """The part that has not been shown yet, as a choice; empty where there is none."""
        text, shown, ids, prompt = "".join(self.texts), self.shown, self._ids, self._prompt
        if not (text or self.finish or (shown and shown["tokens"]) or (self._with_ids and ids)):
            return []
        self.texts, self.shown, self._ids, self._prompt = [], None, [], None
        with_ids = {"token_ids": ids, "prompt_token_ids": prompt} if self._with_ids else {}
        return [self.text_choice(text) | {"logprobs": shown} | with_ids]

    def text_choice(self, text: str) -> dict[str, Any]:
        """A stream's choice with `text`, in the middle of a plain answer."""
        return {
            "index": self._choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
        }


async def _complete(generation: Generation, renderers: list[_ChoiceRenderer], count: int) -> dict[str, Any]:
    """The `count` best answers to each prompt."""
    await generation.answer(Whole(generation.choices, renderers))
    shown = enumerate(generation.best(count))
    choices = [renderers[choice.index].take()[0] | {"index": index} for index, choice in shown]
    return generation.envelope(KIND, choices) | {"usage": generation.usage()}


async def _stream(generation: Generation, renderers: list[_ChoiceRenderer], body: CompletionBody, events: Events) -> None:
    usage = generation.chunk_usage(body)
    await generation.answer(Streamed(events, renderers, lambda choices: generation.envelope(KIND, choices) | usage()))
    if include_usage(body):
        events.send(frame_of(generation.envelope(KIND, []) | {"usage": generation.usage()}))


def _params(body: CompletionBody, context: ServerContext) -> SamplingParams:
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo cannot be combined with logprobs: prompts are not scored, leave one out.", "echo")
    given = {} if body.logprobs is None else {"logprobs": body.logprobs}
    return sampling_params(body, **context.settings.sampling_defaults.sampling(), **given)


def _sampled(body: CompletionBody, params: SamplingParams) -> SamplingParams:
    """The parameters that sample `best_of` answers, of which the likeliest n are shown. Raises InvalidRequest."""
    if body.best_of in (None, params.n):
        return params
    if not params.n <= body.best_of <= CHOICES_MAX:
        bounds = f"it must lie between n, which is {params.n}, and {CHOICES_MAX}"
        raise InvalidRequest(f"best_of is {body.best_of}: {bounds}.", "best_of")
    if body.stream or body.use_beam_search:
        raise InvalidRequest("best_of chooses among whole answers: leave out stream and use_beam_search.", "best_of")
    return msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)


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


async def _tokens(context: ServerContext, prompts: list[Prompt], body: CompletionBody, client: str) -> list[list[int]]:
    """Token ids of each prompt, none of which may be empty."""
    count_max = context.prompt_tokens_max if body.truncate_prompt_tokens is None else context.listed_tokens_max
    params = ["prompt"] if len(prompts) == 1 else [f"prompt[{place}]" for place in range(len(prompts))]
    if isinstance(prompts[0], str):
        tokens = await context.encode(prompts, body.add_special_tokens is not False, client, params, count_max=count_max)
    else:
        tokens = prompts
        for prompt, param in zip(prompts, params):
            context.check_tokens(prompt, param, count_max)
            await asyncio.sleep(0)  # let other tasks run
    if [] in tokens:
        param = params[tokens.index([])]
        raise InvalidRequest(f"{param} is empty: send at least one token.", param)
    return tokens


async def _echoed(context: ServerContext, prompts: list[Prompt], client: str) -> list[str]:
    return prompts if isinstance(prompts[0], str) else await context.decode(prompts, client)
