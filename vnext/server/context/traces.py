"""Traces: one OpenTelemetry span a request, with spans of its queue, prefill and decode below it, sent by OTLP over HTTP.

Owns the names, which are OpenTelemetry's semantic conventions for generative AI (gen_ai.*, version 1.45), and the exporter.
Spans hold counts, times and parameters, never a text. Export runs in a thread of its own with a bounded queue: a collector that
fails or hangs costs spans, and no stream. The packages are the extra vnext[otel]; without --otlp-traces-endpoint nothing of
this is imported.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from vnext.base.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)
SHUTDOWN_S = 2.0
PATH = "/v1/traces"
PROVIDER = "vnext"
GRPC_PORT, HTTP_PORT = "4317", "4318"
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_PARENT: ContextVar[Context | None] = ContextVar("parent", default=None)
"""Whose child the span of this task's request is: what its traceparent says."""


class TracesUnusable(Exception):
    """Traces cannot be sent: one sentence with the remedy."""


class AnswerTimes(NamedTuple):
    """One answer, monotonic seconds: when it went to the engine, its first step, its first token and its last; 0 where there was
    none. `reason` ended it."""

    submitted_s: float
    begun_s: float
    first_s: float
    last_s: float
    tokens: int
    reason: str


class CallTrace:
    """The span of one call. Mutable."""

    def __init__(self, traces: Traces, operation: str, model: str, started_s: float, attributes: Mapping[str, Any]) -> None:
        from opentelemetry import trace

        self._trace, self._tracer, self._offset_ns = trace, traces.tracer, time.time_ns() - time.monotonic_ns()
        named = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}
        self._span = self._tracer.start_span(
            f"{operation} {model}", _PARENT.get(), trace.SpanKind.SERVER, {**named, **attributes}, start_time=self._ns(started_s)
        )
        self._below = trace.set_span_in_context(self._span)
        self._started_s, self._reasons = started_s, list[str]()
        self._first_s = 0.0

    def answer(self, times: AnswerTimes) -> None:
        self._reasons.append(times.reason)
        begun_s, first_s = times.begun_s, times.first_s
        phases = (("queue", times.submitted_s, begun_s), ("prefill", begun_s, first_s), ("decode", first_s, times.last_s))
        for name, start_s, end_s in phases:
            if first_s:
                tokens = {"gen_ai.usage.output_tokens": times.tokens} if name == "decode" else {}
                below = self._tracer.start_span(name, self._below, attributes=tokens, start_time=self._ns(start_s))
                below.end(self._ns(max(start_s, end_s)))
        if first_s:
            self._first_s = min(self._first_s or first_s, first_s)

    def end(self, attributes: Mapping[str, Any], error: BaseException | None) -> None:
        """The call has ended, with `error` where it failed. An error's sentence stays out: it may quote the request."""
        self._span.set_attributes({**attributes, "gen_ai.response.finish_reasons": tuple(self._reasons)})
        if self._first_s:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", self._first_s - self._started_s)
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        self._span.end()

    def _ns(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9) + self._offset_ns


class Traces:
    """Makes the spans of one API process over an SDK's provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("vnext", __version__)

    def accept(self, headers: Mapping[str, str]) -> None:
        """A request with these headers begins in this task. A malformed traceparent counts as none."""
        carried = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        if carried:  # each request has a task of its own
            _PARENT.set(self._propagator.extract(carried))

    async def close(self) -> None:
        """Send what waits, for at most SHUTDOWN_S."""
        ending = threading.Thread(target=self._provider.shutdown, name="vnext-traces-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, SHUTDOWN_S)


@contextmanager
def call_trace(
    traces: Traces | None, operation: str, model: str, started_s: float, attributes: Mapping[str, Any]
) -> Iterator[tuple[CallTrace | None, dict[str, Any]]]:
    """The trace of a call, None without traces, and the attributes that its end adds."""
    added: dict[str, Any] = {}
    if traces is None:
        yield None, added
        return
    trace = CallTrace(traces, operation, model, started_s, {name: each for name, each in attributes.items() if each is not None})
    try:
        yield trace, added
    except BaseException as error:
        trace.end(added, error)
        raise
    trace.end(added, None)


def require_traces(endpoint: str) -> None:
    """Raise TracesUnusable for a URL that is none, and where the packages are missing; "" is fine."""
    if not endpoint:
        return
    if urlsplit(over_http(endpoint)).scheme not in ("http", "https") or not urlsplit(over_http(endpoint)).netloc:
        raise TracesUnusable(f"--otlp-traces-endpoint is {endpoint!r}: give an http URL, such as http://127.0.0.1:4318/v1/traces")
    missing = [name for name in PACKAGES if not _is_there(name)]
    if missing:
        raise TracesUnusable(f"--otlp-traces-endpoint needs {missing[0]}, which is missing: pip install 'vnext[otel]'")


def over_http(endpoint: str) -> str:
    """The URL at which a collector takes spans over HTTP: of grpc://HOST:4317, and of HOST:4317 alone, as vLLM has it, the usual
    port beside it."""
    scheme, is_url, place = endpoint.rpartition("://")
    host, _, port = place.rstrip("/").rpartition(":")
    if is_url and not host:
        host, port = port, GRPC_PORT
    if (is_url and scheme not in ("grpc", "grpcs")) or not host or not port.isdigit():
        return endpoint
    place = f"{host}:{HTTP_PORT if port == GRPC_PORT else port}"
    return f"http{'s' if scheme == 'grpcs' else ''}://{place}"


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # not even what it lies in
        return False


def traces_to(endpoint: str, model_names: Sequence[str]) -> Traces | None:
    """Traces for a collector's URL, "" for none. Variables OTEL_* of the SDK hold, such as OTEL_RESOURCE_ATTRIBUTES and
    OTEL_TRACES_SAMPLER. Raises TracesUnusable."""
    require_traces(endpoint)
    if not endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = {"service.name": "vnext", "service.version": __version__, "vnext.models": tuple(model_names)}
    provider = TracerProvider(resource=Resource.create(about).merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    if (url := over_http(endpoint)) != endpoint:
        log.warning("Traces go over HTTP to %s: --otlp-traces-endpoint is %s, and vnext speaks no gRPC.", url, endpoint)
        endpoint = url
    path = "" if urlsplit(endpoint).path.strip("/") else PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)))
    return Traces(provider)


def usage_attributes(usage: Mapping[str, Any]) -> dict[str, int]:
    """An answer's usage, in OpenTelemetry's names."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    } | ({"gen_ai.usage.cache_read.input_tokens": cached} if cached else {})
