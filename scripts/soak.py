"""Soak: many streams for a long time, some cut off, some malformed, and a process killed now and then.

    python scripts/soak.py --minutes 30 --streams 256 --json RECORD

Owns the load, the kills (engine core, rank, API server, by turns) and what must hold: every finished stream has the tokens of the
same request alone, no client sees an error but those of a killed API server, and blocks, memory, descriptors, shared memory and
processes do not grow: each process in the last minutes, which have no kill (--calm-minutes), and all of them from one kill to
another. Shared memory is the machine's: beside other servers, run it in a namespace with a /dev/shm of its own. The exit status
is 1 if something did not hold. Takes --minutes and half a minute more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from serving import Server, eventually, serving  # noqa: E402

from vnext.base.version import __version__  # noqa: E402
from vnext.commands.bench.load.answers import RequestFailed  # noqa: E402
from vnext.commands.bench.load.client import COMPLETIONS, Client  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402

KINDS = {"engine core": "vnext.runtime.engine.main", "rank": "vnext.runtime.rank.main", "API server": "vnext.server"}
SERVE = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "256", "--log-max-bytes", "64M", "--kv-cache-memory", "64M")
CATALOGUE = 120
SAMPLE_S, BACK_S = 5.0, 30.0
CALM_MIN_S = 5.0
"""From a server that answers again to the next kill, however long it took to come back."""
LIFE_MIN = 60
WORDS = "def return list file import class value of the a if else name key self print open read".split()
MALFORMED: tuple[Any, ...] = ({"prompt": 5}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "n": "two"}, {"promt": "a"}, [])
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
GROWN_MAX = {"resident_mb": 1.3, "descriptors": 1.5, "threads": 1.5}
"""How much the last quarter's median may exceed the second quarter's, of processes that lived for LIFE_MIN samples: before that a
rank takes the pages of its cache for the first time, and imports torch."""


def main() -> int:
    options = parsed()
    shm_before, began_s = shared_memory(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vnext-soak-") as folder, serving(Path(folder), *SERVE) as server:
        soak = Soak(server, options)
        before = machine()
        asyncio.run(soak.run())
        idle = eventually(lambda: server.metric("vnext_num_requests_running") == 0 and server.metric("vnext_blocks_held") == 0)
        status = server.stop()
    found = soak.found() | {"blocks_held_at_end": 0 if idle else "some", "exit_status": status}
    found["shared_memory_left"] = sorted(shared_memory() - shm_before)
    wrong = soak.wrong(found)
    print(json.dumps(found | {"wrong": wrong}, indent=1))
    if options.json:
        record = {
            "command": f"python scripts/soak.py --minutes {options.minutes:g} --streams {options.streams}"
            f" --kill-every {options.kill_every:g} --calm-minutes {options.calm_minutes:g}",
            "vnext": __version__, "machine": msgspec.to_builtins(before), "seconds": round(time.monotonic() - began_s),
            **found, "wrong": wrong,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(wrong))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--kill-every", type=float, default=40, help="seconds from one kill to the next; 0: none")
    parser.add_argument("--calm-minutes", type=float, default=10, help="the last of --minutes, without a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def shared_memory_mb() -> float:
    """What all files there take, those without a name too."""
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize / 1e6


def catalogue(seed: int) -> list[dict[str, Any]]:
    """Requests whose answers depend on nothing but themselves."""
    rng = random.Random(seed)
    made = []
    for place in range(CATALOGUE):
        body = {
            "prompt": f"{place} {' '.join(rng.choices(WORDS, k=rng.randint(3, 120)))}", "max_tokens": rng.randint(1, 120),
            "seed": rng.randrange(2**40), "temperature": rng.choice([0, 0.8, 1.2]), "ignore_eos": True,
        }  # fmt: skip
        if place % 6 == 0:
            body |= {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False}
        elif place % 6 == 1:
            body |= {"presence_penalty": 0.7, "logprobs": 2}
        made.append(body)
    return made


class Soak:
    """One soak: its counts, its samples of the processes, and the answers alone."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server, self._options = server, options
        self._rng = random.Random(options.seed)
        self._bodies = catalogue(options.seed)
        self._alone: list[list[int]] = []
        self._until_s = 0.0
        self._edge_dies = False
        self.counts: Counter[str] = Counter()
        self.kills: list[dict[str, Any]] = []
        self.unequal: list[str] = []
        self.samples: list[dict[tuple[str, int], dict[str, float]]] = []
        self.shared_memory_mb: list[float] = []

    async def run(self) -> None:
        async with Client(self._server.url, timeout_s=600) as client:
            self._alone = [await client.token_ids(body) for body in self._bodies]
            self._until_s = time.monotonic() + 60 * self._options.minutes
            streams = [self._stream(client, random.Random(f"{self._options.seed} {at}")) for at in range(self._options.streams)]
            await asyncio.gather(*streams, self._kill_by_turns(client), self._sample())

    async def _stream(self, client: Client, rng: random.Random) -> None:
        while time.monotonic() < self._until_s:
            act = rng.random()
            try:
                if act < 0.05:
                    await self._malformed(client, rng)
                elif act < 0.2:
                    await self._leave(client, rng)
                else:
                    await self._compare(client, rng.randrange(CATALOGUE))
            except RequestFailed as error:
                if not self._edge_dies:
                    self.counts["errors"] += 1
                    self.unequal.append(f"{error.kind}: {error}"[:200])
                self.counts["cut off with the API server"] += self._edge_dies
                await asyncio.sleep(0.5)

    async def _malformed(self, client: Client, rng: random.Random) -> None:
        status, _ = await client.answer(COMPLETIONS, json.dumps(rng.choice(MALFORMED)).encode())
        self.counts["malformed"] += 1
        if status != 400:
            self.unequal.append(f"a malformed body got status {status}")

    async def _leave(self, client: Client, rng: random.Random) -> None:
        """Leave within the answer, some by closing the connection, some before there is one."""
        try:
            await asyncio.wait_for(client.token_ids(rng.choice(self._bodies)), rng.uniform(0.001, 1.0))
        except TimeoutError:
            self.counts["left"] += 1

    async def _compare(self, client: Client, place: int) -> None:
        tokens = await client.token_ids(self._bodies[place])
        self.counts["compared"] += 1
        self.counts["tokens"] += len(tokens)
        if tokens != self._alone[place]:
            alone = self._alone[place]
            at = next((at for at, pair in enumerate(zip(tokens, alone)) if pair[0] != pair[1]), min(len(tokens), len(alone)))
            self.unequal.append(f"request {place} differs at token {at}: it has {len(tokens)} tokens, alone {len(alone)}")

    # ---- kills and samples -----------------------------------------------------------------------------------------

    async def _kill_by_turns(self, client: Client) -> None:
        kinds = list(KINDS)
        end_s = self._until_s - 60 * self._options.calm_minutes - BACK_S
        while self._options.kill_every and time.monotonic() + self._options.kill_every < end_s:
            took_s = self.kills[-1]["seconds"] if self.kills else 0.0
            await asyncio.sleep(max(self._options.kill_every * self._rng.uniform(0.8, 1.2) - took_s, CALM_MIN_S))
            kind = kinds[len(self.kills) % len(kinds)]
            self._edge_dies = kind == "API server"
            began_s = time.monotonic()
            self._server.process_of(KINDS[kind]).kill()
            await self._until_healthy(client)
            self.kills.append({"kind": kind, "seconds": round(time.monotonic() - began_s, 2)})
            self._edge_dies = False

    async def _until_healthy(self, client: Client) -> None:
        """Until the server has noticed the kill and answers again."""
        await asyncio.sleep(0.3)
        for _ in range(int(BACK_S / 0.05)):
            with suppress(RequestFailed):
                if (await client.answer("/health"))[0] == 200:
                    return
            await asyncio.sleep(0.05)
        self.unequal.append("the server did not come back")

    async def _sample(self) -> None:
        while time.monotonic() < self._until_s:
            await asyncio.sleep(SAMPLE_S)
            self.samples.append(self._processes())
            self.shared_memory_mb.append(shared_memory_mb())

    def _processes(self) -> dict[tuple[str, int], dict[str, float]]:
        found = {}
        for process in self._server.processes:
            try:
                line = process.cmdline()
                kind = next((kind for kind, module in KINDS.items() if module in line), "launcher")
                resident_mb = process.memory_info().rss / 1e6
                counts = {"descriptors": process.num_fds(), "threads": process.num_threads()}
                found[kind, process.pid] = {"resident_mb": resident_mb, **counts}
            except psutil.NoSuchProcess:  # killed between two questions
                continue
        return found

    # ---- what was found --------------------------------------------------------------------------------------------

    def found(self) -> dict[str, Any]:
        return {
            "streams": self._options.streams, "counts": dict(self.counts), "kills": self.kills, "unequal": len(self.unequal),
            "first_unequal": self.unequal[:5], "processes_most": max(map(len, self.samples), default=0), "growth": self._growth(),
            "growth_of_all": self._growth_of_all(),
        }  # fmt: skip

    def _growth_of_all(self) -> dict[str, list[float]]:
        """The medians over the second and the last quarter of the samples: of the sum of all processes, whichever live, of their
        number, and of what the machine has in shared memory."""
        sums = {name: [sum(each[name] for each in sample.values()) for sample in self.samples] for name in GROWN_MAX}
        sums |= {"processes": list(map(len, self.samples)), "shared_memory_mb": self.shared_memory_mb}
        quarter = len(self.samples) // 4
        return {name: _medians(values, quarter) for name, values in sums.items() if quarter}

    def _growth(self) -> dict[str, dict[str, list[float]]]:
        """The largest first and last median of each kind's processes, over the second and the last quarter of their lives."""
        lives: dict[tuple[str, int], list[dict[str, float]]] = {}
        for sample in self.samples:
            for who, values in sample.items():
                lives.setdefault(who, []).append(values)
        grown: dict[str, dict[str, list[float]]] = {}
        for (kind, _), life in lives.items():
            quarter = len(life) // 4
            if len(life) < LIFE_MIN:
                continue
            for name in GROWN_MAX:
                pair = _medians([each[name] for each in life], quarter)
                known = grown.setdefault(kind, {}).setdefault(name, pair)
                if pair[1] / pair[0] > known[1] / known[0]:
                    grown[kind][name] = pair
        return grown

    def wrong(self, found: dict[str, Any]) -> list[str]:
        """What did not hold, in words."""
        said = [f"{found['unequal']} streams were not as they must be"] if found["unequal"] else []
        for kind, values in found["growth"].items():
            grown = [(name, *pair) for name, pair in values.items() if pair[1] > GROWN_MAX[name] * pair[0] + 5]
            said += [f"{name} of the {kind} grew from {first} to {last}" for name, first, last in grown]
        for name, (first, last) in found["growth_of_all"].items():
            if last > GROWN_MAX.get(name, 1) * first + 5 * (name != "processes"):
                said.append(f"{name} of all processes grew from {first} to {last}")
        said += ["blocks are held at the end"] if found["blocks_held_at_end"] else []
        said += [f"{found['shared_memory_left']} lie in shared memory"] if found["shared_memory_left"] else []
        said += [f"exit status {found['exit_status']}"] if found["exit_status"] else []
        return said


def _medians(values: list[float], quarter: int) -> list[float]:
    """The medians of the second and the last quarter."""
    return [round(statistics.median(part), 1) for part in (values[quarter : 2 * quarter], values[-quarter:])]


if __name__ == "__main__":
    sys.exit(main())
