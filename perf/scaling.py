"""How decode and prompts scale with threads: 1 and 2 measured, to 64 computed. `python -m perf.scaling --json FILE`

Measures what one row reads, the products of 512 rows, and what sharing an operation costs, with one thread and with two in turns.
The first two by the processor time of all threads divided by their number, the median of the rounds: other programs distort it less
than time on a clock, and on a quiet machine the two are the same, since threads that wait spin. `paper` computes the products of a step on more threads, by assumptions that no machine here can
measure: `--memory` and `--line-ns`. `--parts FILE` takes the parts of a record. perf/records/notes/cpu.md has the formulas.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.kernels.cpu import linear, native
from vnext.kernels.cpu.memory import Arena
from vnext.runtime.processes.thread_plan import TEAM_SPIN_US

THREADS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_ROWS, BLOCK_ROWS, PANEL = 512, 32, 32
UNIT_BYTES, UNITS_FEW, UNITS_MANY, CHUNK_BYTES = 64 * 1024, 8, 32, 640 * 1024
"""As linear.cpp cuts a product. CHUNK_BYTES: for a second-level cache of 1 MB."""
BYTES = 2  # of bfloat16


class Shape(NamedTuple):
    """The products of a layer, (outputs, inputs), how many layers, and the output layer."""

    products: tuple[tuple[int, int], ...]
    layers: int
    head: tuple[int, int]


SHAPES = {
    "135M": Shape(((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576)),
    "0.6B": Shape(((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 28, (151936, 1024)),
    "8B": Shape(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 32, (128256, 4096)),
}


class Parts(NamedTuple):
    """`read`: bytes a second of weights with 1 and 2 threads; `product`: operations a second; `shared_s`: seconds that sharing an
    operation costs two threads."""

    read: tuple[float, float]
    product: tuple[float, float]
    shared_s: float


class Assumed(NamedTuple):
    """`memory`: bytes a second that all cores of the machine read together; `line_s`: seconds for a cache line from one core to another."""

    memory: float
    line_s: float


# ---- on paper ----------------------------------------------------------------------------------------------------


def shared_s(parts: Parts, assumed: Assumed, threads: int) -> float:
    """The time that it takes to share one operation among this number of threads."""
    return 0.0 if threads == 1 else parts.shared_s + 2 * (threads - 2) * assumed.line_s


def decode_s(weight: tuple[int, int], parts: Parts, assumed: Assumed, threads: int) -> float:
    """One row by one weight."""
    panels, size = ceil(weight[0] / PANEL), weight[0] * weight[1] * BYTES
    units = max(1, min(UNITS_FEW * threads, panels, size // UNIT_BYTES))
    rate = min(min(threads, units) * parts.read[0], max(assumed.memory, parts.read[0]))
    return size / rate + (shared_s(parts, assumed, threads) if units > 1 else 0.0)


def prompt_s(weight: tuple[int, int], parts: Parts, assumed: Assumed, threads: int) -> float:
    """PROMPT_ROWS rows by one weight."""
    panels, size = ceil(weight[0] / PANEL), weight[0] * weight[1] * BYTES
    largest = max(BLOCK_ROWS, CHUNK_BYTES // (weight[1] * BYTES) // BLOCK_ROWS * BLOCK_ROWS)
    chunks = ceil(PROMPT_ROWS / largest)
    groups = max(1, min(UNITS_MANY * threads // chunks, panels, size // UNIT_BYTES))
    units = chunks * groups
    rate = parts.product[0] if threads == 1 else parts.product[1] / 2
    whole = 2 * PROMPT_ROWS * weight[0] * weight[1] / rate
    return whole * ceil(units / threads) / units + shared_s(parts, assumed, threads)


def step_s(shape: Shape, of: Callable[..., float], *given: Any) -> float:
    """The products of all layers, and, of a decode, the output layer."""
    head = decode_s(shape.head, *given) if of is decode_s else 0.0
    return shape.layers * sum(of(weight, *given) for weight in shape.products) + head


def paper(parts: Parts, assumed: Assumed) -> dict[str, dict[str, list[float]]]:
    """Shape -> kind -> milliseconds by THREADS."""
    return {
        name: {
            kind: [round(1e3 * step_s(shape, of, parts, assumed, threads), 2) for threads in THREADS]
            for kind, of in (("decode", decode_s), ("prompt", prompt_s))
        }
        for name, shape in SHAPES.items()
    }


# ---- measured ----------------------------------------------------------------------------------------------------


def shortest_s(work: Callable[[], object], rounds: int, repeats: int) -> list[float]:
    """Seconds on the clock of the shortest call with one thread and with two, measured in turns: of calls that are over before other
    programs are scheduled, now and then."""
    best_s = [float("inf")] * 2
    for _ in range(rounds):
        for threads in (1, 2):
            native.start(threads, TEAM_SPIN_US)
            work()
            begin_s = time.perf_counter()
            for _ in range(repeats):
                work()
            best_s[threads - 1] = min(best_s[threads - 1], (time.perf_counter() - begin_s) / repeats)
    return best_s


def call_s(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of a call with one thread and with two, measured in turns."""
    spent_s: list[list[float]] = [[], []]
    for _ in range(rounds):
        for threads in (1, 2):
            native.start(threads, TEAM_SPIN_US)
            work()
            begin_s = time.process_time()
            work()
            spent_s[threads - 1].append((time.process_time() - begin_s) / threads)
    return [median(each) for each in spent_s]


