"""POST /v1/completions: continues one text or several.

Owns the translation of the body and the shapes of the answers; `generation` does the work in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import CHOICES_MAX, InvalidRequest, SamplingParams, UncheckedParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.logprobs import completion_logprobs, echoed_logprobs, experts_member, named_prompt_logprobs, speller
from vnext.server.answers.writing import ChunkWriter, Json
from vnext.server.call import SHARED, Call, Checks, admit, sampling_params
from vnext.server.context.openai_types import NO_USAGE, CompletionBody, usage_shown
from vnext.server.context.prompts import prompts_of, tokens_of, with_suffix
from vnext.server.context.server_context import ServerContext
from vnext.text.answer import Delta

KIND = "text_completion"
USUAL_MAX_TOKENS = SamplingParams().max_tokens
"""Of an answer for which none are asked for: fewer where the context ends."""

_DECODER = msgspec.json.Decoder(CompletionBody)


async def create_completion(request: web.Request) -> web.StreamResponse:
    call = await admit(request, "cmpl", _DECODER)
    asked = CompletionRequest(call)
    with call.context.limiter.enter(asked.answer_count, call.client, asked.in_waves):
        generation = generation_of(await asked.read())
        echoed = await asked.echoed(generation) if call.body.echo else None
        return await CompletionWriter(generation, asked.params, echoed).write()


class CompletionRequest:
    """What a body asks for. `params`: of the answers that are shown; `best_of` samples more."""

    def __init__(self, call: Call) -> None:
        """Raises InvalidRequest."""
        body: CompletionBody = call.body
        CHECKS.check(body, call.context)
        self._call = call
        self._prompts = prompts_of(body.prompt)
        self.params = _params(body, call.context)
        self._sampled = self.params if body.best_of is None else _sampled(body, self.params)
        call.context.limiter.check_inputs(len(self._prompts), "prompt")
        self.answer_count = len(self._prompts) * max(self._sampled.n, 1)
        self.in_waves = len(self._prompts) > 1 and not body.use_beam_search

    async def read(self) -> Call:
        """The whole call. Raises InvalidRequest, Overloaded."""
        call, context = self._call, self._call.context
        body: CompletionBody = call.body
        constraint, special = await context.constraint(body, call.client), body.add_special_tokens is not False
        if body.suffix:
            tokens = await with_suffix(context, self._prompts, body.suffix, special, call.client)
        else:
            bounds = context.bounds
            count_max = bounds.prompt_tokens_max if body.truncate_prompt_tokens is None else bounds.listed_tokens_max
            tokens = await tokens_of(context, self._prompts, special, call.client, count_max=count_max)
        return msgspec.structs.replace(
            call, asked=body, params=self._sampled, prompts=tokens, constraint=constraint, usual_max_tokens=USUAL_MAX_TOKENS,
            usage=usage_shown(body) if body.stream_options else NO_USAGE,
            negative=await self._negative(special) if body.negative_prompt else (),
        )  # fmt: skip

    async def _negative(self, special: bool) -> list[int]:
        """The tokens of the negative prompt. Raises InvalidRequest, Overloaded."""
        name, given = "negative_prompt", self._call.body.negative_prompt
        return (await tokens_of(self._call.context, prompts_of(given, name), special, self._call.client, name))[0]

    async def echoed(self, generation: Generation) -> Sequence[str]:
        """The texts of the prompts that are computed. Raises Overloaded."""
        given = self._prompts if self._call.body.truncate_prompt_tokens is None else generation.prompts
        texts = [each for each in given if isinstance(each, str)]
        tokens = [each for each in given if not isinstance(each, str)]
        return texts or await self._call.context.decode(tokens, self._call.client)


def _check_suffix(body: CompletionBody, _: ServerContext) -> None:
    """Refuse what cannot go with a suffix: fields that read the prompt as one text."""
    if not body.suffix:
        return
    given = {"echo": body.echo, "truncate_prompt_tokens": body.truncate_prompt_tokens, "prompt_logprobs": body.prompt_logprobs}
    if wrong := [name for name, value in given.items() if value is not None and value is not False]:
        raise InvalidRequest(f"{wrong[0]} does not go with suffix: leave one of the two out.", wrong[0])


CHECKS = Checks({"suffix": _check_suffix} | SHARED)


class _ChoiceRenderer:
    """Renders one choice in this API's shape. Holds the part that is not shown yet, at first the echoed prompt."""

    def __init__(self, generation: Generation, choice: Choice, count: int | None, prefix: str) -> None:
        """`count`: of alternatives beside each token's log-probability, None for none. `prefix`: the echoed prompt."""
        body: CompletionBody = generation.call.body
        self._body, self._tokenizer, self._choice, self._count = body, generation.call.context.tokenizer, choice, count
        self._scored = generation.prompts[choice.prompt_index]
        self._spell = None if count is None else speller(self._tokenizer, body.return_tokens_as_token_ids)
        self._echoes = bool(body.echo) and count is not None
        self.is_plain = count is None and not body.return_token_ids and not generation.call.usage.in_each
        self._prompt: list[int] | None = self._scored
        self._ids: list[int] = []
        self._prefix_length = len(prefix)
        self.texts = [prefix]
        self.shown: dict[str, list[Any]] | None = None
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, delta: Delta) -> None:
        count, spell = self._count, self._spell
        if count is not None and spell is not None and self._echoes:
            parts, self._echoes = self._choice.answer.prompt, False
            self.shown = echoed_logprobs(self._tokenizer, spell, self._scored, parts, count)
        if count is not None and spell is not None:
            more, shown = completion_logprobs(spell, self._counted(delta), count, self._prefix_length), self.shown
            self.shown = more if shown is None else {name: shown[name] + more[name] for name in more}
        self._ids += delta.token_ids
        self.texts.append(delta.text)
        self.finish, self.stop_reason = delta.finish or None, delta.stop_reason

    def _counted(self, delta: Delta) -> Delta:
        """After an echo, an end token has an entry too: who reads scores there takes off the last entry as the answer's."""
        if not self._body.echo or len(delta.tokens) == len(delta.token_ids):
            return delta
        return msgspec.structs.replace(delta, tokens=delta.token_ids, offsets=(*delta.offsets, self._choice.answer.length))

    def add(self, text: str) -> None:
        """Take in a plain answer's text."""
        self.texts.append(text)

    def take(self) -> list[Json]:
        """The part that has not been shown yet, as a choice; empty where there is none."""
        text, shown, ids, prompt = "".join(self.texts), self.shown, self._ids, self._prompt
        if not (text or self.finish or (shown and shown["tokens"]) or (self._body.return_token_ids and ids)):
            return []
        self.texts, self.shown, self._ids, self._prompt = [], None, [], None
        choice = self.text_choice(text)
        choice["logprobs"] = shown
        if self._body.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if (count := self._body.prompt_logprobs) is not None:
            parts = self._choice.answer.prompt
            choice["prompt_logprobs"] = named_prompt_logprobs(self._tokenizer, self._scored, parts, count)
        if self._body.return_routed_experts:
            choice |= experts_member(self._choice.answer, len(self._scored))
        return [choice]

    def text_choice(self, text: str) -> Json:
        """A stream's choice with `text`, in the middle of a plain answer."""
        return {
            "index": self._choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
        }


