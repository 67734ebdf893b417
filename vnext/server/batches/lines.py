"""Lines of a batch: OpenAI's JSONL for the requests, their answers and their errors.

Owns the format and its checks. Reads a file line by line, and of each line no more than a request's body may have.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.http.bodies import Values

LINES_MAX = 50_000
ERRORS_MAX = 10
"""Faults that are reported of one file."""
PIECE_BYTES = 2**16
PRIORITY = 1_000
"""The priority of a request that has none: behind every live request, where the scheduling policy reads it."""
WITH_PRIORITY = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class LineBounds(NamedTuple):
    """What a line may have, as a request's body: bytes, and numbers or other values."""

    bytes: int
    numbers: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line is no request; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Answer(NamedTuple):
    """The response to a request: its status, its X-Request-Id and its JSON."""

    status: int
    request_id: str
    body: Any

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_fault(self) -> bool:
        """Whether the server failed before the request had its answer: another try may get one."""
        return self.status >= 500


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str


RESULT_BEGINS = b'{"id":"batch_req_'
_decoder, _result_decoder = msgspec.json.Decoder(Request), msgspec.json.Decoder(_Result)


def requests_of(path: Path, bounds: LineBounds, endpoint: str = "") -> Iterator[Request | Fault]:
    """The requests of a file in order, and a Fault in place of a line that is none. Blank lines count for nothing. `endpoint`:
    the one path that every request must name, "" for any. A line takes long enough to keep an event loop from its work."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, data in enumerate(_lines(file, bounds.bytes), 1):
            data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            if not data.strip():
                continue
            if len(seen) >= LINES_MAX:
                yield Fault(code="too_many_lines", message=f"The file has more than {LINES_MAX} requests: split it.", line=number)
                return
            found = _too_much(data, number, bounds) or _request(data, number, endpoint, seen)
            if isinstance(found, Request):
                seen.add(found.custom_id)
            yield found


def faults_of(path: Path, bounds: LineBounds, endpoint: str) -> tuple[int, list[Fault]]:
    """The number of requests in a file, and its first faults; an empty file is one."""
    count, faults = 0, []
    for found in requests_of(path, bounds, endpoint):
        if isinstance(found, Fault):
            faults.append(found)
            if len(faults) == ERRORS_MAX:
                break
        else:
            count += 1
    if not count and not faults:
        faults.append(Fault(code="empty_file", message="The file holds no request: write one JSON object per line."))
    return count, faults


def body_of(request: Request) -> bytes:
    usual = {"priority": PRIORITY} if request.url in WITH_PRIORITY else {}
    return msgspec.json.encode(usual | request.body)


def result_line(custom_id: str, answer: Answer) -> bytes:
    """The line of an output or an error file."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"


def answered(path: Path) -> set[str]:
    """The custom ids of a result file's whole lines. Cuts off a last line that was being written when its writer ended. Raises
    MsgspecError for a file of something else, which stays as it is."""
    if not path.is_file():
        return set()
    data = path.read_bytes()
    if data and not data.startswith(RESULT_BEGINS[: len(data)]):
        raise msgspec.DecodeError("its lines are no results")
    whole = data[: data.rfind(b"\n") + 1]
    found = {_result_decoder.decode(line).custom_id for line in whole.splitlines()}
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return found


def _lines(file: BinaryIO, bytes_max: int) -> Iterator[bytes]:
    """The lines of a file; of one with more than `bytes_max` bytes only its first ones, one more than it may have."""
    while data := file.readline(bytes_max + 1):
        rest = data
        while rest and not rest.endswith(b"\n") and len(data) > bytes_max:
            rest = file.readline(PIECE_BYTES)
        yield data


def _too_much(data: bytes, number: int, bounds: LineBounds) -> Fault | None:
    """Why a line is not decoded: a decoder that is at work lets no other thread run."""
    if len(data.rstrip(b"\r\n")) > bounds.bytes:
        sentence = f"Line {number} has more than {bounds.bytes} bytes: write shorter requests, one JSON object per line."
        return Fault(code="line_too_long", message=sentence, line=number)
    values = Values(bounds.numbers)
    try:
        for start in range(0, len(data), PIECE_BYTES):
            values.count(data[start : start + PIECE_BYTES])
    except InvalidRequest as error:
        return Fault(code="line_too_long", message=f"Line {number}: {error}", line=number, param="body")
    return None


def _request(data: bytes, number: int, endpoint: str, seen: set[str]) -> Request | Fault:
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Fault(code="invalid_json_line", message=f"Line {number} is no request: {error}.", line=number)
    if found.method != "POST":
        return _wrong(number, "method", f"method is {found.method[:40]!r}: only POST is possible")
    if found.url != (endpoint or found.url):
        return _wrong(number, "url", f"url is {found.url[:80]!r}: the batch's endpoint is {endpoint}")
    if found.custom_id in seen:
        return _wrong(number, "custom_id", f"custom_id {found.custom_id[:80]!r} stands in an earlier line too: make each unique")
    if found.body.get("stream"):
        return _wrong(number, "body.stream", "a batch's answers are whole: leave stream out")
    return found


def _wrong(number: int, param: str, sentence: str) -> Fault:
    return Fault(code="invalid_request", message=f"Line {number}: {sentence}.", line=number, param=param)
