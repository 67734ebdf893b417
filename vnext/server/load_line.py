"""Load line: logs each engine's load every few seconds, in vLLM's words. Logs nothing while the engine is idle.

Owns the figures of one interval, computed from the engine core's counters. `/metrics` has more of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from vnext.runtime.protocol.messages import EngineStats
from vnext.runtime.protocol.stats import ExpertStats, LayerLoad
from vnext.server.context.metrics import EngineFigures
from vnext.server.context.server_context import SERVER_CONTEXT

COUNTERS = ("prompt_tokens", "generated_tokens", "prefix_queried_tokens", "prefix_hit_tokens")

log = logging.getLogger("vnext.load")


class Load:
    """The counters of one engine when the last line was due, and the last hit rate. Mutable."""

    def __init__(self, engine: int = 0) -> None:
        self._engine = engine
        self._before = dict.fromkeys(COUNTERS, 0)
        self._hit_rate = 0.0
        self._experts: dict[int, LayerLoad] = {}

    def line(self, stats: EngineStats, seconds: float) -> str | None:
        """The line for the last `seconds`; None if nothing ran in that time and nothing runs now."""
        now = {name: getattr(stats, name) for name in COUNTERS}
        gained = {name: now[name] - self._before[name] for name in COUNTERS}
        self._before = now
        if not (stats.running or stats.waiting or any(gained.values())):
            return None
        if gained["prefix_queried_tokens"]:
            self._hit_rate = gained["prefix_hit_tokens"] / gained["prefix_queried_tokens"]
        return (
            f"Engine {self._engine:03d}: Avg prompt throughput: {gained['prompt_tokens'] / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {gained['generated_tokens'] / seconds:.1f} tokens/s, "
            f"Running: {stats.running} reqs, Waiting: {stats.waiting} reqs, "
            f"KV cache usage: {100 * stats.blocks_held / max(stats.blocks_total, 1):.1f}%, "
            f"Prefix cache hit rate: {100 * self._hit_rate:.1f}%" + self._busiest(stats.experts)
        )

    def _busiest(self, stats: ExpertStats | None) -> str:
        """The layer whose busiest expert had the most of its tokens since the last line; "" without any."""
        loads, found = {each.layer: each for each in stats.layers} if stats else {}, (0.0, 0)
        for number, now in loads.items():
            before = self._experts.get(number, LayerLoad(number, 0, 0, 0))
            if now.all > before.all and stats is not None:
                found = max(found, ((now.busiest - before.busiest) * stats.experts / (now.all - before.all), -number))
        self._experts = loads
        return f", Busiest expert: {found[0]:.1f} times the mean of layer {-found[1]}" if found[0] else ""


async def report_load(app: web.Application) -> AsyncIterator[None]:
    """For `cleanup_ctx`: reports while the app serves."""
    settings = app[SERVER_CONTEXT].settings
    if settings.disable_log_stats:
        yield
        return
    reporting = asyncio.create_task(_report(app[SERVER_CONTEXT].client.engines, settings.log_stats_interval_s))
    yield
    reporting.cancel()


async def _report(engines: Sequence[EngineFigures], interval_s: float) -> None:
    loads, before_s = [Load(number) for number in range(len(engines))], time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        for load, engine in zip(loads, engines):
            if engine.stats is not None and (line := load.line(engine.stats, now_s - before_s)):
                log.info(line)
        before_s = now_s
