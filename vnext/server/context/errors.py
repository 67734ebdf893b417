"""Errors of the API server and their one format for clients: {"error": {message, type, param, code}}.

Owns the table from domain errors to HTTP statuses, and errors of a chat in the names that the client of another API sent. Views
raise, and the middleware looks errors up here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from vnext.runtime.client.output_stream import EngineDead, EngineStalled, Refused
from vnext.runtime.client.pending_operations import BadTensors, NotDone
from vnext.runtime.protocol.sampling_params import InvalidRequest

RETRY_AFTER_S = 1  # where nothing was measured
STATUS_GONE = 499  # for the metrics only, as in nginx: no client reads it
MESSAGE_CHARACTERS_MAX, PARAM_CHARACTERS_MAX = 1_000, 200
MESSAGE_BATCHES = (
    "Batches in Anthropic's API are not supported: upload the requests to /v1/files and start them by /v1/batches, in OpenAI's "
    "format."
)
MEDIA_RETRY_S = 60
"""An image leaves for others ten minutes after it was sent."""
NO_THREADS = "thread_unsupported_request"
"""The code that makes Anthropic's package send the whole conversation again, without a thread."""
SCORING = (r", or 0 with prompt_logprobs, to score a prompt only", "")
"""What only OpenAI's older APIs have."""
JSON_FAULTS = MappingProxyType({
    "Input data was truncated": "it is empty, or its end is missing",
    "JSON is malformed: invalid character (byte 0)": "it does not begin as JSON does, in UTF-8 without a mark in front",
})  # fmt: skip
"""msgspec's sentences -> ours, where its own tells a client little."""
Body = TypeVar("Body", bound=msgspec.Struct)
Names = Sequence[tuple[str, str]]
"""(regular expression of a chat's name, the client's name), tried in order."""


class ModelUnknown(Exception):
    """The request names a model that is not served here."""


class KeyRejected(Exception):
    """The request carries no API key, or a wrong one."""


class Overloaded(Exception):
    """As much as the settings allow is waiting or running; `retry_after_s` is when there may be room again."""

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MediaFull(Exception):
    """There is no room for an image or a sound until older ones leave."""


class RateLimited(Overloaded):
    """The request's API key has used what its limits allow."""


class RequestTimedOut(Exception):
    """The request's answer was not complete in time."""


class OriginRejected(Exception):
    """A browser asks for a page of another site."""


class ContentRefused(Exception):
    """The body is not declared as JSON, or has an encoding that this server cannot decompress."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


class ClientGone(Exception):
    """The client has left: the transport no longer sends or receives, whatever state it reports. Neither an error nor an
    answer."""


class FileUnknown(Exception):
    """There is no file or batch of this id."""


class StoreUnusable(Exception):
    """The folder of files and batches cannot be used: one sentence with the remedy."""


class BatchesOff(Exception):
    """This server keeps no files."""


class OtherSystem(Exception):
    """The request goes on with a stream that this server may compute otherwise."""


class LogHidden(Exception):
    """This server does not show its log, or not to this client."""


class RoutesClosed(Exception):
    """This server does not open a route to its clients."""


class LogGone(Exception):
    """A part of the log that does not exist, or was deleted."""


class Draining(Exception):
    """The server is about to end and takes no new requests."""


class NotANumber(Exception):
    """The model computes what is no number."""


class Aborted(Exception):
    """The engine core ended a request before its answer was complete."""


ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> the type of Anthropic's error object."""


