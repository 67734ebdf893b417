"""Metrics of the router in Prometheus' text format, all named vnext_router_*."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vnext.gateway.backends import Backend
from vnext.server.context.tallies import Histogram, LabelledCounter

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Backends(Collector):
    """The servers at this moment."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("vnext_router_backend_up", "1 while the server gets requests.", labels=("backend", "view"))
        running = GaugeMetricFamily("vnext_router_running", "Requests whose answer has begun.", labels=("backend",))
        waiting = GaugeMetricFamily("vnext_router_waiting", "Requests whose answer has not begun.", labels=("backend",))
        tokens = GaugeMetricFamily("vnext_router_waiting_tokens", "Prompt tokens of those, about.", labels=("backend",))
        for each in self._backends:
            up.add_metric((each.url, each.view), float(each.is_ready))
            running.add_metric((each.url,), each.running)
            waiting.add_metric((each.url,), each.waiting)
            tokens.add_metric((each.url,), each.waiting_tokens)
        yield from (up, running, waiting, tokens)


class _Models(Collector):
    """Those of a server with several."""

    def __init__(self, states: Callable[[], Mapping[str, str]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("vnext_router_model_loaded", "1 while the model is loaded.", labels=("model",))
        for name, state in self._states().items():
            loaded.add_metric((name,), float(state == "loaded"))
        yield loaded


class RouterMetrics:
    """Counters of one router."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.http = LabelledCounter("vnext_router_http_requests", "HTTP requests answered, by their status.", ("status",))
        self.failed = LabelledCounter(
            "vnext_router_backend_failures", "Requests and streams that a server did not answer to the end.", ("backend", "reason")
        )
        self.continued = LabelledCounter("vnext_router_streams_continued", "Times that a stream went on at another server.", ())
        self.lost = LabelledCounter("vnext_router_streams_lost", "Streams that ended with an error, because none could.", ())
        self.closed = LabelledCounter("vnext_router_connections_closed", "Connections closed by the router.", ("reason",))
        self.first_byte = Histogram(
            "vnext_router_first_byte_seconds", "From a request's arrival to the first byte of its answer.", _SECONDS
        )
        for each in (_Backends(backends), self.http, self.failed, self.continued, self.lost, self.closed, self.first_byte):
            self._registry.register(each)

    def follow(self, states: Callable[[], Mapping[str, str]]) -> None:
        """Show the models of a server with several, by the state of each."""
        self._registry.register(_Models(states))

    def text(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self._registry)
