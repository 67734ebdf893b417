"""Metrics of the API server in Prometheus' text format: the engine core's latest figures, and times as clients see them.

Owns a private registry (not the process's global one) and the names, all `vnext_*`. Where vLLM has the same metric, only the
prefix differs from its `vllm:`, so that its dashboards need one replacement. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count, takewhile

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vnext.runtime.messages import AdapterStats, EngineStats
from vnext.server.context.tallies import Histogram, LabelledCounter

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"})

Names = Mapping[str, tuple[str, str]]
"""Field -> (name, help)."""
_GAUGES: Names = {
    "running": ("vnext_num_requests_running", "Requests in the batch."),
    "waiting": ("vnext_num_requests_waiting", "Requests waiting to be admitted."),
    "blocks_total": ("vnext_blocks_total", "Blocks of the key-value cache."),
    "blocks_held": ("vnext_blocks_held", "Blocks that a running request holds."),
    "blocks_kept": ("vnext_blocks_kept", "Blocks that nobody holds and whose content may be used again."),
    "log_bytes": ("vnext_log_bytes", "Size of the engine's log."),
    "step_silent_seconds": ("vnext_step_silent_seconds", "For how long the oldest step in flight has had no result."),
}
_COUNTERS: Names = {
    "steps": ("vnext_steps", "Steps executed."),
    "arrived": ("vnext_requests_arrived", "Requests that arrived at the engine core."),
    "finished": ("vnext_requests_finished", "Requests that ended by themselves."),
    "aborted": ("vnext_requests_aborted", "Requests that were aborted."),
    "preempted": ("vnext_num_preemptions", "Preemptions."),
    "prompt_tokens": ("vnext_prompt_tokens", "Prompt tokens of arrived requests."),
    "generated_tokens": ("vnext_generation_tokens", "Tokens sampled."),
    "prefix_queried_tokens": ("vnext_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("vnext_prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "draft_tokens": ("vnext_spec_decode_num_draft_tokens", "Drafts computed."),
    "accepted_tokens": ("vnext_spec_decode_num_accepted_tokens", "Drafts that were kept."),
    "ring_stalls": ("vnext_ring_stalls", "Times at which the ring to the ranks was full."),
    "ring_stall_seconds": ("vnext_ring_stall_seconds", "Time for which it was."),
    "step_seconds_sum": ("vnext_step_seconds", "Time spent in steps."),
    "plan_seconds_sum": ("vnext_plan_seconds", "Time spent in planning."),
    "digest_checks": ("vnext_digest_checks", "Digests of ranks that were compared."),
    "log_frames_lost": ("vnext_log_frames_lost", "Frames of the log that a failing disk dropped."),
}
_ADAPTER_GAUGES: Names = {
    "slots": ("vnext_lora_slots", "LoRA adapters that may be in memory at once."),
    "resident": ("vnext_lora_resident", "LoRA adapters in memory."),
    "requests_waiting": ("vnext_lora_requests_waiting", "Waiting requests whose LoRA adapter is not in memory."),
}
_ADAPTER_COUNTERS: Names = {
    "loads": ("vnext_lora_loads", "LoRA adapters that were loaded."),
    "evictions": ("vnext_lora_evictions", "LoRA adapters that made room for others."),
}


class _EngineCollector(Collector):
    """Reads the latest EngineStats at each scrape; before the first has come, reports only whether the engine lives."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        alive: Callable[[], bool],
        stalled: Callable[[], bool],
        recovered: Callable[[], tuple[int, float]],
    ) -> None:
        self._stats = stats
        self._alive = alive
        self._stalled = stalled
        self._recovered = recovered

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("vnext_engine_up", "1 while the engine core lives.", value=float(self._alive()))
        stalled = "1 while the engine core does not answer, or a step takes far longer than it should."
        yield GaugeMetricFamily("vnext_engine_stalled", stalled, value=float(self._stalled()))
        recoveries, seconds = self._recovered()
        yield CounterMetricFamily("vnext_recoveries", "How often engine core or ranks were started again.", value=recoveries)
        yield CounterMetricFamily("vnext_recovery_seconds", "The time for which requests waited for that.", value=seconds)
        stats = self._stats()
        if stats is None:
            return
        usage = stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0
        yield GaugeMetricFamily("vnext_kv_cache_usage_perc", "Part of the blocks that requests hold; 1 is all.", value=usage)
        yield from _families(stats, _GAUGES, _COUNTERS)
        if stats.adapters is not None:
            yield from _families(stats.adapters, _ADAPTER_GAUGES, _ADAPTER_COUNTERS)
            yield _lora_requests_info(stats.adapters)


