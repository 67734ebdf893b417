"""POST /v1/completions: continues one text or several.

Owns the translation of the body and the shapes of the answers; `generation` does the work in between.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import CHOICES_MAX, InvalidRequest, SamplingParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.logprobs import (
    check_experts,
    completion_logprobs,
    echoed_logprobs,
    experts_member,
    prompt_member,
    speller,
)
from vnext.server.answers.readers import Streamed, Whole, closing, event_ids, streamed
from vnext.server.answers.resuming import EventIds, call_of
from vnext.server.context.identity import client_of, identify
from vnext.server.context.openai_types import (
    CompletionBody,
    continuous_usage,
    include_usage,
    refuse_scored_stream,
    sampling_params,
)
from vnext.server.context.prompts import Prompt, prompts_of, tokens_of, with_suffix
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext
from vnext.server.http.bodies import read_body
from vnext.server.http.streaming import Events, frame_of
from vnext.text.answer import Delta

KIND = "text_completion"
USUAL_MAX_TOKENS = SamplingParams().max_tokens
"""Of an answer for which none are asked for: fewer where the context ends."""

_DECODER = msgspec.json.Decoder(CompletionBody)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """The view."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _DECODER, CompletionBody)
    started_s = time.monotonic()
    identify(request, body.request_id)
    call = call_of(request, "cmpl", body.stream)
    params = _params(body, context)
    include_usage(body)
    check_experts(body, context)
    prompts = prompts_of(body.prompt)
    client = client_of(request)
    _check_suffix(body)
    sampled = _sampled(body, params)
    context.limiter.check_inputs(len(prompts), "prompt")
    in_waves = len(prompts) > 1 and not body.use_beam_search
    with context.limiter.enter(len(prompts) * max(sampled.n, 1), client, in_waves):
        constraint = await context.constraint(body, client)
        count_max = context.prompt_tokens_max if body.truncate_prompt_tokens is None else context.listed_tokens_max
        if body.suffix:
            tokens = await with_suffix(context, prompts, body.suffix, body.add_special_tokens is not False, client)
        else:
            tokens = await tokens_of(context, prompts, body.add_special_tokens is not False, client, count_max=count_max)
        generation = generation_of(
            context, call=call, body=body, prompts=tokens, params=sampled, started_s=started_s, client=client,
            constraint=constraint, usual_max_tokens=USUAL_MAX_TOKENS,
        )
        echoed = prompts if body.truncate_prompt_tokens is None else generation.prompts
        texts = await _echoed(context, echoed, client) if body.echo else None
        renderers = [
            _ChoiceRenderer(context, choice, params, texts, body, generation.prompts[choice.prompt_index])
            for choice in generation.choices
        ]
        if body.stream:
            ids = event_ids(request, call, generation, body)
            return await streamed(request, partial(_stream, generation, renderers, body, ids), ids, include_usage(body))
        return web.json_response(body=msgspec.json.encode(await _complete(generation, renderers, params.n)))


def _check_suffix(body: CompletionBody) -> None:
    """Refuse what cannot go with a suffix: fields that read the prompt as one text."""
    if not body.suffix:
        return
    given = {"echo": body.echo, "truncate_prompt_tokens": body.truncate_prompt_tokens, "prompt_logprobs": body.prompt_logprobs}
    if wrong := [name for name, value in given.items() if value is not None and value is not False]:
        raise InvalidRequest(f"{wrong[0]} does not go with suffix: leave one of the two out.", wrong[0])


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
        self._tokenizer, self._scored, self._prompt_logprobs = context.tokenizer, prompt, body.prompt_logprobs
        self._echoes = bool(body.echo) and params.logprobs is not None
        self._counts_end = self._echoes
        self._with_ids, self._body = bool(body.return_token_ids), body
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
        if self._echoes:
            parts, self._echoes = self._choice.answer.prompt, False
            self.shown = echoed_logprobs(self._tokenizer, self._spell, self._scored, parts, self._logprobs)
        if self._logprobs is not None:
            more = completion_logprobs(self._spell, self._counted(delta), self._logprobs, self._prefix_length)
            self.shown = more if self.shown is None else {name: self.shown[name] + more[name] for name in more}
        self._ids += delta.token_ids
        self.texts.append(delta.text)
        self.finish, self.stop_reason = delta.finish or None, delta.stop_reason

    def _counted(self, delta: Delta) -> Delta:
        """After an echo, an end token has an entry too: who reads scores there takes off the last entry as the answer's."""
        if not self._counts_end or len(delta.tokens) == len(delta.token_ids):
            return delta
        return msgspec.structs.replace(delta, tokens=delta.token_ids, offsets=(*delta.offsets, self._choice.answer.length))

    def add(self, text: str) -> None:
        """Take in a plain answer's text."""
        self.texts.append(text)

    def take(self) -> list[dict[str, Any]]:
        """The part that has not been shown yet, as a choice; empty where there is none."""
        text, shown, ids, prompt = "".join(self.texts), self.shown, self._ids, self._prompt
        if not (text or self.finish or (shown and shown["tokens"]) or (self._with_ids and ids)):
            return []
        self.texts, self.shown, self._ids, self._prompt = [], None, [], None
        scored = prompt_member(self._tokenizer, self._scored, self._choice.answer.prompt, self._prompt_logprobs)
        with_ids = {"token_ids": ids, "prompt_token_ids": prompt} if self._with_ids else {}
        experts = experts_member(self._choice.answer, len(self._scored), self._body)
        return [self.text_choice(text) | {"logprobs": shown} | with_ids | scored | experts]

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


async def _stream(
    generation: Generation, renderers: list[_ChoiceRenderer], body: CompletionBody, ids: EventIds | None, events: Events
) -> None:
    usage = generation.chunk_usage(body)
    await generation.answer(Streamed(events, renderers, lambda choices: generation.envelope(KIND, choices) | usage(), ids), ids)
    if include_usage(body):
        events.send(*closing(ids, frame_of(generation.envelope(KIND, []) | {"usage": generation.usage()})))


def _params(body: CompletionBody, context: ServerContext) -> SamplingParams:
    refuse_scored_stream(body)
    given = {} if body.logprobs is None else {"logprobs": body.logprobs}
    params = sampling_params(body, **context.settings.sampling_defaults.sampling(), **given)
    if body.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=None)
    if not body.echo or (body.logprobs is None and params.max_tokens != 0):
        return params
    if body.use_beam_search:
        raise InvalidRequest("use_beam_search cannot be combined with echo and logprobs: leave one out.", "use_beam_search")
    return msgspec.structs.replace(params, prompt_logprobs=max(body.logprobs or 0, params.prompt_logprobs or 0))


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


async def _echoed(context: ServerContext, prompts: list[Prompt], client: str) -> list[str]:
    return prompts if isinstance(prompts[0], str) else await context.decode(prompts, client)
