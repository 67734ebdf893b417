"""Chat request: from a chat body to a running generation and the parts of its answers.

Owns the checks of a chat's fields, the prompt's tokens, how many of them stand before a breakpoint of the conversation, and the
choice of a parser. APIs that are a chat in another shape (responses, messages) translate their body to a ChatBody and start here;
errors name the chat's fields.

    chat = ChatRequest(call, body)                                    checks; raises InvalidRequest
    with context.limiter.enter(chat.answer_count, call.client):
        generation = await chat.start()                               renders, tokenizes; raises InvalidRequest, Overloaded
        parts = [chat.parts() for _ in generation.choices]            parts[choice.index].push(delta) -> list[Part]
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from os.path import commonprefix
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams, UncheckedParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.generation import Generation
from vnext.server.answers.parts import AnswerParts
from vnext.server.call import SHARED, Call, Checks, sampling_params
from vnext.server.context.conversation import Breakpoint, asks_to_think, begins_answer, images_of
from vnext.server.context.openai_types import NO_USAGE, ChatBody, ChatMessage, usage_shown
from vnext.server.context.server_context import ServerContext
from vnext.server.context.structure import ToolChoice, asked_structure, kept_tools, tool_choice_of
from vnext.state.events import pack_tokens
from vnext.state.params import ALL_TOKENS, Constraint
from vnext.text.dialects.grammar import behind, either, speller
from vnext.text.reasoning import Parser, ReasoningParser, with_reasoning
from vnext.text.structured.asked import Asked

BUDGET_MAX = 2**31 - 1
CALL_OPTIONS = StructuredOutputsParams(whitespace_pattern=" ?")  # as models are trained on it, or none: free space may never end


class Prompt(NamedTuple):
    """What the template makes of a conversation. `packed`: as Call's."""

    text: str
    tokens: list[int]
    packed: bytes = b""


