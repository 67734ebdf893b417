"""POST /v1/chat/completions: continues a conversation.

Owns the shapes of the answers in this API; `chat_request` and `generation` do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from vnext.server.answers.chat_request import ChatRequest
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.logprobs import ChatLogprobs, experts_member, named_prompt_logprobs, speller
from vnext.server.answers.parts import joined
from vnext.server.answers.writing import ChunkWriter, Json
from vnext.server.call import admit
from vnext.server.context.conversation import check_calls
from vnext.server.context.openai_types import ChatBody
from vnext.text.answer import Delta
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

_DECODER = msgspec.json.Decoder(ChatBody)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    call = await admit(request, "chatcmpl", _DECODER)
    check_calls(call.body.messages)
    chat = ChatRequest(call, call.body)
    with call.context.limiter.enter(chat.answer_count, call.client):
        return await ChatWriter(chat, await chat.start()).write()


class _ChoiceRenderer:
    """Renders one choice in this API's shape."""

    def __init__(self, chat: ChatRequest, generation: Generation, choice: Choice) -> None:
        body, tokenizer = generation.call.body, generation.call.context.tokenizer
        self._chat = chat
        self._answer = chat.parts()
        self._entries: ChatLogprobs | None = None
        if (count := chat.params.logprobs) is not None:
            spell = speller(tokenizer, body.return_tokens_as_token_ids)
            self._entries = ChatLogprobs(tokenizer, spell, count, self._answer.is_parsed)
        self.index = choice.index
        self._with_ids = bool(body.return_token_ids)
        self._ids: list[int] = []
        self._is_plain = self._entries is None and not self._with_ids and not generation.call.usage.in_each
        self.started = False
        self._parts: list[Part] = []
        self.logprobs: list[Json] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def is_plain(self) -> bool:
        """As ChoiceRenderer says; it may become true in the middle of an answer."""
        return self._is_plain and self._answer.is_plain

    def push(self, delta: Delta) -> None:
        self._ids += delta.token_ids
        parts = self._answer.push(delta)
        if self._entries is not None:
            self.logprobs += self._entries.push(delta)
            for part in parts:
                self.logprobs += self._entries.of(part) if isinstance(part, Words) else []
            self.logprobs += self._entries.rest() if delta.finish else []
        self._parts += parts
        self.finish = self._chat.finish_reason(self._answer, delta.finish) or None
        self.stop_reason = delta.stop_reason

    def add(self, text: str) -> None:
        """Take in a plain answer's text."""
        self._parts.append(Words(text))

    def choice(self) -> Json:
        """The whole answer."""
        return self._choice("message", _message_of(self._parts), self._take_logprobs())

    def take(self) -> list[Json]:
        """The choices that a stream has not shown yet, one per chunk; the very first names the role."""
        shown = [] if self.started else [self._passing({"role": "assistant", "content": ""})]
        self.started = True
        parts, self._parts = self._parts, []
        deltas = [_delta_of(part) for part in joined(parts) if not isinstance(part, CallEnded)]
        logprobs = self._take_logprobs()
        with_words = [place for place, delta in enumerate(deltas[:-1]) if "content" in delta and "content" not in deltas[-1]]
        for place, delta in enumerate(deltas[:-1]):
            shown.append(self._passing(delta))
            if with_words[-1:] == [place]:
                shown[-1]["logprobs"], logprobs = logprobs, self._take_logprobs()
        if deltas or self.finish or (logprobs and logprobs["content"]):
            shown.append(self._choice("delta", deltas[-1] if deltas else {}, logprobs))
        return shown

    def text_choice(self, text: str) -> Json:
        """A stream's choice with `text`, in the middle of a plain answer."""
        return self._plain_choice("delta", {"content": text}, None)

    def _passing(self, delta: Json) -> Json:
        """A choice before the last of those that are shown together."""
        return self._plain_choice("delta", delta, None) | {"finish_reason": None}

    def _take_logprobs(self) -> Json | None:
        taken, self.logprobs = self.logprobs, []
        return None if self._entries is None else {"content": taken, "refusal": None}

    def _choice(self, name: str, content: Json, logprobs: Json | None) -> Json:
        ids, self._ids = {"token_ids": self._ids} if self._with_ids else {}, []
        return self._plain_choice(name, content, logprobs) | ids

    def _plain_choice(self, name: str, content: Json, logprobs: Json | None) -> Json:
        return {
            "index": self.index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
        }


class ChatWriter(ChunkWriter):
    """Shows a chat's answers."""

    chunk_kind, kind = "chat.completion.chunk", "chat.completion"

    def __init__(self, chat: ChatRequest, generation: Generation) -> None:
        self._shown = [_ChoiceRenderer(chat, generation, choice) for choice in generation.choices]
        super().__init__(generation, self._shown, chat.is_parsed)
        self._chat = chat

    def usage(self) -> Json:
        """As ChunkWriter, with the tokens of the reasoning."""
        return self._chat.usage(self.generation)

    def chunk(self, choices: list[Json], beside: Mapping[str, Any] = {}) -> Json:  # noqa: B006
        """As ChunkWriter; with the prompt's tokens in the first one, where they are asked for."""
        begins = self.call.body.return_token_ids and "role" in choices[0]["delta"]
        return super().chunk(choices, {"prompt_token_ids": self.generation.prompts[0]} if begins else beside)

    def whole(self) -> Json:
        body, generation = self.call.body, self.generation
        [prompt] = generation.prompts
        shown = [renderer.choice() for renderer in self._shown]
        if body.return_routed_experts:
            shown = [each | experts_member(of.answer, len(prompt)) for each, of in zip(shown, generation.choices)]
        answer = generation.envelope(self.kind, shown) | {"usage": self.usage()}
        if (count := body.prompt_logprobs) is not None:
            parts, tokenizer = generation.choices[0].answer.prompt, self.call.context.tokenizer
            answer["prompt_logprobs"] = named_prompt_logprobs(tokenizer, prompt, parts, count)
        return answer | ({"prompt_token_ids": prompt} if body.return_token_ids else {})


def _message_of(parts: Sequence[Part]) -> Json:
    """A whole answer's message."""
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            calls[part.index] = _call_of(part)
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Words))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    message = {"role": "assistant", "content": content or None if calls or thought else content, "refusal": None}
    if thought:
        message |= _reasoning_of(thought)
    return message | ({"tool_calls": [*calls.values()]} if calls else {})


def _delta_of(part: Words | Reasoning | CallBegun | CallArguments) -> Json:
    """A stream's delta. A call begins with its id and name; then come pieces of its arguments."""
    match part:
        case Words():
            return {"content": part.text}
        case Reasoning():
            return _reasoning_of(part.text)
        case CallBegun():
            return {"tool_calls": [{"index": part.index, **_call_of(part)}]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _call_of(begun: CallBegun) -> Json:
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": ""}}


def _reasoning_of(text: str) -> dict[str, str]:
    """Under vLLM's name and under DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}
