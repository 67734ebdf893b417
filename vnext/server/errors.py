"""Errors of the edge and their one form towards clients: {"error": {message, type, param, code}}.

Owns the table from domain errors to HTTP statuses. Raises nothing itself; views raise, the middleware asks here.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.output_stream import EngineDead, Refused
from vnext.sampling_params import InvalidRequest

RETRY_AFTER_S = 1
PATHS = "this server has /v1/chat/completions, /v1/completions, /v1/models, /health, /version and /metrics"


class ModelUnknown(Exception):
    """The request names a model that is not served here."""


class KeyRejected(Exception):
    """The request carries no API key, or a wrong one."""


class Overloaded(Exception):
    """As many answers as the settings allow are waiting or running."""


class LogHidden(Exception):
    """This server does not show its log, or not to this client."""


class LogGone(Exception):
    """A part of the log that is not there, or not any more."""


class Draining(Exception):
    """The server is about to end and takes no new requests."""


class Aborted(Exception):
    """The engine core ended a request before its answer was complete."""


class Failure(msgspec.Struct, frozen=True):
    """What a client is told: HTTP status and the members of the error object."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.json_response(self.body(), status=self.status, headers=headers, dumps=_dumps)


DOMAIN_ERRORS = (
    InvalidRequest,
    Refused,
    ModelUnknown,
    KeyRejected,
    Overloaded,
    LogHidden,
    LogGone,
    Draining,
    Aborted,
    EngineDead,
    web.HTTPException,
)


def failure_of(error: BaseException) -> Failure:
    """The form of one of DOMAIN_ERRORS; anything else is a fault of ours, which clients learn no details of."""
    match error:
        case InvalidRequest():
            return Failure(400, error.message, param=error.param)
        case Refused():
            return Failure(400, error.message)
        case ModelUnknown():
            return Failure(404, str(error), param="model", code="model_not_found")
        case KeyRejected():
            return Failure(401, str(error), "authentication_error", code="invalid_api_key")
        case Overloaded():
            return Failure(429, str(error), "rate_limit_error", code="overloaded")
        case LogHidden():
            return Failure(403, str(error), code="log_hidden")
        case LogGone():
            return Failure(410, str(error), code="log_gone")
        case Draining():
            return Failure(503, str(error), "server_error", code="shutting_down")
        case EngineDead():
            return Failure(503, str(error), "server_error", code="engine_dead")
        case Aborted():
            return Failure(503, str(error), "server_error", code="aborted")
        case web.HTTPException():
            return _of_http(error)
        case _:
            return Failure(500, "The server failed on this request; its log says how.", "server_error")


def invalid_body(error: Exception, known_fields: tuple[str, ...]) -> InvalidRequest:
    """The client's view of an error of the JSON decoder: with the field's path, and a guess for a misspelt name."""
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return InvalidRequest(f"The body is no valid JSON: {reason}.")
    message, _, place = str(error).partition(" - at ")
    quoted = re.findall(r"`([^`]*)`", place)
    path = quoted[-1].removeprefix("$").removeprefix(".") if quoted else ""
    if "field `" in message:
        return _wrong_field(message, path, known_fields)
    where = f"{path} is wrong" if path else "The body is wrong"
    return InvalidRequest(f"{where}: {message[:1].lower()}{message[1:]}.", path or None)


def _wrong_field(message: str, path: str, known_fields: tuple[str, ...]) -> InvalidRequest:
    name = re.findall(r"`([^`]*)`", message)[0]
    param = f"{path}.{name}" if path else name
    if "missing" in message:
        return InvalidRequest(f"{param} is missing: it is required.", param)
    close = [] if path else difflib.get_close_matches(name, known_fields, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"{param} is no field of this request.{guess}", param)


def _of_http(error: web.HTTPException) -> Failure:
    match error.status:
        case 404:
            return Failure(404, f"There is nothing at this path: {PATHS}.", code="not_found")
        case 405:
            return Failure(405, "This path does not take this method.", code="method_not_allowed")
        case 413:
            return Failure(413, "The body is too large: shorten it.", code="too_large")
        case _:
            return Failure(error.status, error.reason)


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()