class ChatRequest:
    """See the module."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        """`body`: what the call's body asks of a chat. Raises InvalidRequest."""
        context = call.context
        CHECKS.check(body, context)
        self._call, self._context, self._body = call, context, body
        self._begun = False
        self._answers: list[AnswerParts] = []
        self._choice = tool_choice_of(body, context.dialect is not None)
        self.tools = self._choice.shown
        _check_combinations(body, self._choice)
        self.params = self._with_ends(_params(body, context, self._needs_marks()))
        self.answer_count = max(self.params.n, 1)

    def _needs_marks(self) -> bool:
        """Whether special tokens stay in the text, because a parser may look for one."""
        context = self._context
        of_reasoning = context.marks is not None and context.tokenizer.special_id(context.marks.close) is not None
        return of_reasoning or (context.dialect is not None and context.dialect.has_marks(self.tools))

    def _with_ends(self, params: UncheckedParams) -> UncheckedParams:
        """The parameters with the tokens that end an answer in the model's dialect."""
        context = self._context
        ends = [] if context.dialect is None or params.ignore_eos else map(context.tokenizer.special_id, context.dialect.ends)
        found = [end for end in ends if end is not None and end not in context.end_tokens(params)]
        return msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, *found]) if found else params

    async def start(self, shrinks: bool = False, breakpoints: Sequence[Breakpoint] = ()) -> Generation:
        """The generation, not yet sent: `answer` sends it. `shrinks`: where the answer's `max_tokens` do not fit beside the
        prompt, it may have as many as do, instead of being refused. `breakpoints`: what of the conversation stays in the
        cache. Raises InvalidRequest, ModelUnknown, Overloaded, EngineDead."""
        call, client = self._call, self._call.client
        prompt = self._opened(await prompt_of(self._context, self._body, self.tools, client))
        marks = self._context.marks
        self._begun = marks is not None and marks.are_open(prompt.text)
        constraint = await self._constraint(prompt.text, client)
        try:
            asked = replace(
                call, asked=self._body, prompts=[prompt.tokens], packed=prompt.packed, constraint=constraint,
                usage=usage_shown(self._body) if self._body.stream_options else NO_USAGE,
                params=self._shrunk(len(prompt.tokens)) if shrinks else self.params,
                retention=await self._retention(prompt, breakpoints) if breakpoints else (),
                negative=await self._negative() if self._body.negative_prompt else (),
            )  # fmt: skip
            return generation_of(asked)
        except InvalidRequest as error:
            raise _in_words_of_chat(error, self._body) from error

    async def _negative(self) -> list[int]:
        """The tokens of the negative prompt: a text as the template writes a user's message. Raises InvalidRequest, Overloaded."""
        given = self._body.negative_prompt or []
        if not isinstance(given, str):
            self._context.check_tokens(given, "negative_prompt", self._context.bounds.prompt_tokens_max)
            return given
        alone = replace(self._body, messages=[ChatMessage(role="user", content=given)])
        return (await prompt_of(self._context, alone, None, self._call.client)).tokens

    async def _retention(self, prompt: Prompt, breakpoints: Sequence[Breakpoint]) -> tuple[tuple[int, int], ...]:
        """(tokens, seconds) of each breakpoint: one behind the last message keeps the answer too, with which the next turn begins.
        Raises Overloaded."""
        found = []
        for each in breakpoints:
            is_last = each.messages >= len(self._body.messages)
            found.append((ALL_TOKENS if is_last else await self._tokens_before(prompt, each.messages), each.seconds))
        return tuple(found)

    async def _tokens_before(self, prompt: Prompt, messages: int) -> int:
        """How many tokens of the prompt stand before a breakpoint. A template may write anything around a message, so the place is
        found by rendering: a conversation that differs behind the breakpoint has the same text up to it."""
        body, client = self._body, self._call.client
        changed = [*body.messages[:messages], *map(_changed, body.messages[messages:])]
        try:
            other = await self._context.render(replace(body, messages=changed), self.tools, client)
            text = commonprefix([prompt.text, other])
            [before] = await self._context.encode([text], False, client, ["messages"], "messages")
        except InvalidRequest:  # a template that refuses the changed conversation: nothing is promised
            return 0
        return len(commonprefix([prompt.tokens, before]))

    def _opened(self, prompt: Prompt) -> Prompt:
        """The prompt, with the opening mark where a constraint begins with the end of reasoning that may be left out."""
        body, marks, tokens = self._body, self._context.marks, self._context.mark_tokens
        if marks is None or tokens is None or not marks.answer or not begins_answer(body):
            return prompt
        if not self._choice.is_forced and body.thinking_token_budget is None and asked_structure(body) is None:
            return prompt
        packed = prompt.packed and prompt.packed + pack_tokens(tokens[0])
        return Prompt(prompt.text + marks.open, prompt.tokens + tokens[0], packed)

    def _shrunk(self, prompt_length: int) -> UncheckedParams:
        room, wanted = self._context.bounds.model_length - prompt_length, self.params.max_tokens
        return msgspec.structs.replace(self.params, max_tokens=min(wanted, max(room, 1))) if wanted else self.params

    @property
    def is_parsed(self) -> bool:
        """Whether what a part of an answer shows depends on how it is cut into pieces."""
        return any(answer.is_parsed for answer in self._answers)

    def parts(self) -> AnswerParts:
        """For one answer, once `start` has made the prompt."""
        context, dialect = self._context, self._context.dialect
        parser: Parser | None = None
        if dialect is not None and (dialect.is_whole or self.tools is not None):
            parser = dialect.parser(self.tools or [], holds=not self._body.stream)
        if context.marks:
            parser = ReasoningParser(context.marks, self._begun, parser)
        shows_reasoning = self._body.include_reasoning is not False
        answer = AnswerParts(
            parser,
            name=f"{self._call.id}-{len(self._answers)}",
            one_call=self._choice.one,
            only_calls=self._choice.is_forced,
            shows_reasoning=shows_reasoning,
            marks=context.mark_tokens,
        )
        self._answers.append(answer)
        return answer

    def usage(self, generation: Generation) -> dict[str, Any]:
        """The tokens so far, with those of the reasoning where the model reasons."""
        usage = generation.usage()
        if self._context.marks is None:
            return usage
        count = sum(answer.reasoning_tokens for answer in self._answers)
        return usage | {"completion_tokens_details": usage.get("completion_tokens_details", {}) | {"reasoning_tokens": count}}

    def finish_reason(self, parts: AnswerParts, finish: str) -> str:
        """OpenAI's reason for the end of an answer: "tool_calls" where it is complete, as are its calls, which it chose itself."""
        return "tool_calls" if finish == "stop" and parts.has_called and self._choice.force != "named" else finish

    def _is_held_at_once(self, constraint: Constraint | None) -> bool:
        """Whether an answer that could open reasoning may not: of a mark that is no token of its own the constraint would leave the
        first piece, which such a model may take for anything, so the request must ask for the reasoning."""
        body, marks = self._body, self._context.mark_tokens
        if constraint is None or self._begun or marks is None or len(marks[0]) == 1:
            return False
        return body.thinking_token_budget is None and not asks_to_think(body)

    @property
    def _may_call(self) -> bool:
        """Whether an answer of the format that `response_format` asks for may be calls instead."""
        asked = self._body.response_format
        return asked is not None and asked.type != "text" and self._choice.force == "auto" and bool(self._choice.allowed)

    async def _calls(self, client: str) -> str:
        """The grammar of an answer that calls the tools."""
        of = self._choice.allowed, self._choice.one, sorted(self._choice.strict_names)
        return await self._context.grammars.made(of, client, self._asked_calls)

    def _asked_calls(self) -> Asked:
        """The calls of a forced answer, as the model's dialect writes them."""
        context, choice = self._context, self._choice
        assert context.dialect is not None
        tools = kept_tools(choice.allowed, choice.strict_names, CALL_OPTIONS)
        lark = context.dialect.call_grammar(tools, not choice.one, context.tokenizer.special_ids)
        return Asked(kind="calls", value=lark, path="tools", options=CALL_OPTIONS)

    async def _chosen_calls(self, client: str) -> Constraint | None:
        """What the calls that the model chooses keep to, where a tool is strict and the dialect tells calls from words."""
        context, tools = self._context, self._choice.strict
        lark = context.dialect.chosen_grammar(tools, context.tokenizer.special_ids) if context.dialect and tools else None
        if lark is None or self._body.use_beam_search:
            return None
        asked = Asked(kind="calls", value=lark, path="tools", options=CALL_OPTIONS)

        def checked() -> Asked:
            kept_tools(tools, self._choice.strict_names, CALL_OPTIONS)
            return asked

        return Constraint(grammar=await context.grammars.made((tools, "chosen"), client, checked))

    async def _constraint(self, prompt: str, client: str) -> Constraint | None:
        """What the answers must look like, after their reasoning if the prompt makes them begin with it."""
        context, choice = self._context, self._choice
        if choice.is_forced:
            constraint: Constraint | None = Constraint(grammar=await self._calls(client))
        else:
            constraint = await context.constraint(self._body, client) or await self._chosen_calls(client)
            if constraint and context.marks and context.marks.answer and not self._body.continue_final_message:
                head = speller(context.tokenizer.special_ids)(context.marks.answer)
                constraint = Constraint(grammar=behind(head, constraint.grammar))
            if constraint and self._may_call:
                constraint = Constraint(grammar=either(await self._calls(client), constraint.grammar))
        marks, tokens = context.marks, context.mark_tokens
        if marks is None or tokens is None or not marks.are_expected(prompt) or self._is_held_at_once(constraint):
            return constraint
        return with_reasoning(constraint, tokens, self._begun, self._body.thinking_token_budget)


