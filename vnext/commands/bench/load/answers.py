"""What a server answers: the structs of its answers as far as clients read them, and RequestFailed in place of one."""

from __future__ import annotations

import msgspec

ERROR_CHARACTERS_MAX = 500
NULL = msgspec.Raw(b"null")


class RequestFailed(Exception):
    """One sentence. `kind`: "connect", "timeout", "broken" (connection or answer), "cut" (a stream without its end), "empty" (one
    without a token), "error event", or "HTTP status N". `status` is 0 where there was none, `body` the answer to a request that
    was refused."""

    def __init__(self, kind: str, sentence: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(sentence)
        self.kind, self.status, self.body = kind, status, body

    @property
    def stated(self) -> tuple[str, str]:
        """The server's own sentence and its code, ("", "") where its answer has no error object."""
        try:
            found = msgspec.json.decode(self.body, type=_Failed).error
            return found.message, found.code or ""
        except (ValueError, RecursionError):
            return "", ""


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Failed(msgspec.Struct):
    error: _Error


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message. Its role is left out: it is no part of the answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning_content or self.reasoning or self.refusal or self.tool_calls)


class Choice(msgspec.Struct):
    """A part of one answer, as a completion (`text`) or as a chat (`delta`) brings it."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class Usage(msgspec.Struct):
    """The tokens of a request until now. /v1/messages and /v1/responses have other names, and the former counts what the cache had
    apart."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def read(self) -> int:
        """Tokens of the prompt."""
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.prompt_tokens or self.input_tokens + cached

    @property
    def written(self) -> int:
        """Tokens of the answer."""
        return self.completion_tokens or self.output_tokens


class Part(msgspec.Struct):
    """What an event of /v1/messages adds to a block."""

    text: str = ""
    thinking: str = ""
    partial_json: str = ""


class Whole(msgspec.Struct):
    """The message or response that an event carries."""

    usage: Usage | None = None


class Chunk(msgspec.Struct):
    """The object in one event of a streamed answer, or a whole completion; `delta`, `message` and `response` are those of events of
    /v1/messages and /v1/responses. `at_s`: when it was read, of time.perf_counter."""

    id: str = ""
    choices: list[Choice] | None = None
    usage: Usage | None = None
    delta: str | Part | None = None
    message: Whole | None = None
    response: Whole | None = None
    error: msgspec.Raw = NULL
    at_s: float = 0.0

    @property
    def counted(self) -> Usage | None:
        """The tokens until now, wherever they stand."""
        return self.usage or (self.message or self.response or Whole()).usage

    @property
    def added(self) -> str:
        """What an event of /v1/messages or /v1/responses adds."""
        delta = self.delta
        return delta.text or delta.thinking or delta.partial_json if isinstance(delta, Part) else delta or ""

    @property
    def token_ids(self) -> list[int]:
        """The token ids that a server adds for `return_token_ids`, of all choices."""
        return [token for choice in self.choices or () for token in choice.token_ids or ()]

    @property
    def text(self) -> str:
        return self.added or "".join(choice.text or (choice.delta and choice.delta.content) or "" for choice in self.choices or ())

    @property
    def has_tokens(self) -> bool:
        """Whether it brings tokens of an answer. The first chunk of a chat, which names the role alone, does not."""
        return bool(self.added) or any(choice.delta is None or not choice.delta.is_empty for choice in self.choices or ())


decode_chunk = msgspec.json.Decoder(Chunk).decode


def error_of(chunk: Chunk) -> str:
    """The error that stands in place of a chunk, as JSON; "" for none."""
    return "" if chunk.error is NULL or bytes(chunk.error) == b"null" else bytes(chunk.error).decode()


class Model(msgspec.Struct):
    """One entry of /v1/models."""

    id: str
    max_model_len: object = None


class Models(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[Model]

    @property
    def first(self) -> Model:
        """Raises RequestFailed for an empty list."""
        if not self.data:
            raise RequestFailed("broken", "/v1/models lists no model")
        return self.data[0]


def refused(status: int, body: bytes) -> RequestFailed:
    """The failure that an answer with this status is."""
    shown = body.decode(errors="replace")[:ERROR_CHARACTERS_MAX]
    return RequestFailed(f"HTTP status {status}", f"HTTP status {status}: {shown}", status, body)


def chunk_of(at_s: float, data: bytes) -> Chunk:
    """The chunk of an event. Raises RequestFailed for an error in place of a chunk, and DecodeError."""
    chunk = decode_chunk(data)
    if error := error_of(chunk):
        raise RequestFailed("error event", error, body=data)
    chunk.at_s = at_s
    return chunk
