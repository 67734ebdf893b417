"""The exact router under load, on one core: `python -m perf.router_load [--json FILE]`.

Owns a recording of what a router meets on the trace of perf/router.py, in its order: requests to be routed, requests that have
ended, the frames of four engines. A router that begins with the engines' snapshots takes the recording as fast as it can, folds
every frame and writes every decision to a file; no engine runs beside it. So the rate is that of requests which were routed, by the
clock and by the kernel's count of processor time. Then the single parts: a decision by prompt length, a frame, and a router that has
just started.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from perf.record import parser_of, record_of, write_record
from perf.router import ENGINES, Engine, Frames, Shape, Views, run, words
from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.routing.decision_file import DecisionFile, files_of
from vnext.routing.decisions import FORMAT_VERSION, Header
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.state.events import pack_tokens

READER = "recorded"
LENGTHS = (256, 1_024, 4_096)
ROUNDS = 5
READY = [True] * ENGINES


class Met(msgspec.Struct):
    """What a router met: each engine's first bytes, then in order (name, prompt) of requests to be routed, (name,) of those that
    have ended, and (place, frame)."""

    heads: list[bytes]
    items: list[tuple[Any, ...]]


class Recording(Views):
    """vnext's router, whose input is kept."""

    def __init__(self, engines: list[Engine]) -> None:
        super().__init__(engines, "prefix", 0)
        self.met = Met([engine.streams.begin(READER, engine.state) for engine in engines], [])

    def choose(self, name: str, prompt: list[int]) -> int:
        self.met.items.append((name, pack_tokens(prompt)))
        return super().choose(name, prompt)

    def done(self, name: str) -> None:
        self.met.items.append((name,))
        super().done(name)

    def feed(self, frames: list[Frames]) -> None:
        self.met.items += [(place, own[READER]) for place, own in enumerate(frames) if READER in own]
        super().feed(frames)


def begun(heads: list[bytes], **options: Any) -> Router:
    """A router that has each engine's snapshot."""
    router = Router(ENGINES, **options)
    for view, head in zip(router.views, heads):
        view.feed(head)
    assert all(view.is_exact for view in router.views)
    return router


def replayed(met: Met) -> dict[str, float]:
    """One router takes all of it."""
    with tempfile.TemporaryDirectory() as folder:
        header = Header(format_version=FORMAT_VERSION, code_version=__version__, policy="prefix", replicas=("",) * ENGINES, started_ns=0)
        file = DecisionFile(Path(folder), header)
        router = begun(met.heads, record=file.write, clock_us=lambda: time.monotonic_ns() // 1000)
        began_s, spent_s = time.perf_counter(), time.process_time()
        for item in met.items:
            match item:
                case (str() as name, prompt):
                    router.choose(name, Prompt(prompt), READY)
                case (name,):
                    router.done(name)
                case (place, frame):
                    router.views[place].feed(frame)
        took_s, spent_s = time.perf_counter() - began_s, time.process_time() - spent_s
        file.close()
        size = sum(path.stat().st_size for path in files_of(Path(folder)))
    requests = sum(len(item) == 2 and isinstance(item[0], str) for item in met.items)
    assert not file.lost and not any(view.mismatches for view in router.views)
    return {"requests_per_s": requests / took_s, "requests_per_cpu_s": requests / spent_s, "decision_bytes": size / requests}


def folded(met: Met) -> Iterator[tuple[str, float]]:
    """Microseconds of processor time to fold a frame, and its bytes."""
    router, frames = begun(met.heads), [item for item in met.items if isinstance(item[0], int)]
    spent_s = time.process_time()
    for place, frame in frames:
        router.views[place].feed(frame)
    yield "fold_us_per_frame", (time.process_time() - spent_s) / len(frames) * 1e6
    yield "bytes_per_frame", sum(len(frame) for _, frame in frames) / len(frames)


def decided(engines: list[Engine], count: int = 400) -> Iterator[tuple[str, float]]:
    """Milliseconds until a router that has just started is exact (its four snapshots made, read and folded), and microseconds of
    processor time for a decision of new prompts of each length."""
    began_s, spent_s = time.perf_counter(), time.process_time()
    router = begun([engine.streams.begin("again", engine.state) for engine in engines])
    yield "exact_again_ms", (time.perf_counter() - began_s) * 1e3
    yield "exact_again_cpu_ms", (time.process_time() - spent_s) * 1e3
    rng = random.Random(1)
    for length in LENGTHS:
        prompts = [pack_tokens(words(rng, length)) for _ in range(count)]
        spent_s = time.process_time()
        for number, prompt in enumerate(prompts):
            router.choose(f"r{number}", Prompt(prompt), READY)
            router.done(f"r{number}")
        yield f"decision_us_{length}", (time.process_time() - spent_s) / count * 1e6


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    options = parser.parse_args()
    before = machine()
    _, engines, router = run(Shape(requests=options.requests), Recording)
    rounds = [replayed(router.met) | dict(folded(router.met)) | dict(decided(engines)) for _ in range(ROUNDS)]
    median = {name: sorted(each[name] for each in rounds)[ROUNDS // 2] for name in rounds[0]}
    for name, value in median.items():
        print(f"{name:22} {value:,.1f}")
    command = f"python -m perf.router_load --requests {options.requests}"
    write_record(options.json, record_of(command, before, {"engines": ENGINES, "median": median, "rounds": rounds}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