async def prompt_of(context: ServerContext, body: ChatBody, tools: list[dict[str, Any]] | None, client: str) -> Prompt:
    """The conversation as a prompt. The template writes special tokens itself. Raises InvalidRequest, Overloaded."""
    context.model_name(body.model, client)
    if context.template is None:
        raise InvalidRequest(
            "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
            "messages",
        )
    asked = images_of(body.messages) if context.images else ()
    custom = body.mm_processor_kwargs or {}, body.media_io_kwargs or {}
    images = await context.images.read(asked, client, *custom) if context.images and asked else []
    text = await context.render(body, tools, client)
    if context.images and images:
        text = context.images.written(text, images)
    [tokens] = await context.encode([text], False, client, ["messages"], "messages")
    if not tokens:
        raise InvalidRequest("The chat template made an empty prompt of these messages: send some text.", "messages")
    return Prompt(text, tokens, context.images.packed(tokens, images) if context.images and images else b"")


async def chat_prompt(context: ServerContext, body: ChatBody, client: str) -> Prompt:
    """The prompt that a chat would become. Raises InvalidRequest, Overloaded."""
    return await prompt_of(context, body, tool_choice_of(body, context.dialect is not None).shown, client)


async def prompt_tokens(context: ServerContext, body: ChatBody, client: str) -> list[int]:
    """Its tokens. Raises InvalidRequest, Overloaded."""
    return (await chat_prompt(context, body, client)).tokens


