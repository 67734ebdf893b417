"""Metrics of the API server in Prometheus' text format: the engine core's latest figures, and the times of answers as clients see
them.

Owns its collection (not the process's global registry) and the names, all `vnext_*`. Where vLLM has the same metric, only the
prefix differs from its `vllm:`, so that its dashboards need one replacement. Each token updates one histogram; everything else is
observed once, at the answer's end. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple, Protocol

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vnext.runtime.protocol.messages import EngineStats
from vnext.runtime.protocol.stats import AdapterStats, CacheLosses, ExpertStats
from vnext.server.context.admission import WaitingPrompts
from vnext.server.context.tallies import Histogram, LabelledCounter, TallyFile
from vnext.server.context.traces import AnswerTimes, CallTrace

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"})

Names = Mapping[str, tuple[str, str]]
Shown = Callable[[Iterable[str]], Iterable[str]]
"""Field -> (name, help)."""
_GAUGES: Names = {
    "running": ("vnext_num_requests_running", "Requests in the batch."),
    "waiting": ("vnext_num_requests_waiting", "Requests waiting to be admitted."),
    "blocks_total": ("vnext_blocks", "Blocks of the key-value cache."),
    "blocks_held": ("vnext_blocks_held", "Blocks that a running request holds."),
    "blocks_kept": ("vnext_blocks_kept", "Free blocks whose content a later request can still reuse."),
    "log_bytes": ("vnext_log_bytes", "Size of the engine's log."),
    "step_tokens_max": ("vnext_step_tokens_max", "Tokens that a step may take now."),
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
    "spoilt": ("vnext_requests_spoilt", "Requests that ended because the model computed what is no number (NaN)."),
    "shortages": ("vnext_memory_shortages", "Steps that lacked memory."),
    "log_frames_lost": ("vnext_log_frames_lost", "Frames of the log that a failing disk dropped."),
}
LOST = "Prompt tokens that the prefix cache could have had, by the reason why it had not."
_ADAPTER_GAUGES: Names = {
    "slots": ("vnext_lora_slots", "LoRA adapters that may be in memory at once."),
    "resident": ("vnext_lora_resident", "LoRA adapters in memory."),
    "requests_waiting": ("vnext_lora_requests_waiting", "Waiting requests whose LoRA adapter is not in memory."),
}
_ADAPTER_COUNTERS: Names = {
    "loads": ("vnext_lora_loads", "LoRA adapters that were loaded."),
    "evictions": ("vnext_lora_evictions", "LoRA adapters that made room for others."),
}
_TIER_GAUGES: Names = {
    "blocks": ("vnext_kv_disk_blocks", "Blocks of the disk tier."),
    "capacity": ("vnext_kv_disk_blocks_max", "Blocks that the disk tier may have."),
    "snapshots": ("vnext_kv_disk_snapshots", "Snapshots of recurrent layers in the disk tier."),
    "snapshots_max": ("vnext_kv_disk_snapshots_max", "Snapshots that it may have."),
}
_TIER_COUNTERS: Names = {
    "stored": ("vnext_kv_disk_stored", "Blocks that were written to the disk tier."),
    "promoted": ("vnext_kv_disk_promoted", "Blocks that were read back from the disk tier."),
    "gone": ("vnext_kv_disk_gone", "Blocks that left the disk tier."),
    "snapshots_promoted": ("vnext_kv_disk_snapshots_promoted", "Snapshots that were read back."),
    "damaged": ("vnext_kv_disk_damaged", "Blocks that were not on disk as they were written."),
    "missed": ("vnext_kv_disk_missed", "Blocks that left memory before they were written."),
    "errors": ("vnext_kv_disk_errors", "Blocks that could not be written; behind the first, no more are."),
    "given_up": ("vnext_kv_disk_given_up", "Transfers from disk that were given up."),
    "received": ("vnext_kv_handover_received", "Blocks that came from other engines."),
    "absent": ("vnext_kv_handover_absent", "Blocks that other engines had computed and that could not be had."),
}

_PIN_GAUGES: Names = {
    "blocks": ("vnext_kv_pinned_blocks", "Blocks that are pinned."),
    "capacity": ("vnext_kv_pinned_blocks_max", "Blocks that may be pinned."),
}
_PIN_COUNTERS: Names = {
    "pinned": ("vnext_kv_pins", "Blocks that were pinned."),
    "expired": ("vnext_kv_pins_expired", "Pins whose time was over."),
    "displaced": ("vnext_kv_pins_displaced", "Pins that gave way to others that last longer."),
    "yielded": ("vnext_kv_pins_yielded", "Pins that gave way to a request that nothing else served."),
    "dropped": ("vnext_kv_pins_dropped", "Pins that ended with everything in the cache."),
}
_STATE_GAUGES: Names = {
    "pages": ("vnext_state_pages", "Pages for the states of recurrent layers."),
    "held": ("vnext_state_pages_held", "State pages that running requests hold."),
    "snapshots": ("vnext_state_snapshots", "State pages with which a later request can go on."),
}

_EXPERT_COUNTERS: Names = {
    "all": ("vnext_expert_tokens", "Tokens that a layer's experts got, one for each expert of a token."),
    "busiest": ("vnext_expert_busiest_tokens", "Of these those of each interval's busiest expert."),
    "busiest_rank": ("vnext_expert_busiest_rank_tokens", "Of these the busiest rank's."),
}


class EngineFigures(Protocol):
    """What the metrics read of an engine: that of EngineClient."""

    @property
    def stats(self) -> EngineStats | None: ...

    @property
    def death(self) -> str | None: ...

    @property
    def trouble(self) -> str | None: ...

    @property
    def recoveries(self) -> int: ...

    @property
    def recovery_seconds(self) -> float: ...


def _of_engine(engine: EngineFigures, shown: Shown) -> Iterator[Metric]:
    """The latest figures; before the first have come, only whether the engine lives."""
    yield GaugeMetricFamily("vnext_engine_up", "1 while the engine core lives.", value=float(engine.death is None))
    stalled = "1 while the engine core does not answer, or a step takes far longer than it should."
    yield GaugeMetricFamily("vnext_engine_stalled", stalled, value=float(engine.trouble is not None))
    recoveries = "How often engine core or ranks were started again."
    yield CounterMetricFamily("vnext_recoveries", recoveries, value=engine.recoveries)
    seconds = "The time for which requests waited for that."
    yield CounterMetricFamily("vnext_recovery_seconds", seconds, value=engine.recovery_seconds)
    stats = engine.stats
    if stats is None:
        return
    usage = stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0
    yield GaugeMetricFamily("vnext_kv_cache_usage_perc", "Part of the blocks that requests hold; 1 is all.", value=usage)
    yield from _families(stats, _GAUGES, _COUNTERS)
    lost = CounterMetricFamily("vnext_prefix_cache_lost_tokens", LOST, labels=("reason",))
    for reason in CacheLosses.__struct_fields__:
        lost.add_metric((reason,), getattr(stats.lost, reason))
    yield lost
    if stats.adapters is not None:
        yield from _families(stats.adapters, _ADAPTER_GAUGES, _ADAPTER_COUNTERS)
        yield _lora_requests_info(stats.adapters, shown)
    if stats.tier is not None:
        yield from _families(stats.tier, _TIER_GAUGES, _TIER_COUNTERS)
    if stats.pins is not None:
        yield from _families(stats.pins, _PIN_GAUGES, _PIN_COUNTERS)
    if stats.states is not None:
        yield from _families(stats.states, _STATE_GAUGES, {})
    if stats.experts is not None:
        yield from _expert_load(stats.experts)


def _expert_load(stats: ExpertStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("vnext_experts", "Experts of a layer.", value=stats.experts)
    for field, (name, help_) in _EXPERT_COUNTERS.items():
        family = CounterMetricFamily(name, help_, labels=("layer",))
        for layer in stats.layers:
            family.add_metric((str(layer.layer),), getattr(layer, field))
        yield family


def _families(stats: object, gauges: Names, counters: Names) -> Iterator[Metric]:
    for field, (name, help_) in gauges.items():
        yield GaugeMetricFamily(name, help_, value=getattr(stats, field))
    for field, (name, help_) in counters.items():
        yield CounterMetricFamily(name, help_, value=getattr(stats, field))


def _lora_requests_info(adapters: AdapterStats, shown: Shown) -> Metric:
    """vLLM's gauge, by which routers find a server that has an adapter: the names are labels, the value is the time."""
    family = GaugeMetricFamily(
        "vnext_lora_requests_info", "The LoRA adapters that running and waiting requests use; the value is the time in seconds.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )  # fmt: skip
    family.add_metric((str(adapters.slots), ",".join(shown(adapters.running)), ",".join(shown(adapters.waiting))), time.time())
    return family


class Times(NamedTuple):
    """The parts of an answer's time, in seconds."""

    request: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram


class ServerMetrics:
    """Histograms and counters of one API process, and their sums over those of one port. Every sample has labels for the model and
    the engine. Where there are several engines, the label of what clients see is "all", because a request may go on at another.

    `length_max`: tokens of the longest request. `file`: where the values lie, for the other processes to read. `shown`: those of
    some adapters' names that everyone may know.
    """

    def __init__(
        self, model_name: str, length_max: int, engines: Sequence[EngineFigures], file: TallyFile | None = None,
        shown: Shown = list,
    ) -> None:  # fmt: skip
        self._of_engines, self._file = partial(map, partial(_of_engine, shown=shown), engines), file or TallyFile()
        self._tallies: list[Histogram | LabelledCounter] = []
        self._labels = {"model_name": model_name, "engine": "0" if len(engines) == 1 else "all"}
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
        self.times = Times(
            seconds("vnext_e2e_request_latency_seconds", "From the body's arrival to an answer's end."),
            seconds("vnext_request_queue_time_seconds", "From a request's arrival at the engine core to its first step."),
            seconds("vnext_request_prefill_time_seconds", "From a request's first step to its first token."),
            seconds("vnext_request_decode_time_seconds", "From an answer's first token to its last."),
            seconds("vnext_request_inference_time_seconds", "From a request's first step to its last token."),
        )
        self.prompt_length = lengths("vnext_request_prompt_tokens", "Tokens of a prompt.")
        self.answer_length = lengths("vnext_request_generation_tokens", "Tokens of an answer.")
        self.ended = self._counter("vnext_request_success", "Answers that ended, by the reason.", "finished_reason")
        self.closed = self._counter("vnext_connections_closed", "Connections closed by this server, by the reason.", "reason")
        self._http = self._counter("vnext_http_requests", "HTTP requests answered.", "method", "route", "status")

    def http_request(self, method: str, route: str, status: int) -> None:
        """Count a request. `route` is a path of the server's table, so that a client cannot invent label values."""
        self._http.add(method if method in _KNOWN_METHODS else "other", route, str(status))

    def text(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """All families, with the labels added to each sample: figures counted per token are kept without labels."""
        of_engines: dict[str, Metric] = {}
        for number, families in enumerate(self._of_engines()):
            for family in families:
                _add_labels(family, self._labels | {"engine": str(number)})
                if (first := of_engines.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        yield from of_engines.values()
        sums = self._file.sums()
        for each in self._tallies:
            _add_labels(family := each.family(sums), self._labels)
            yield family

    def _histograms(self, bounds: tuple[float, ...]) -> Callable[[str, str], Histogram]:
        def made(name: str, help_: str) -> Histogram:
            self._tallies.append(histogram := Histogram(name, help_, bounds, self._file))
            return histogram

        return made

    def _counter(self, name: str, help_: str, *labels: str) -> LabelledCounter:
        self._tallies.append(counter := LabelledCounter(name, help_, labels, self._file))
        return counter


def _add_labels(family: Metric, labels: dict[str, str]) -> None:
    family.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]


def _lengths_up_to(length_max: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... and the bound itself."""
    steps = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return (*takewhile(lambda length: length < length_max, steps), length_max)


class Stopwatch:
    """Runs since its request's body arrived (`started_s`, monotonic); made right before the request goes to the engine core, which
    reports the waiting time `queue_s`: the stopwatch measures from the first step on, by one clock."""

    __slots__ = (
        "_count", "_first_s", "_last_s", "_metrics", "_prompt_length", "_started_s", "_submitted_s", "queue_s", "trace", "waiting",
    )  # fmt: skip

    def __init__(self, metrics: ServerMetrics, started_s: float, prompt_length: int) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._submitted_s = time.monotonic()
        self._prompt_length = prompt_length
        self.queue_s = 0.0
        self._first_s = self._last_s = 0.0
        self._count = 0
        self.waiting: WaitingPrompts | None = None  # what the first token ends
        self.trace: CallTrace | None = None

    def tokens(self, count: int) -> None:
        """Record that `count` tokens have come now."""
        now_s = time.monotonic()
        if self._count:
            self._metrics.token.observe((now_s - self._last_s) / count, count)
        else:
            self._first_s = now_s
            if self.waiting is not None:
                self.waiting.begun(self._prompt_length)
            self._metrics.first_token.observe(now_s - self._started_s)
            if count > 1:
                self._metrics.token.observe(0.0, count - 1)
        self._count += count
        self._last_s = now_s

    def end(self, reason: str) -> None:
        """Record the answer's end. An aborted answer ("abort", not "stop" or "length") leaves no times: they would mean nothing."""
        metrics, times = self._metrics, self._metrics.times
        metrics.ended.add(reason)
        begun_s = self._submitted_s + self.queue_s
        if self.trace is not None:
            self.trace.answer(AnswerTimes(self._submitted_s, begun_s, self._first_s, self._last_s, self._count, reason))
        if reason == "abort" or not self._count:
            return
        times.request.observe(time.monotonic() - self._started_s)
        times.queue.observe(self.queue_s)
        times.prefill.observe(max(0.0, self._first_s - begun_s))
        times.decode.observe(self._last_s - self._first_s)
        times.inference.observe(max(0.0, self._last_s - begun_s))
        metrics.prompt_length.observe(self._prompt_length)
        metrics.answer_length.observe(self._count)
        if self._count > 1:
            metrics.token_mean.observe((self._last_s - self._first_s) / (self._count - 1))