class CompletionWriter(ChunkWriter):
    """Shows the `n` best answers to each prompt."""

    chunk_kind = kind = KIND

    def __init__(self, generation: Generation, params: UncheckedParams, echoed: Sequence[str] | None) -> None:
        self._shown_count = params.n
        renderers = []
        for choice in generation.choices:
            prefix = echoed[choice.prompt_index] if echoed else ""
            renderers.append(_ChoiceRenderer(generation, choice, params.logprobs, prefix))
        super().__init__(generation, renderers)

    def whole(self) -> Json:
        shown = enumerate(self.generation.best(self._shown_count))
        choices = [self.renderers[choice.index].take()[0] | {"index": index} for index, choice in shown]
        return self.generation.envelope(self.kind, choices) | {"usage": self.usage()}


def _params(body: CompletionBody, context: ServerContext) -> UncheckedParams:
    given = {} if body.logprobs is None else {"logprobs": body.logprobs}
    params = sampling_params(body, **context.sampling_defaults, **given)
    if body.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=None)
    if not body.echo or (body.logprobs is None and params.max_tokens != 0):
        return params
    if body.use_beam_search:
        raise InvalidRequest("use_beam_search cannot be combined with echo and logprobs: leave one out.", "use_beam_search")
    return msgspec.structs.replace(params, prompt_logprobs=max(body.logprobs or 0, params.prompt_logprobs or 0))


def _sampled(body: CompletionBody, params: UncheckedParams) -> UncheckedParams:
    """The parameters that sample `best_of` answers, of which the likeliest n are shown. Raises InvalidRequest."""
    if body.best_of is None or body.best_of == params.n:
        return params
    if not params.n <= body.best_of <= CHOICES_MAX:
        bounds = f"it must lie between n, which is {params.n}, and {CHOICES_MAX}"
        raise InvalidRequest(f"best_of is {body.best_of}: {bounds}.", "best_of")
    if body.stream or body.use_beam_search:
        raise InvalidRequest("best_of chooses among whole answers: leave out stream and use_beam_search.", "best_of")
    return msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)
