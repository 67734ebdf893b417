"""Spans of requests: names, times and parents; and collectors that take them, fail or hang."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from edge_server import EdgeServer
from fake_engine import wait_until
from msgspec.structs import replace

from vnext.server.context import traces
from vnext.server.context.traces import Traces, TracesUnusable, over_http, require_traces, traces_to

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
needs_otel = pytest.mark.skipif(
    not all(map(traces._is_there, traces.PACKAGES)), reason="the extra vnext[otel] is not installed"
)  # fmt: skip


@pytest.fixture
def spans() -> Any:
    """(server, finished spans), with an exporter in memory."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with EdgeServer() as server:
        server.context.traces = Traces(provider)
        yield server, exporter.get_finished_spans


@needs_otel
def test_a_request_is_one_span_with_its_phases_below(spans: Any) -> None:
    server, finished = spans
    body = {"prompt": "say:abc", "temperature": 0.5, "seed": 7, "max_tokens": 9, "n": 2, "stream": True}
    assert server.post("/v1/completions", body, traceparent=PARENT, tracestate="a=b")[0] == 200
    wait_until(lambda: len(finished()) == 7)
    *phases, call = finished()
    assert call.name == "text_completion toy" and call.kind.name == "SERVER" and call.status.is_ok
    assert format(call.context.trace_id, "032x") == PARENT[3:35] and format(call.parent.span_id, "016x") == PARENT[36:52]
    assert call.attributes.items() >= {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "vnext", "gen_ai.request.model": "toy",
        "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 7, "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 2, "gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
    }.items()  # fmt: skip
    assert call.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert [span.name for span in phases] == ["queue", "prefill", "decode"] * 2
    for queue, prefill, decode in (phases[:3], phases[3:]):
        assert all(span.parent.span_id == call.context.span_id for span in (queue, prefill, decode))
        times = [call.start_time, *(time for span in (queue, prefill, decode) for time in (span.start_time, span.end_time))]
        assert times == sorted(times) and decode.end_time <= call.end_time
        assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
        assert decode.attributes["gen_ai.usage.output_tokens"] == 4


@needs_otel
def test_no_text_leaves_with_a_span_and_an_error_is_named(spans: Any) -> None:
    server, finished = spans
    assert server.post("/v1/completions", {"prompt": "refuse me, a secret"})[0] == 400
    server.engine.running.clear()
    server.context.settings = replace(server.context.settings, request_timeout_s=0.1)
    assert server.post("/v1/embeddings", {"input": "a secret"})[0] == 504
    wait_until(lambda: len(finished()) == 2)
    refused, late = finished()
    assert (refused.name, refused.attributes["error.type"]) == ("text_completion toy", "Refused") and not refused.status.is_ok
    assert (late.name, late.attributes["error.type"]) == ("embeddings toy", "RequestTimedOut")
    assert late.attributes["gen_ai.usage.input_tokens"] == 8
    assert not any("secret" in str(span.attributes) + str(span.events) + str(span.status.description) for span in finished())


@needs_otel
@pytest.mark.parametrize("header", ["", "00-zz-yy-01", "x" * 5000, "00-00000000000000000000000000000000-0000000000000000-01"])
def test_a_malformed_parent_counts_as_none_and_none_stays_behind(spans: Any, header: str) -> None:
    server, finished = spans
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for parent in (PARENT, header):  # on one connection, whose requests share a task
        connection.request("POST", "/v1/completions", b'{"prompt": "say:a"}', {"Content-Type": "application/json", "traceparent": parent})
        assert connection.getresponse().read() is not None
    connection.close()
    wait_until(lambda: len(finished()) == 8)
    first, second = (span for span in finished() if span.name == "text_completion toy")
    assert first.parent is not None and second.parent is None and first.context.trace_id != second.context.trace_id


@needs_otel
def test_an_unsampled_parent_records_nothing(spans: Any) -> None:
    server, finished = spans
    assert server.post("/v1/completions", {"prompt": "say:a"}, traceparent=PARENT[:-1] + "0")[0] == 200
    assert server.post("/v1/completions", {"prompt": "say:a"})[0] == 200
    wait_until(lambda: len(finished()) == 4)


class Collector(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]
    paths: list[str]
    held: threading.Event

    def do_POST(self) -> None:
        self.paths.append(self.path)
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.held.wait(60)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def collector() -> Iterator[tuple[type[Collector], str]]:
    kind = type("Counting", (Collector,), {"bodies": [], "paths": [], "held": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield kind, f"http://127.0.0.1:{server.server_port}"
        finally:
            kind.held.set()
            server.shutdown()


@needs_otel
def test_a_collector_gets_the_spans_at_the_end_at_the_latest() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (seen, url):
        seen.held.set()
        with EdgeServer(otlp_traces_endpoint=url) as server:
            assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:a"}]})[0] == 200
            assert server.post("/v1/completions", {"prompt": "say:a"})[0] == 200
        wait_until(lambda: seen.bodies)
    assert set(seen.paths) == {"/v1/traces"}
    [resource] = ExportTraceServiceRequest.FromString(b"".join(seen.bodies)).resource_spans
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == "vnext"
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["chat toy", *["decode"] * 2, *["prefill"] * 2, *["queue"] * 2, "text_completion toy"]


@needs_otel
@pytest.mark.parametrize("fault", ["refuses", "hangs"])
def test_a_collector_that_fails_disturbs_no_stream_and_no_end(fault: str) -> None:
    asked = {"prompt": "say:" + "abc" * 20, "stream": True, "n": 2}
    with EdgeServer() as plain, collector() as (seen, url):
        expected = plain.openai().completions.create(model="toy", **asked)
        texts = sorted(chunk.choices[0].text for chunk in expected)
        with EdgeServer(otlp_traces_endpoint=url if fault == "hangs" else "http://127.0.0.1:9") as server:
            for _ in range(5):
                stream = server.openai().completions.create(model="toy", **asked)
                assert sorted(chunk.choices[0].text for chunk in stream) == texts
            server.context.traces._provider.force_flush(50)
            assert server.post("/v1/completions", {"prompt": "say:a"})[0] == 200
        assert not server._thread.is_alive()  # it has ended, without waiting for the collector


def test_a_collector_named_for_grpc_gets_spans_over_http() -> None:
    for given, url in [
        ("grpc://c:4317", "http://c:4318"), ("c:4317", "http://c:4318"), ("c:4318", "http://c:4318"), ("grpc://c", "http://c:4318"), ("grpcs://c:9", "https://c:9"),
        ("https://c:4317/x", "https://c:4317/x"), ("http://c", "http://c"), ("[::1]:4317", "http://[::1]:4318"),
    ]:  # fmt: skip
        assert over_http(given) == url
        require_traces(given)


@pytest.mark.parametrize("url", ["http://", "a", "ftp://a:1", ":4317", "grpc://", "grpc://a:b"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TracesUnusable, match="give an http URL"):
        require_traces(url)


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(traces, "find_spec", find)
    with pytest.raises(TracesUnusable, match=r"needs opentelemetry.sdk, which is missing: pip install 'vnext\[otel\]'"):
        traces_to("http://127.0.0.1:4318", ())
    assert traces_to("", ()) is None and importlib.util.find_spec("vnext") is not None
