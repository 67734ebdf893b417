"""Shrink a rank's memory under load: `python scripts/shrink_memory.py --times 200 --json RECORD`.

Owns a `vnext serve` over the bundled model, and the shrinking: at an instant drawn from the seed the rank's process may map no more
memory than it has (RLIMIT_AS), until a step lacks some or HELD_S have passed; then it may again. The C library maps all that is
larger than 64 KiB anew, so that a step's memory is asked for in that step. The streams (kills_survived.py) must give what they gave
before, and each shrinking that a step met must be in the log, whose cause `explain` names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "e2e")]

from kills_survived import RANK, Load  # noqa: E402
from serving import Server, serving  # noqa: E402

from vnext.commands.machine import machine  # noqa: E402
from vnext.replay.causes.explain import explained  # noqa: E402
from vnext.replay.reading.source import open_log  # noqa: E402
from vnext.replay.reading.verify import verify  # noqa: E402
from vnext.state.events import EngineRecovered, MemoryRanShort, StepRewound  # noqa: E402

OPTIONS = (
    "--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "256", "--served-model-name", "demo",
    "--max-restarts", "1000",
)  # fmt: skip
MAPPED_ANEW = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0", "MALLOC_ARENA_MAX": "1"}
HELD_S, BETWEEN_S, FLOWN = 0.5, 0.2, 50
UNLIMITED = resource.RLIM_INFINITY


class Shrinking:
    """The shrinking of one server's rank. Mutable: `met` counts those that a step lacked memory in."""

    def __init__(self, server: Server, load: Load, rng: random.Random) -> None:
        self._server, self._load, self._rng, self.times, self.met = server, load, rng, 0, 0

    async def _rank(self) -> psutil.Process:
        """The rank's process, when there is one again."""
        while True:
            for process in self._server.processes:
                with suppress(psutil.Error):
                    if RANK in process.cmdline() and process.name() != "vnext-standby":
                        return process
            await asyncio.sleep(0.05)

    async def once(self) -> None:
        """Shrink, wait until a step lacks memory, and give it back."""
        flown = self._load.tokens
        while self._load.tokens < flown + FLOWN and not self._load.wrong:  # a rank that starts has steps only later
            await asyncio.sleep(self._rng.uniform(0, BETWEEN_S))
        rank = await self._rank()
        before = await asyncio.to_thread(self._server.metric, "vnext_memory_shortages_total")
        resource.prlimit(rank.pid, resource.RLIMIT_AS, (rank.memory_info().vms, UNLIMITED))
        until_s, met = time.monotonic() + HELD_S, False
        try:
            while not met and time.monotonic() < until_s and rank.is_running():
                met = await asyncio.to_thread(self._server.metric, "vnext_memory_shortages_total") > before
        finally:
            if psutil.pid_exists(rank.pid):
                resource.prlimit(rank.pid, resource.RLIMIT_AS, (UNLIMITED, UNLIMITED))
        self.times, self.met = self.times + 1, self.met + met


async def shrink(server: Server, times: int, streams: int, seed: int) -> tuple[Load, Shrinking]:
    """Shrink `times` times, while streams ask their requests again and again."""
    load = Load(server.url, streams, seed)
    shrinking = Shrinking(server, load, random.Random(seed))
    await load.expect()
    running = asyncio.create_task(load.run())
    while shrinking.times < times and not load.wrong:
        await shrinking.once()
    load.stops = True
    await running
    return load, shrinking


def found_in(log_dir: Path) -> dict[str, Any]:
    """What a log says of the shortages, and `explain` of the log."""
    log, kinds, causes = open_log(log_dir), Counter[str](), Counter[str]()
    for item in log.items():
        for event in getattr(item, "events", ()):
            kinds[type(event).__name__] += isinstance(event, MemoryRanShort | EngineRecovered)
            causes[getattr(event, "cause", "")] += isinstance(event, MemoryRanShort)
    answer, verdict = explained(log_dir), verify(open_log(log_dir), all_laws=True)
    return {
        "shortages": kinds["MemoryRanShort"] + kinds["StepRewound"], "rows_went_back": kinds[StepRewound.__name__],
        "recoveries": kinds["EngineRecovered"], "causes": dict(+causes), "explained": answer.headline,
        "causes_found": [each.cause for each in answer.causes], "verified": verdict.same,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="record to write")
    options = parser.parse_args()
    before, began_s = machine(), time.monotonic()
    os.environ |= MAPPED_ANEW
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *OPTIONS) as server:
        load, shrinking = asyncio.run(shrink(server, options.times, options.streams, options.seed))
        assert server.stop() == 0, "the server ends when it is asked to"
        found = {
            "seed": options.seed, "times": shrinking.times, "met": shrinking.met, "streams": options.streams,
            "answers": load.compared, "tokens": load.tokens, "wrong": load.wrong,
            **found_in(server.log_dir), "seconds": round(time.monotonic() - began_s, 1),
        }  # fmt: skip
    print(json.dumps(found, indent=2))
    if options.json:
        command = f"python scripts/shrink_memory.py --times {options.times} --streams {options.streams} --seed {options.seed}"
        record = {"command": command, "machine": msgspec.to_builtins(before), "found": found}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    is_right = not load.wrong and found["verified"] and found["shortages"] >= shrinking.met > 0
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
