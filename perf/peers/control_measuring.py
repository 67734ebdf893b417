"""The measurement of a control plane, equal for every engine: rounds, clocks and medians, without the engine itself.

Standard library only: the runners import it inside their engine's own environment (run_vllm_scheduler.py) or in this one
(run_vnext_scheduler.py). A runner prints one line of JSON: {"about": {...}, "figures": {engine: {row: value}}}.
control_plane.py documents the rows.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

RUNNING = (32, 256, 1024)
BLOCKS = (1, 32, 256)
STEPS, WARM_UP_STEPS = 160, 32
PROMPTS, WARM_UP_PROMPTS = 60, 5
BLOCK_TURNS, LOOP_TURNS = 300, 300
MESSAGES = 32  # two for each position in a block of 16


class Steady(Protocol):
    """An engine of N requests, all in steady decode."""

    def step(self) -> object:
        """One whole step, outputs included."""

    def message(self) -> bytes:
        """The next step's message to the workers; the step itself is done."""

    def encode(self) -> bytes:
        """Encode the last message again and return its bytes."""

    def running(self) -> int:
        """Return the number of running requests."""


class Prompts(Protocol):
    """Prompts of 4,096 tokens that arrive one after the other in an otherwise empty engine."""

    def next(self) -> None:
        """End the request before and make the next one's message."""

    def arrive(self) -> object:
        """Let it arrive."""

    def first(self) -> int:
        """Decide and apply its first step; return the number of its tokens computed in that step."""


def measured_us(work: Callable[[], object], rounds: int, prepare: Callable[[], object] | None = None) -> float:
    """The median microseconds of a call; `prepare` runs before each, outside of the clock."""
    spent_ns = []
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        begin_ns = time.perf_counter_ns()
        work()
        spent_ns.append(time.perf_counter_ns() - begin_ns)
    return median(spent_ns) / 1e3


def measured_steps(steady: Steady, request_count: int) -> dict[str, float]:
    """Measure the rows of a steady engine. gc.freeze runs first, as in long-lived servers, so no row pays for the heap's size."""
    for _ in range(WARM_UP_STEPS):
        steady.step()
    gc.collect()
    gc.freeze()
    step_us = measured_us(steady.step, STEPS)
    sizes = [len(steady.message()) for _ in range(MESSAGES)]
    encode_us = measured_us(steady.encode, STEPS)
    gc.unfreeze()
    if steady.running() != request_count:
        raise RuntimeError(f"{steady.running()} of {request_count} requests are running: not a steady state")
    return {f"step_{request_count}": step_us, f"message_{request_count}": median(sizes),
            f"encode_{request_count}": encode_us}  # fmt: skip


def measured_prompts(make: Callable[[bool], Prompts], tokens_hit: int, tokens_miss: int) -> dict[str, float]:
    """Arrival and first schedule; asserts that a hit computes `tokens_hit` tokens and a miss `tokens_miss`."""
    rows = {}
    for name, shared, expected in (("first_miss", False, tokens_miss), ("first_hit", True, tokens_hit)):
        prompts = make(shared)
        for _ in range(WARM_UP_PROMPTS):
            arrive_and_begin(prompts)
        gc.collect()
        gc.freeze()
        arrival_us = measured_us(prompts.arrive, PROMPTS, prepare=prompts.next)
        rows[name] = measured_us(prompts.first, PROMPTS, prepare=lambda each=prompts: (each.next(), each.arrive()))
        gc.unfreeze()
        computed = arrive_and_begin(prompts)
        if computed != expected:
            raise RuntimeError(f"{name}: {computed} tokens were computed instead of {expected}")
        if not shared:
            rows["arrival"] = arrival_us
    return rows


def arrive_and_begin(prompts: Prompts) -> int:
    prompts.next()
    prompts.arrive()
    return prompts.first()


def measured_blocks(turn: Callable[[int], object]) -> dict[str, float]:
    """Nanoseconds of a block; `turn(n)` allocates n blocks at once and frees them."""
    return {
        f"blocks_{count}": measured_us(lambda count=count: turn(count), BLOCK_TURNS) * 1e3 / count for count in BLOCKS
    }


def measured_loop() -> dict[str, float]:
    def loop() -> None:
        for _ in range(1000):
            pass

    return {"loop": measured_us(loop, LOOP_TURNS)}


def private_output() -> Any:
    """Return the original standard output and redirect later prints of libraries to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def tell(channel: Any, about: dict[str, Any], figures: dict[str, dict[str, float]]) -> None:
    """Write the runner's one line."""
    channel.write(json.dumps({"about": {"python": sys.version.split()[0], **about}, "figures": figures}) + "\n")
    channel.flush()
