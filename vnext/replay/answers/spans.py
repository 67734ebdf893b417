"""Arrivals out of what other engines report of their requests: OpenTelemetry's spans as JSON, and SGLang's log of requests.

Owns these two formats, which are only read. Both tell counts and times, so that tokens are made up as for Mooncake's format, and
prompts share nothing unless their tokens are reported. Times count from the first request on.

    otlp     a request of OTLP over HTTP, or one a line as a collector's file exporter writes them. A request is a span with
             both counts of its tokens: vLLM's `llm_request`, SGLang's root span, vnext's own. Of spans within one another, as a
             client's and a server's, the innermost counts.
    sglang   lines of `--log-requests --log-requests-format json`, whatever stands between them. A request is one that finished;
             it came its `e2e_latency` before the time of its line. With --log-requests-level 3 its prompt is reported too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from vnext.replay.answers.arrivals import TOKENS_MAX, VOCABULARY, YEARS_NS, spelled
from vnext.replay.reading.source import UnusableLog
from vnext.state.events import RequestArrived, RequestId, pack_tokens
from vnext.state.params import TOKEN_ID_MAX, Sampling

PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
ANSWER = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
NAME = ("gen_ai.request.id", "gen_ai.response.id")
"""Attributes that mean the same: those of vLLM and SGLang, and OpenTelemetry's semantic conventions since."""
FINISHED = b'"request.finished"'
HEAD = re.compile(rb"^\[[^\]]*\] ")
"""What SGLang's loggers set before a line."""
SINCE = datetime(1970, 1, 1, tzinfo=UTC)


class Reported(NamedTuple):
    """A request. `prompt`: its tokens, None where only their count is reported. `began_ns` is of any clock."""

    began_ns: int
    prompt_tokens: int
    answer_tokens: int
    name: str = ""
    prompt: list[int] | None = None


def _arrivals(reported: Iterable[Reported], began_ns: int, vocabulary: int) -> Iterator[RequestArrived]:
    """The requests in order of arrival, each answer with its recorded length. Raises UnusableLog."""
    ordered = sorted(reported, key=lambda each: each.began_ns)
    if not ordered:
        raise UnusableLog("no request is reported there: none has both counts of tokens")
    if ordered[-1].began_ns - ordered[0].began_ns > YEARS_NS:
        raise UnusableLog("the first and the last request lie more than three years apart")
    for number, each in enumerate(ordered):
        prompt = spelled(number, each.prompt_tokens, vocabulary) if each.prompt is None else each.prompt
        yield RequestArrived(
            id=RequestId(number), name=each.name or f"request-{number}", prompt=pack_tokens(prompt),
            sampling=Sampling(seed=number, max_tokens=max(1, each.answer_tokens), ignore_eos=True), priority=0,
            arrival_ns=began_ns + each.began_ns - ordered[0].began_ns,
        )  # fmt: skip


def _sane(reported: Reported) -> Reported:
    if not 0 < reported.prompt_tokens <= TOKENS_MAX or not 0 <= reported.answer_tokens <= TOKENS_MAX:
        raise ValueError(f"it has {reported.prompt_tokens} tokens in its prompt and {reported.answer_tokens} in its answer")
    return reported


# ---- OpenTelemetry -----------------------------------------------------------------------------------------------


class Value(msgspec.Struct, frozen=True, rename="camel"):
    """Whole numbers are text in JSON of OTLP; some writers leave the quotes out."""

    int_value: int | str | None = None
    double_value: float | None = None
    string_value: str | None = None


class Attribute(msgspec.Struct, frozen=True):
    key: str
    value: Value = Value()


