"""Ollama's API: POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show, GET /api/tags, /api/ps and /api/version,
over the same generations as a chat and a completion. An answer is a stream of JSON lines unless `stream` is false.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec
from aiohttp import web
from msgspec.structs import replace

from vnext.server.answers.beams import generation_of
from vnext.server.answers.chat_request import ChatRequest
from vnext.server.answers.generation import Generation
from vnext.server.answers.parts import AnswerParts
from vnext.server.answers.writing import EventWriter, Json
from vnext.server.call import Call, admit
from vnext.server.context.errors import Failure, in_names
from vnext.server.context.identity import client_of, model_of
from vnext.server.context.openai_types import ChatBody
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, tenant_of
from vnext.server.http.bodies import read_body
from vnext.server.http.pages import ollama_details, ollama_model
from vnext.server.http.streaming import NDJSON, line_frame
from vnext.server.ollama.translation import (
    NAMES,
    NamedBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    chat_body,
    generate_body,
    is_unload,
)
from vnext.server.views.completions import CompletionRequest
from vnext.server.views.embeddings import EmbeddingBody, Wanted, vectors_of, written
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

API_VERSION = "0.9.0"
"""Of Ollama, whose API of this version is spoken here: clients look whether it knows tools and reasoning."""
_chat, _generate, _named = map(msgspec.json.Decoder, (OllamaChatBody, OllamaGenerateBody, NamedBody))
_embed, _embeddings = map(msgspec.json.Decoder, (OllamaEmbedBody, OllamaEmbeddingsBody))


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat. Without messages it only says that the model is loaded, as Ollama's does."""
    call = await admit(request, "chat", _chat)
    if not call.body.messages:
        return _loaded(call, {"message": {"role": "assistant", "content": ""}})
    with in_names(NAMES):
        return await _chatted(call, chat_body(call.body, call.context.sees), ChatLines)


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate. Without a prompt as `ollama_chat` without messages."""
    call = await admit(request, "gen", _generate)
    if not (call.body.prompt or call.body.suffix or call.body.images):
        return _loaded(call, {"response": ""})
    with in_names(NAMES):
        asked = generate_body(call.body, call.context.sees)
        if isinstance(asked, ChatBody):
            return await _chatted(call, asked, TextLines)
        text = CompletionRequest(replace(call, body=asked))
        with call.context.limiter.enter(text.answer_count, call.client):
            return await TextLines(generation_of(await text.read()), AnswerParts(None), False).write()


async def _chatted(call: Call, body: ChatBody, lines: type[AnswerLines]) -> web.StreamResponse:
    chat = ChatRequest(call, body)
    with call.context.limiter.enter(chat.answer_count, call.client):
        generation = await chat.start(shrinks=True)
        parts = chat.parts()
        return await lines(generation, parts, chat.is_parsed).write()


def _loaded(call: Call, empty: Json) -> web.Response:
    model = call.context.model_name(model_of(call.body.model), call.client)
    done = {"done": True, "done_reason": "unload" if is_unload(call.body) else "load"}
    return web.json_response({"model": model, "created_at": _moment(time.time())} | empty | done)


def _moment(seconds: float) -> str:
    """A time since the epoch, as Ollama's API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class AnswerLines(EventWriter):
    """Shows an answer as lines, the last with `done` and the counts and times in ns, or as one such object."""

    form = NDJSON

    def __init__(self, generation: Generation, parts: AnswerParts, by_token: bool) -> None:
        super().__init__(generation, parts, by_token)
        self.ids = None  # a line has no room for one
        self._calls: list[Json] = []
        self._words: list[str] = []
        self._thoughts: list[str] = []
        self._first_s = 0.0
        self._last: Json = {}

    def content(self, text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
        """The members of a line or of the whole that hold its content."""
        raise AssertionError("a route says what its lines hold")

    def begin(self) -> Iterable[Json]:
        self._first_s = time.monotonic()
        return ()

    def part(self, part: Part) -> Iterable[Json]:
        self._first_s = self._first_s or time.monotonic()
        match part:
            case Words():
                self._words.append(part.text)
                return [self._line(self.content(part.text))]
            case Reasoning():
                self._thoughts.append(part.text)
                return [self._line(self.content("", part.text))]
            case CallBegun():
                self._calls.append({"function": {"name": part.name, "arguments": ""}})
            case CallArguments():
                self._calls[-1]["function"]["arguments"] += part.text
            case CallEnded():
                called = self._calls[-1]["function"]
                called["arguments"] = msgspec.json.decode(called["arguments"] or "{}")
                return [self._line(self.content("", calls=self._calls[-1:]))]
        return []

    def end(self, finish: str, stop_reason: str | int | None) -> Iterable[Json]:
        usage, now_s, started_s = self.generation.usage(), time.monotonic(), self.call.started_s
        self._last = {
            "done": True,
            "done_reason": finish,
            "total_duration": int((now_s - started_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int((self._first_s - started_s) * 1e9),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int((now_s - self._first_s) * 1e9),
        }
        return [self._line(self.content("")) | self._last]

    def whole(self) -> Json:
        calls = [each for each in self._calls if not isinstance(each["function"]["arguments"], str)]
        content = self.content("".join(self._words), "".join(self._thoughts), calls)
        return self._line(content) | self._last

    def _line(self, content: Json) -> Json:
        return {"model": self.generation.model, "created_at": _moment(time.time())} | content | {"done": False}

    def frame(self, event: Json) -> bytes:
        return line_frame(event)

    def fault_frame(self, failure: Failure) -> bytes:
        return line_frame(failure.ollama_body())


class ChatLines(AnswerLines):
    """Of /api/chat."""

    def content(self, text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
        beside = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return {"message": {"role": "assistant", "content": text} | beside}


class TextLines(AnswerLines):
    """Of /api/generate."""

    def content(self, text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


async def ollama_embed(request: web.Request) -> web.Response:
    """POST /api/embed. Without an input it makes no vector: the model is loaded."""
    call = await admit(request, "embd", _embed)
    body: OllamaEmbedBody = call.body
    inputs = [body.input] if isinstance(body.input, str) and body.input else [*body.input]
    vectors, count = await _vectors(call, "input", inputs, Wanted(dimensions=body.dimensions))
    model, lasted_s = call.context.model_name(model_of(body.model), call.client), time.monotonic() - call.started_s
    found = {"model": model, "embeddings": vectors, "total_duration": int(lasted_s * 1e9)}
    return web.json_response(body=msgspec.json.encode(found | {"load_duration": 0, "prompt_eval_count": count}))


async def ollama_embeddings(request: web.Request) -> web.Response:
    """POST /api/embeddings: one vector, as the model makes it, of any length."""
    call = await admit(request, "embd", _embeddings)
    body: OllamaEmbeddingsBody = call.body
    vectors, _ = await _vectors(call, "prompt", [body.prompt] if body.prompt else [], Wanted(normalize=False))
    return web.json_response(body=msgspec.json.encode({"embedding": vectors[0] if vectors else []}))


async def _vectors(call: Call, name: str, texts: list[str], wanted: Wanted) -> tuple[list[msgspec.Raw], int]:
    """The vectors of `texts`, which the field `name` holds, as JSON, and the number of their tokens."""
    is_unload(call.body)  # checks the field
    asked = EmbeddingBody(input=[*texts], model=model_of(call.body.model))
    if not texts:
        call.context.model_name(asked.model, call.client)
        return [], 0
    vectors, count = await vectors_of(replace(call, body=asked), {name: asked.input}, wanted)
    return await written(vectors), count


async def ollama_show(request: web.Request) -> web.Response:
    body, context = await read_body(request, _named), request.app[SERVER_CONTEXT]
    context.model_name(model_of(body.model or body.name), client_of(request))
    found = {"completion": True, "insert": context.infill is not None, "tools": context.dialect is not None}
    found |= {"thinking": context.marks is not None, "vision": context.sees}
    template = context.tokenizer.chat_template or ""
    return web.json_response(
        {
            "modelfile": "", "parameters": "", "template": template, "details": ollama_details(_level(context)),
            "model_info": {"general.architecture": "vnext", "vnext.context_length": context.bounds.model_length},
            "capabilities": [name for name, has in found.items() if has],
        }
    )  # fmt: skip


async def ollama_tags(request: web.Request) -> web.Response:
    """GET /api/tags, and /api/ps: what is served is loaded. `size`: bytes of weights that a token reads."""
    context = request.app[SERVER_CONTEXT]
    size, identity = int(context.client.ready.environment.get("token_bytes", 0)), context.identity
    names, born = (*context.model_names, *context.adapters.names(tenant_of(request))), {"created": identity.started_s}
    models = [ollama_model(born | {"id": name}, identity.fingerprint, size, _level(context)) for name in names]
    return web.json_response({"models": models})


async def ollama_version(request: web.Request) -> web.Response:
    return web.json_response({"version": API_VERSION})


def _level(context: ServerContext) -> str:
    environment = context.client.ready.environment
    level = environment.get("codes") or environment.get("quantization", "none")
    return str(environment.get("dtype", "") if level == "none" else level)