def _check_combinations(body: ChatBody, choice: ToolChoice) -> None:
    if choice.is_forced and body.structured_outputs is not None:  # a response_format waits for the answer to the calls' results
        name = "structured_outputs"
        raise InvalidRequest(f"tool_choice makes the answer a call, and {name} makes it something else: leave one out.", name)
    if body.use_beam_search and (choice.is_forced or body.thinking_token_budget is not None):
        name = "tool_choice" if choice.is_forced else "thinking_token_budget"
        raise InvalidRequest(f"use_beam_search cannot be combined with {name}: leave one out.", name)


def _check_budget(body: ChatBody, context: ServerContext) -> None:
    name, budget = "thinking_token_budget", body.thinking_token_budget
    if context.marks is None:
        raise InvalidRequest(f"{name} is {budget}, and this model's chat template marks no reasoning: leave it out.", name)
    if budget is not None and not 0 <= budget <= BUDGET_MAX:
        raise InvalidRequest(f"{name} is {budget}: it must lie between 0 and {BUDGET_MAX}.", name)


def _check_modalities(body: ChatBody, _: ServerContext) -> None:
    if body.modalities != ["text"]:
        raise InvalidRequest(f"modalities is {body.modalities}: only ['text'] is supported.", "modalities")


def _check_top_logprobs(body: ChatBody, _: ServerContext) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true.", "top_logprobs")


CHECKS = Checks(
    {"thinking_token_budget": _check_budget, "modalities": _check_modalities, "top_logprobs": _check_top_logprobs} | SHARED
)


def _in_words_of_chat(error: InvalidRequest, body: ChatBody) -> InvalidRequest:
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    name = names.get(error.param or "", error.param)
    changed = copy(error)
    changed.message = error.message.replace("the prompt", "the messages").replace(f"{error.param} is ", f"{name} is ")
    changed.param = name
    return changed


def _params(body: ChatBody, context: ServerContext, marked_calls: bool) -> UncheckedParams:
    """The body's parameters. `marked_calls`: special tokens stay in the text, because some models mark calls with them."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, max_tokens=None, **context.sampling_defaults)
    wanted = params.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    skip = params.skip_special_tokens and not marked_calls
    return msgspec.structs.replace(params, logprobs=logprobs, max_tokens=wanted, skip_special_tokens=skip)


def _changed(message: ChatMessage) -> ChatMessage:
    """The message with a text that begins differently."""
    text = message.content if isinstance(message.content, str) else ""
    return replace(message, content="y" if text.lstrip()[:1] == "x" else "x")