def _families(stats: object, gauges: Names, counters: Names) -> Iterator[Metric]:
    for field, (name, help_) in gauges.items():
        yield GaugeMetricFamily(name, help_, value=getattr(stats, field))
    for field, (name, help_) in counters.items():
        yield CounterMetricFamily(name, help_, value=getattr(stats, field))


def _lora_requests_info(adapters: AdapterStats) -> Metric:
    """vLLM's gauge, by which routers find a server that has an adapter: the names are labels, the value is the time."""
    family = GaugeMetricFamily(
        "vnext_lora_requests_info", "The LoRA adapters that running and waiting requests use; the value is the time in seconds.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )  # fmt: skip
    family.add_metric((str(adapters.slots), ",".join(adapters.running), ",".join(adapters.waiting)), time.time())
    return family


class ServerMetrics:
    """Histograms and counters of one API process. Every sample has labels for the model and the engine; there is one of each.

    `stats`: the engine core's latest; `alive` and `stalled`: its known health; `recovered`: number and seconds of recoveries;
    `length_max`: tokens of the longest request.
    """

    def __init__(
        self,
        model_name: str,
        length_max: int,
        stats: Callable[[], EngineStats | None],
        alive: Callable[[], bool],
        stalled: Callable[[], bool],
        recovered: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(stats, alive, stalled, recovered))
        seconds, lengths = self._histograms(_REQUEST_BUCKETS_S), self._histograms(_lengths_up_to(length_max))
        self.token = self._histograms(_TOKEN_BUCKETS_S)(
            "vnext_inter_token_latency_seconds", "Between two tokens of an answer; merged ones share their time."
        )
        self.first_token = self._histograms(_FIRST_TOKEN_BUCKETS_S)(
            "vnext_time_to_first_token_seconds", "From the body's arrival to an answer's first token."
        )
        self.token_mean = self._histograms(_TOKEN_BUCKETS_S)(
            "vnext_request_time_per_output_token_seconds", "Between two tokens, the mean of an answer."
        )
        self.request = seconds("vnext_e2e_request_latency_seconds", "From the body's arrival to an answer's end.")
        self.queue = seconds("vnext_request_queue_time_seconds", "From a request's arrival at the engine core to its first step.")
        self.prefill = seconds("vnext_request_prefill_time_seconds", "From a request's first step to its first token.")
        self.decode = seconds("vnext_request_decode_time_seconds", "From an answer's first token to its last.")
        self.inference = seconds("vnext_request_inference_time_seconds", "From a request's first step to its last token.")
        self.prompt_length = lengths("vnext_request_prompt_tokens", "Tokens of a prompt.")
        self.answer_length = lengths("vnext_request_generation_tokens", "Tokens of an answer.")
        self.ended = LabelledCounter("vnext_request_success", "Answers that ended, by the reason.", ("finished_reason",))
        self._http = LabelledCounter("vnext_http_requests", "HTTP requests answered.", ("method", "route", "status"))
        self.closed = LabelledCounter("vnext_connections_closed", "Connections closed by this server, by the reason.", ("reason",))
        self._registry.register(self.ended)
        self._registry.register(self.closed)
        self._registry.register(self._http)

    def http_request(self, method: str, route: str, status: int) -> None:
        """Count a request. `route` is a path of the server's table, so that a client cannot invent label values."""
        self._http.add(method if method in _KNOWN_METHODS else "other", route, str(status))

    def text(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """All families, with the labels added to each sample: figures counted per token are kept without labels."""
        for family in self._registry.collect():
            family.samples = [sample._replace(labels=self._labels | sample.labels) for sample in family.samples]
            yield family

    def _histograms(self, bounds: tuple[float, ...]) -> Callable[[str, str], Histogram]:
        def made(name: str, help_: str) -> Histogram:
            self._registry.register(histogram := Histogram(name, help_, bounds))
            return histogram

        return made


def _lengths_up_to(length_max: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... and the bound itself."""
    steps = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return (*takewhile(lambda length: length < length_max, steps), length_max)