def measured(rounds: int) -> Parts:
    """The parts on this machine: weights of the 135M shape's layers, which no cache holds."""
    arena, shape = Arena(), SHAPES["135M"]
    weights = [linear.pack(torch.randn(weight).mul_(0.02).bfloat16(), arena=arena) for _ in range(shape.layers) for weight in shape.products]
    rows = {count: {size: torch.randn(count, size).bfloat16() for size in (576, 1536)} for count in (1, PROMPT_ROWS)}

    def of(count: int, some: list[linear.PackedLinear]) -> Callable[[], None]:
        return lambda: [linear.linear(rows[count][weight.inputs], weight) for weight in some] and None

    tiny = linear.pack(torch.randn(32, 32).bfloat16(), arena=arena)
    ids, size = torch.arange(8), sum(weight.outputs * weight.inputs for weight in weights)
    some = weights[: len(shape.products)]
    operations = 2 * PROMPT_ROWS * sum(weight.outputs * weight.inputs for weight in some)
    read, product = call_s(of(1, weights), rounds), call_s(of(PROMPT_ROWS, some), rounds)
    small = shortest_s(lambda: linear.rows_of(tiny, ids), rounds, repeats=50)
    return Parts(
        (size * BYTES / read[0], size * BYTES / read[1]), (operations / product[0], operations / product[1]),
        max(0.0, small[1] - small[0] / 2),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, help="a record whose measured parts to take")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--memory", type=float, default=370.0, help="GB/s that all cores read: twelve channels of DDR5-4800 at eight tenths")
    parser.add_argument("--line-ns", type=float, default=60.0, help="for a cache line from one core to another")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = machine()
    parts = Parts(**json.loads(options.parts.read_text())["parts"]) if options.parts else measured(options.rounds)
    assumed = Assumed(options.memory * 1e9, options.line_ns * 1e-9)
    table = paper(parts, assumed)
    print(f"read {parts.read[0] / 1e9:.1f} -> {parts.read[1] / 1e9:.1f} GB/s, products {parts.product[0] / 1e9:.0f} -> ", end="")
    print(f"{parts.product[1] / 1e9:.0f} GFLOP/s, sharing {parts.shared_s * 1e6:.2f} us; load {before.load}, assumed {assumed}")
    for name, kinds in table.items():
        for kind, times in kinds.items():
            print(f"{name:5} {kind}  " + "  ".join(f"{threads}: {ms:.2f} ms ({times[0] / ms:.1f}x)" for threads, ms in zip(THREADS, times)))
    if options.json:
        found = {"command": "python -m perf.scaling", "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        found |= {"vnext": __version__, "machine": msgspec.to_builtins(before), "load_after": machine().load}
        found |= {"kernels": native.level().name, "parts": parts._asdict(), "assumed": assumed._asdict(), "threads": THREADS, "ms": table}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
