"""Metrics of the edge, in Prometheus' text form: what the engine core last said, and times measured where clients are.

Owns one registry of its own (none of the process's global ones) and the names, all `vnext_*`. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vnext.runtime.messages import EngineStats

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"})

_GAUGES = {
    "running": ("vnext_requests_running", "Requests in the batch."),
    "waiting": ("vnext_requests_waiting", "Requests waiting to be admitted."),
    "blocks_total": ("vnext_blocks_total", "Blocks of the key-value cache."),
    "blocks_held": ("vnext_blocks_held", "Blocks that a running request holds."),
    "blocks_kept": ("vnext_blocks_kept", "Blocks that nobody holds and whose content may be used again."),
    "log_bytes": ("vnext_log_bytes", "Size of the engine's log."),
}
_COUNTERS = {
    "steps": ("vnext_steps", "Steps executed."),
    "arrived": ("vnext_requests_arrived", "Requests that arrived at the engine core."),
    "finished": ("vnext_requests_finished", "Requests that ended by themselves."),
    "aborted": ("vnext_requests_aborted", "Requests that were aborted."),
    "preempted": ("vnext_preemptions", "Preemptions."),
    "prompt_tokens": ("vnext_prompt_tokens", "Prompt tokens of arrived requests."),
    "generated_tokens": ("vnext_generated_tokens", "Tokens sampled."),
    "prefix_queried_tokens": ("vnext_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("vnext_prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "ring_stalls": ("vnext_ring_stalls", "Times at which the ring to the ranks was full."),
    "ring_stall_seconds": ("vnext_ring_stall_seconds", "Time for which it was."),
    "step_seconds_sum": ("vnext_step_seconds", "Time spent in steps."),
    "plan_seconds_sum": ("vnext_plan_seconds", "Time spent in planning."),
    "digest_checks": ("vnext_digest_checks", "Digests of ranks that were compared."),
    "log_frames_lost": ("vnext_log_frames_lost", "Frames of the log that a failing disk dropped."),
}


class _EngineCollector(Collector):
    """Reads the latest EngineStats when it is asked; says only whether the engine lives before the first has come."""

    def __init__(self, stats: Callable[[], EngineStats | None], alive: Callable[[], bool]) -> None:
        self._stats = stats
        self._alive = alive

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("vnext_engine_up", "1 while the engine core lives.", value=float(self._alive()))
        stats = self._stats()
        if stats is None:
            return
        for field, (name, help_) in _GAUGES.items():
            yield GaugeMetricFamily(name, help_, value=getattr(stats, field))
        for field, (name, help_) in _COUNTERS.items():
            yield CounterMetricFamily(name, help_, value=getattr(stats, field))


class EdgeMetrics:
    """Histograms and counters of one API process."""

    def __init__(self, stats: Callable[[], EngineStats | None], alive: Callable[[], bool]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(stats, alive))
        self.first_token = self._histogram(
            "vnext_time_to_first_token_seconds",
            "From the body's arrival to an answer's first token.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self.token = self._histogram(
            "vnext_inter_token_seconds",
            "Between two tokens of an answer; merged ones share their time.",
            _TOKEN_BUCKETS_S,
        )
        self.request = self._histogram(
            "vnext_request_seconds", "From the body's arrival to an answer's end.", _REQUEST_BUCKETS_S
        )
        self._http = Counter(
            "vnext_http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=self._registry
        )

    def http_request(self, method: str, route: str, status: int) -> None:
        """Count one; `route` is a path of our own table, so that a client cannot make up label values."""
        self._http.labels(method if method in _KNOWN_METHODS else "other", route, str(status)).inc()

    def text(self) -> bytes:
        """The exposition that /metrics answers."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_, buckets=buckets_s, registry=self._registry)


class Stopwatch:
    """The times of one answer since its request's body arrived (`started_s`, monotonic)."""

    __slots__ = ("_last_s", "_metrics", "_started_s")

    def __init__(self, metrics: EdgeMetrics, started_s: float) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._last_s: float | None = None

    def tokens(self, count: int, finished: bool) -> None:
        """`count` tokens have come now."""
        now_s = time.monotonic()
        if count:
            self._observe(count, now_s)
            self._last_s = now_s
        if finished:
            self._metrics.request.observe(now_s - self._started_s)

    def _observe(self, count: int, now_s: float) -> None:
        if self._last_s is None:
            self._metrics.first_token.observe(now_s - self._started_s)
            count, self._last_s = count - 1, now_s
        for _ in range(count):
            self._metrics.token.observe((now_s - self._last_s) / count)
