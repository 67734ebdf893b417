"""Benchmark of the gap between two decode steps on a GPU: the time its work waits for the host, with the runtime's own steps.

Owns a small engine in this process: the scheduler plans, states are folded, and a rank's steps are launched two ahead and
committed with their own tokens. The gap is the time on the device from the end of one step's graph to the start of the next:
the copy of its inputs, the copy of its samples, and all waiting.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from perf.gpu.place import Place, use_cases
from perf.gpu.report import Figure, figure
from vnext.kernels.table import substituted

GAP_US_MAX = 50.0
STEPS, WARM_UPS, AHEAD = 100, 20, 2
ROWS, TOY_ROWS, PROMPT_TOKENS, BLOCK_SIZE = 64, 2, 8, 16
TOY_STEPS = 3


class TimedGraph:
    """A graph that records a device event before and after each replay."""

    def __init__(self, graph: Any, marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._graph, self._marks = graph, marks
        self.begin, self.end = graph.begin, graph.end

    def replay(self) -> None:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        self._graph.replay()
        pair[1].record()
        self._marks.append(pair)


def device_of(place: Place) -> tuple[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Return the GPU's interface, or its CPU substitute, and the list that receives the events of replays."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    if place.is_dry:
        use_cases()
        from device_twin import TwinDevice

        return TwinDevice(), marks
    from vnext.runtime.gpu.cuda import CudaDevice

    class TimedDevice(CudaDevice):
        def graph(self) -> TimedGraph:
            return TimedGraph(super().graph(), marks)

    return TimedDevice(place.device.index), marks


def run(place: Place, config: Any, params: Any) -> Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]:
    """Figures and details of a model."""
    stream = None if place.is_dry else torch.cuda.current_stream()
    with substituted(place.operations):
        device, marks = device_of(place)
        launches_us = decode(place, device, config, params)
    if stream is not None:
        torch.cuda.synchronize()
        torch.cuda.set_stream(stream)
    gaps_us = [before[1].elapsed_time(after[0]) * 1e3 for before, after in zip(marks, marks[1:])][-STEPS:]
    gap = statistics.median(gaps_us) if gaps_us else None
    host = statistics.median(launches_us) if gaps_us else None
    name = f"time between steps, batch {ROWS}"
    figures = (figure(name, gap, "us", at_most=GAP_US_MAX), figure("a decode step's launch on the host", host, "us"))
    worst = sorted(gaps_us)[-len(gaps_us) // 20 - 1] if gaps_us else None
    yield figures, {name: {"steps": len(gaps_us), "gap_p95_us": worst}}


def decode(place: Place, device: Any, config: Any, params: Any) -> list[float]:
    """Run rows through their prompts and many decodes; return the host time of each launch in microseconds."""
    from vnext.models.layers.kv_cache import make_kv_cache
    from vnext.models.layers.sharding import alone
    from vnext.models.registry import family
    from vnext.runtime.gpu.buckets import Shapes
    from vnext.runtime.gpu.model import DeviceModel
    from vnext.runtime.gpu.steps import DeviceSteps, DeviceVariants
    from vnext.sampling.sampling import choose_by_kernel
    from vnext.sched.schedule import schedule
    from vnext.state.events import StepCommitted, pack_tokens
    from vnext.state.reduce import reduce

    rows, steps_max = (TOY_ROWS, TOY_STEPS) if place.is_dry else (ROWS, STEPS + WARM_UPS)
    state = state_of(config, rows, steps_max)
    kv = make_kv_cache(config, state.config.page_count + 1, BLOCK_SIZE, torch.bfloat16, place.device, alone())
    model = DeviceModel(family(config.architecture), params, kv, config, alone())
    variants = DeviceVariants(operations=place.operations, choose=choose_by_kernel, shapes=Shapes((rows,), ()))
    steps, pending_step, launches_us = DeviceSteps(device, model, state, variants), deque(), []
    steps.prepare()
    while state.requests or pending_step:
        if (plan := schedule(state)) is not None:
            state = reduce(state, plan)
            begin_s = time.perf_counter()
            pending_step.append(steps.launch(state))
            launches_us.append((time.perf_counter() - begin_s) * 1e6)
            if len(pending_step) < AHEAD:
                continue
        done = pending_step.popleft()
        state = reduce(state, StepCommitted(step=done.scheduled.step, tokens=pack_tokens(done.outputs().tokens)))
    assert steps.variants_run["graph"] >= steps_max - AHEAD, steps.variants_run
    return launches_us[-steps_max:]


def state_of(config: Any, rows: int, steps_max: int) -> Any:
    """Return a state with `rows` waiting requests, each for `steps_max` tokens, sampled without filters."""
    from vnext.state.config import SchedulerConfig
    from vnext.state.events import EngineStarted, RequestArrived, pack_tokens
    from vnext.state.params import Sampling
    from vnext.state.reduce import reduce, start

    length = PROMPT_TOKENS + steps_max + 1
    bounds = SchedulerConfig(
        block_size=BLOCK_SIZE, page_count=rows * -(-length // BLOCK_SIZE), max_num_batched_tokens=rows * PROMPT_TOKENS,
        max_num_seqs=rows, max_model_len=length, pipeline_depth=AHEAD, eos_token_ids=(), vocab_size=config.vocab_size,
        digest_interval=64,
    )  # fmt: skip
    state = start(EngineStarted(config=bounds, model="", model_digest="", world_size=1, environment={}, started_ns=0))
    for id_ in range(rows):
        prompt = pack_tokens([(7 * id_ + place) % config.vocab_size for place in range(PROMPT_TOKENS)])
        sampling = Sampling(seed=id_, max_tokens=steps_max, temperature=0.8, ignore_eos=True)
        arrived = RequestArrived(id=id_, name="", prompt=prompt, sampling=sampling, priority=0, arrival_ns=0)
        state = reduce(state, arrived)
    return state