class Span(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Reading ignores other fields."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    start_time_unix_nano: int | str
    attributes: tuple[Attribute, ...] = ()


class Scope(msgspec.Struct, frozen=True):
    spans: tuple[Span, ...] = ()


class Resource(msgspec.Struct, frozen=True, rename="camel"):
    scope_spans: tuple[Scope, ...] = ()


class Export(msgspec.Struct, frozen=True, rename="camel"):
    resource_spans: tuple[Resource, ...]


_export_decoder = msgspec.json.Decoder(Export)


def from_otlp(lines: Iterable[bytes], began_ns: int, vocabulary: int = VOCABULARY) -> Iterator[RequestArrived]:
    """The requests of such lines, or of one JSON text over several. UnusableLog names the invalid line."""
    parents: dict[tuple[str, str], tuple[str, str]] = {}
    reported: dict[tuple[str, str], Reported] = {}
    for number, text in enumerate(_whole_texts(lines)):
        try:
            for span in _spans(_export_decoder.decode(text)):
                key = span.trace_id, span.span_id
                parents[key] = span.trace_id, span.parent_span_id
                if found := _reported(span):
                    reported[key] = found  # an export that was tried again counts once
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise UnusableLog(f"line {number + 1} is no export of OpenTelemetry's spans ({error})") from error
    outer: set[tuple[str, str]] = set()
    for key in reported:
        while (key := parents.get(key, key)) in parents and key not in outer:
            outer.add(key)
    yield from _arrivals((each for key, each in reported.items() if key not in outer), began_ns, vocabulary)


def _whole_texts(lines: Iterable[bytes]) -> Iterator[bytes]:
    lines = iter(lines)
    first = next(lines, b"")
    if first.strip() == b"{":
        yield first + b"".join(lines)
    else:
        yield first
        yield from lines


def _spans(export: Export) -> Iterator[Span]:
    return (span for resource in export.resource_spans for scope in resource.scope_spans for span in scope.spans)


def _reported(span: Span) -> Reported | None:
    """The request that a span tells of, None for another span. Raises ValueError."""
    known = {each.key: each.value for each in span.attributes}
    counts = [next((known[name] for name in names if name in known), None) for names in (PROMPT, ANSWER)]
    if None in counts:
        return None
    prompt, answer = (_whole(each) for each in counts if each is not None)
    began_ns = int(span.start_time_unix_nano)
    if not 0 < began_ns < 2**63:
        raise ValueError(f"a span's startTimeUnixNano is {began_ns}")
    name = next((known[each].string_value or "" for each in NAME if each in known), "")
    return _sane(Reported(began_ns, prompt, answer, name))


def _whole(value: Value) -> int:
    number = value.int_value if value.int_value is not None else value.double_value
    if number is None or int(number) != float(number):
        raise ValueError(f"a count of tokens is {number}")
    return int(number)


# ---- SGLang ------------------------------------------------------------------------------------------------------


class Meta(msgspec.Struct, frozen=True):
    """`completion_tokens`: None of an embedding. `e2e_latency`: seconds."""

    prompt_tokens: int
    e2e_latency: float
    completion_tokens: int | None = None


class Out(msgspec.Struct, frozen=True):
    meta_info: Meta


class Asked(msgspec.Struct, frozen=True):
    """`input_ids`: of the whole prompt, or of its ends around "..."."""

    input_ids: object = None


class Finished(msgspec.Struct, frozen=True):
    """Reading ignores other fields."""

    timestamp: datetime
    out: Out
    rid: object = None
    obj: Asked = Asked()


_finished_decoder = msgspec.json.Decoder(Finished)


def is_sglang(lines: Iterable[bytes]) -> bool:
    """Whether a file has lines of this log."""
    return any(b'"event": "request.' in line for line in lines)


def from_sglang(lines: Iterable[bytes], began_ns: int, vocabulary: int = VOCABULARY) -> Iterator[RequestArrived]:
    """The requests of such lines. UnusableLog names the invalid line."""
    reported: list[Reported] = []
    for number, line in enumerate(lines):
        if FINISHED not in line:
            continue
        try:
            finished = _finished_decoder.decode(HEAD.sub(b"", line))
            if finished.out.meta_info.completion_tokens is not None:
                reported.append(_sane(_reported_by(finished, finished.out.meta_info)))
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise UnusableLog(f"line {number + 1} is no finished request of SGLang's log ({error})") from error
    yield from _arrivals(reported, began_ns, vocabulary)


def _reported_by(finished: Finished, meta: Meta) -> Reported:
    ended = finished.timestamp if finished.timestamp.tzinfo else finished.timestamp.replace(tzinfo=UTC)
    began_us = (ended - SINCE - timedelta(seconds=meta.e2e_latency)) // timedelta(microseconds=1)
    name = finished.rid if isinstance(finished.rid, str) else ""
    return Reported(began_us * 1000, meta.prompt_tokens, meta.completion_tokens or 0, name, _whole_prompt(finished, meta))


def _whole_prompt(finished: Finished, meta: Meta) -> list[int] | None:
    """The tokens that a line tells, None where it tells not all."""
    given = finished.obj.input_ids
    if not isinstance(given, list) or len(given) != meta.prompt_tokens:
        return None
    tokens = [each for each in given if type(each) is int and 0 <= each <= TOKEN_ID_MAX]
    return tokens if len(tokens) == len(given) else None
