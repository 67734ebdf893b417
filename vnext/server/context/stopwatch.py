"""Stopwatch: the times of one answer as its client sees them.

Each token updates one histogram; everything else is observed once, at the answer's end.
"""

from __future__ import annotations

import time

from vnext.server.context.admission import WaitingPrompts
from vnext.server.context.metrics import ServerMetrics
from vnext.server.context.traces import AnswerTimes, CallTrace


class Stopwatch:
    """Runs since its request's body arrived (`started_s`, monotonic); made right before the request goes to the engine core."""

    __slots__ = (
        "_count", "_first_s", "_last_s", "_metrics", "_prompt_length", "_queue_s", "_started_s", "_submitted_s", "trace",
        "waiting",
    )  # fmt: skip

    def __init__(self, metrics: ServerMetrics, started_s: float, prompt_length: int) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._submitted_s = time.monotonic()
        self._prompt_length = prompt_length
        self._queue_s = 0.0
        self._first_s = self._last_s = 0.0
        self._count = 0
        self.waiting: WaitingPrompts | None = None  # what the first token ends
        self.trace: CallTrace | None = None

    def waited(self, seconds: float) -> None:
        """Record the waiting time that the engine core reported. The stopwatch measures from the first step on, by one clock."""
        self._queue_s = seconds

    def tokens(self, count: int) -> None:
        """Record that `count` tokens have come now."""
        now_s = time.monotonic()
        if self._count:
            self._metrics.token.observe((now_s - self._last_s) / count, count)
        else:
            self._begin(count, now_s)
        self._count += count
        self._last_s = now_s

    def _begin(self, count: int, now_s: float) -> None:
        self._first_s = now_s
        if self.waiting is not None:
            self.waiting.begun(self._prompt_length)
        self._metrics.first_token.observe(now_s - self._started_s)
        if count > 1:
            self._metrics.token.observe(0.0, count - 1)

    def end(self, reason: str) -> None:
        """Record the answer's end. An aborted answer ("abort", not "stop" or "length") leaves no times: they would mean nothing."""
        metrics = self._metrics
        metrics.ended.add(reason)
        begun_s = self._submitted_s + self._queue_s
        if self.trace is not None:
            self.trace.answer(AnswerTimes(self._submitted_s, begun_s, self._first_s, self._last_s, self._count, reason))
        if reason == "abort" or not self._count:
            return
        metrics.request.observe(time.monotonic() - self._started_s)
        metrics.queue.observe(self._queue_s)
        metrics.prefill.observe(max(0.0, self._first_s - begun_s))
        metrics.decode.observe(self._last_s - self._first_s)
        metrics.inference.observe(max(0.0, self._last_s - begun_s))
        metrics.prompt_length.observe(self._prompt_length)
        metrics.answer_length.observe(self._count)
        if self._count > 1:
            metrics.token_mean.observe((self._last_s - self._first_s) / (self._count - 1))