class Failure(msgspec.Struct, frozen=True):
    """An error as clients see it: the HTTP status and the members of the error object. `allowed`: the path's methods.
    `retry_after_s` is shown with the statuses 429 and 503."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    allowed: tuple[str, ...] = ()
    retry_after_s: int = RETRY_AFTER_S

    def body(self) -> dict[str, Any]:
        """The error object. It shortens a client's own value, which may be long."""
        param = self.param and _shown(self.param, PARAM_CHARACTERS_MAX)
        message = _shown(self.message, MESSAGE_CHARACTERS_MAX)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error object of Anthropic's API, with `param` and `code` besides."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        details = {"details": {"error_code": NO_THREADS, "unsupported": [self.param]}} if self.code == NO_THREADS else {}
        return {"type": "error", "error": self.body()["error"] | {"type": kind} | details}

    def ollama_body(self) -> dict[str, str]:
        """The error object of Ollama's API."""
        return {"error": self.body()["error"]["message"]}

    def response(self, api: str = "openai", request_id: str = "") -> web.Response:
        """`api` as identity.api_of says; `request_id` stands in Anthropic's object."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.status in (429, 503) else {}
        if self.allowed:
            headers["Allow"] = ", ".join(self.allowed)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if api == "anthropic":
            body = self.anthropic_body() | ({"request_id": request_id} if request_id else {})
        else:
            body = self.ollama_body() if api == "ollama" else self.body()
        return web.json_response(body, status=self.status, headers=headers, dumps=_dumps)


FAILURES: Mapping[type[BaseException], Callable[[Any], Failure]] = {
    InvalidRequest: lambda error: Failure(400, error.message, param=error.param, code=error.code),
    Refused: lambda error: Failure(400, error.message),
    ModelUnknown: lambda error: Failure(404, str(error), param="model", code="model_not_found"),
    KeyRejected: lambda error: Failure(401, str(error), "authentication_error", code="invalid_api_key"),
    OriginRejected: lambda error: Failure(403, str(error), code="origin_rejected"),
    ContentRefused: lambda error: Failure(415, str(error), code="unsupported_media_type"),
    BodyTooSlow: lambda error: Failure(408, str(error), code="body_too_slow"),
    RateLimited: lambda error: _too_much(error, "rate_limit_exceeded"),
    Overloaded: lambda error: _too_much(error, "overloaded"),
    MediaFull: lambda error: Failure(503, str(error), "server_error", code="media_full", retry_after_s=MEDIA_RETRY_S),
    RequestTimedOut: lambda error: Failure(504, str(error), "server_error", code="request_timeout"),
    FileUnknown: lambda error: Failure(404, str(error), code="not_found"),
    StoreUnusable: lambda error: Failure(507, str(error), "server_error", code="storage_failed"),
    BatchesOff: lambda error: Failure(403, str(error), code="batches_off"),
    RoutesClosed: lambda error: Failure(403, str(error), code="routes_closed"),
    NotDone: lambda error: Failure(400, f"{str(error)[:1].upper()}{str(error)[1:]}.", code="not_done"),
    BadTensors: lambda error: Failure(400, f"{str(error)[:1].upper()}{str(error)[1:]}.", code="bad_tensors"),
    OtherSystem: lambda error: Failure(409, str(error), param="Last-Event-ID", code="other_system"),
    LogHidden: lambda error: Failure(403, str(error), code="log_hidden"),
    LogGone: lambda error: Failure(410, str(error), code="log_gone"),
    Draining: lambda error: Failure(503, str(error), "server_error", code="shutting_down"),
    EngineDead: lambda error: Failure(503, str(error), "server_error", code="engine_dead"),
    EngineStalled: lambda error: Failure(503, str(error), "server_error", code="engine_stalled"),
    NotANumber: lambda error: Failure(500, str(error), "server_error", code="not_a_number"),
    Aborted: lambda error: Failure(503, str(error), "server_error", code="aborted"),
    web.HTTPException: lambda error: _of_http(error),
}
"""Exception type -> the Failure that clients see."""
DOMAIN_ERRORS = tuple(FAILURES)


def failure_of(error: BaseException) -> Failure:
    """The Failure of one of DOMAIN_ERRORS; any other error is the server's fault, and clients see no details."""
    for kind in type(error).__mro__:
        if form := FAILURES.get(kind):
            return form(error)
    return Failure(500, "The server failed on this request; its log says how.", "server_error")


def absent(path: str) -> Failure:
    """There is nothing at this path."""
    is_batch = f"{path}/".startswith("/v1/messages/batches/")
    sentence = MESSAGE_BATCHES if is_batch else f"There is nothing at {path}: GET / lists the paths of this server."
    return Failure(404, sentence, code="not_found")


def converted(fields: Mapping[str, object], kind: type[Body]) -> Body:
    """The body of another API that has these fields, some of them as their client sent them. Raises InvalidRequest."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from error


def invalid_body(error: Exception) -> InvalidRequest:
    """The client's view of an error of the JSON decoder, with the field's path."""
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"The body is no valid JSON: {_json_fault(error)}.")
    message, _, place = str(error).partition(" - at ")
    quoted = re.findall(r"`([^`]*)`", place)
    path = quoted[-1].removeprefix("$").removeprefix(".") if quoted else ""
    if "missing required field `" in message:
        name = re.findall(r"`([^`]*)`", message)[0]
        param = f"{path}.{name}" if path else name
        return InvalidRequest(f"{param} is missing: it is required.", param)
    where = f"{path} is wrong" if path else "The body is wrong"
    return InvalidRequest(f"{where}: {message[:1].lower()}{message[1:]}.", path or None)


def _json_fault(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return JSON_FAULTS.get(str(error), str(error))


def _too_much(error: Overloaded, code: str) -> Failure:
    return Failure(429, str(error), "rate_limit_error", code=code, retry_after_s=error.retry_after_s)


def _of_http(error: web.HTTPException) -> Failure:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = tuple(sorted(error.allowed_methods))
        sentence = f"This path does not take {error.method}: send {' or '.join(allowed)}."
        return Failure(405, sentence, code="method_not_allowed", allowed=allowed)
    if error.status == 413:
        return Failure(413, "The body is too large: shorten it.", code="too_large")
    return Failure(error.status, error.reason)


def _shown(text: str, count_max: int) -> str:
    """A long text without its middle, because the remedy is at its end. Bytes that are not text become question marks."""
    text = text.encode(errors="replace").decode()  # a header's bytes arrive as lone surrogates
    half = count_max // 2
    return text if len(text) <= count_max else f"{text[:half]} ... {text[-half:]}"


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@contextmanager
def in_names(names: Names) -> Iterator[None]:
    """Raise an InvalidRequest of the body with the client's names in its sentence and as its param."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names) from error


def renamed(error: InvalidRequest, names: Names) -> InvalidRequest:
    """The same error with the client's names. A param changes by the first name that fits all of its beginning."""
    changed = copy(error)
    for pattern, name in names:
        begins = r"(?<![\w.'])" if pattern[0].isalpha() else ""
        changed.message = re.sub(rf"{begins}{pattern}(?!\w)", name, changed.message)
    for pattern, name in names:
        if error.param and re.match(rf"{pattern}(?!\w)", error.param):
            changed.param = re.sub(rf"^{pattern}", name, error.param)
            break
    return changed
