"""Cut streams at random bytes while what serves them is killed: `python scripts/cut_streams.py --json RECORD`.

Owns two `vnext serve` over the bundled model, one of them with two API servers, behind two `vnext router`, streams of all APIs that
read from any of the four, and the killing of API servers, engine cores, ranks and routers by SIGKILL. A client that is cut sends
its request again with `Last-Event-ID`, to any of the four. What it has in the end must be what an uncut stream of the same request
has: nothing lost, repeated or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from serving import Server, in_background, serving  # noqa: E402

from vnext.commands.machine import machine  # noqa: E402

OPTIONS = ("--dtype", "float32", "--threads", "1", "--served-model-name", "demo", "--max-restarts", "1000")
MODULES = {"API server": "vnext.server", "engine core": "vnext.runtime.engine.main", "rank": "vnext.runtime.rank.main"}
TEXT = rb'"(?:text|content|delta|partial_json|arguments)":"((?:[^"\\]|\\.)*)"'
SCORES = re.compile(rb'"(?:logprob":|token_logprobs":\[)([-\d.e,]+)')
OWN = re.compile(
    rb'"(?:id|item_id|call_id)":"[^"]*",?|"(?:created|created_at|completed_at|sequence_number|completion_tokens|total_tokens|'
    rb'cached_tokens|input_tokens|cache_read_input_tokens|cache_creation_input_tokens)":\d+,?'
)
"""What differs between two calls, or depends on how many tokens came in one event."""
ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
READ_TIMEOUT_S = 20.0
PAUSE_S = 0.2
CUTS_A_KILL = 10
"""At least, so that streams get on."""
USER = [{"role": "user", "content": "Tell me of the sea, in many words."}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Seeded requests of all APIs."""
    found: list[tuple[str, dict[str, Any]]] = []
    for seed in range(count):
        common = {"model": "demo", "stream": True, "seed": seed, "temperature": 0.9}
        usage = {"stream_options": {"include_usage": True}}
        found += [
            ("/v1/completions", common | usage | {"prompt": f"Once {seed}", "max_tokens": 90, "ignore_eos": True}),
            ("/v1/completions", common | {"prompt": f"Two {seed}", "max_tokens": 50, "n": 3, "stop": ["the"], "logprobs": 2}),
            ("/v1/chat/completions", common | usage | {"messages": USER, "max_tokens": 90, "ignore_eos": True}),
            ("/v1/chat/completions", common | {"messages": USER, "max_tokens": 90, "tools": TOOLS, "logprobs": True}),
            ("/v1/messages", {"model": "demo", "stream": True, "temperature": 0, "messages": USER, "max_tokens": 60 + seed}),
            ("/v1/responses", common | {"input": USER, "max_output_tokens": 90, "ignore_eos": True}),
        ]
    return found[:count]


class Stream:
    """One request, picked up until it has its end. Mutable."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path, self.data = path, json.dumps(body).encode()
        self.events: list[bytes] = []
        self.is_over = False
        self.refused = ""

    @property
    def last_id(self) -> str:
        return "" if not self.events else self.events[-1].partition(b"\n")[0].removeprefix(b"id: ").decode()

    async def read(self, url: str, bytes_max: int) -> bool:
        """Read on at a server; returns whether it was cut here, after so many bytes."""
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            lines = [f"POST {self.path} HTTP/1.0", f"Host: {parts.netloc}", "Content-Type: application/json"]
            lines += ["Accept: text/event-stream", f"Content-Length: {len(self.data)}"]
            lines += [f"Last-Event-ID: {self.last_id}"] if self.last_id else []
            writer.write("\r\n".join([*lines, "", ""]).encode() + self.data)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_TIMEOUT_S)
            status, rest = int(head.split()[1]), b""
            if status != 200:
                self.is_over = status == 204
                self.refused = f"{status}: {(await reader.read())[:300]!r}" if status in (400, 404, 409, 500) else ""
                await asyncio.sleep(PAUSE_S)
                return False
            while bytes_max > 0 and (part := await asyncio.wait_for(reader.read(min(bytes_max, 4096)), READ_TIMEOUT_S)):
                rest, bytes_max = rest + part, bytes_max - len(part)
                *whole, rest = rest.split(b"\n\n")
                for event in whole:
                    self._take(event)
            return bytes_max <= 0 and not self.is_over
        finally:
            writer.transport.abort()

    def _take(self, event: bytes) -> None:
        if event.startswith(b"id: "):  # others are pings, and errors, after which a client asks again
            self.events.append(event)
            self.is_over = any(line.startswith(ENDS) for line in event.split(b"\n"))

    def content(self) -> dict[bytes, tuple[bytes, bytes, list[bytes]]]:
        """By choice: its text, its log-probabilities, and what is neither, in order."""
        found: dict[bytes, tuple[bytes, bytes, list[bytes]]] = {}
        for event in self.events:
            shown = OWN.sub(b"", event.partition(b"\n")[2])
            match = re.search(rb'"index":(\d+),"(?:text|delta)":(?!\{"type")', shown)
            text, scores, others = found.setdefault(match[1] if match else b"", (b"", b"", []))
            scores += b"".join(each.rstrip(b",") + b"," for each in SCORES.findall(shown))
            other = re.sub(rb'"logprobs":\{.*?\}\]?\}|"logprobs":\[.*?\]', b"", re.sub(TEXT, b"", shown))
            is_new = other not in others and (b"delta" not in event or b'_reason":null' not in event)
            found[match[1] if match else b""] = text + b"".join(re.findall(TEXT, shown)), scores, others + [other] * is_new
        return found

    def faults(self, uncut: Stream) -> dict[str, str]:
        """How the stream differs from an uncut one of the same request, by kind."""
        ids = [event.partition(b"\n")[0] for event in self.events]
        numbers = [int(each) for each in re.findall(rb'"sequence_number":(\d+)', b"\n".join(self.events))]
        found = {"lost": "refused " + self.refused} if self.refused else {}
        found |= {"lost": "numbers with a gap"} if numbers != [*range(len(numbers))] else {}
        found |= {"repeated": "an id twice"} if len({*ids}) < len(ids) else {}
        found |= {"changed": "two requests"} if len({each.rpartition(b".")[0] for each in ids}) != 1 else {}
        return found | ({"changed": "other content"} if self.content() != uncut.content() else {})


class Routers:
    """Routers before the servers, which begin again at their ports when they are killed."""

    def __init__(self, count: int, servers: Sequence[Server]) -> None:
        self._backends = [word for server in servers for word in ("--backend", server.url)]
        self._processes: list[subprocess.Popen[str]] = []
        self.urls: list[str] = []
        for _ in range(count):
            self._processes.append(process := self._begin(0))
            said = next(line for line in process.stdout if "routing by" in line)
            self.urls.append(re.search(r"http://[\d.:]+\d", said)[0])

    def _begin(self, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "vnext.commands.cli", "router", "--port", str(port), *self._backends]
        out = subprocess.PIPE if port == 0 else subprocess.DEVNULL
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, text=True, env=environment)

    def kill(self, place: int) -> None:
        self._processes[place].kill()
        self._processes[place].wait()
        self._processes[place] = self._begin(urlsplit(self.urls[place]).port or 0)

    def close(self) -> None:
        for each in self._processes:
            each.kill()
            each.wait()


class Storm:
    """Clients that cut their streams, and a killer, until there have been enough of both. Mutable."""

    def __init__(self, servers: Sequence[Server], routers: Routers, seed: int, cuts: int, kills: int) -> None:
        """`cuts`: at least so many in all; `kills`: of each kind."""
        self._servers, self._routers, self._rng = servers, routers, random.Random(seed)
        self._urls = [*routers.urls, *(server.url for server in servers)]
        self._cuts, self._kills = cuts, kills
        self.found: Counter[str] = Counter()
        self.kills = Counter({kind: 0 for kind in (*MODULES, "router")})
        self.faults: list[str] = []

    @property
    def is_over(self) -> bool:
        return self.found["cuts"] >= self._cuts and min(self.kills.values()) >= self._kills

    async def client(self, asked: list[tuple[str, dict[str, Any]]], uncut: list[Stream]) -> None:
        while not self.is_over:
            place = self._rng.randrange(len(asked))
            await self._read(stream := Stream(*asked[place]))
            self.found["streams"] += 1
            for kind, what in stream.faults(uncut[place]).items():
                self.found[kind] += 1
                self.faults.append(f"{stream.path}: {kind}, {what}")

    async def _read(self, stream: Stream) -> None:
        while not stream.is_over and not stream.refused:
            bytes_max = 2**40 if self.is_over else self._rng.randrange(1, 12_000)
            try:
                was_cut = await stream.read(self._rng.choice(self._urls), bytes_max)
                self.found["cuts"] += was_cut  # not in one line: `+=` would read the count before it waits
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                self.found["broken by kills"] += 1
                await asyncio.sleep(PAUSE_S)

    async def killer(self, every_s: float) -> None:
        while True:
            cuts = self.found["cuts"]
            await asyncio.sleep(every_s * self._rng.uniform(0.5, 1.5))
            while self.found["cuts"] < cuts + CUTS_A_KILL:  # on a busy machine what was killed takes longer to serve again
                await asyncio.sleep(PAUSE_S)
            kind = self._rng.choice([kind for kind, count in self.kills.items() if count == min(self.kills.values())])
            with suppress(psutil.Error, IndexError):  # a process that is being started again cannot be killed, and does not count
                if kind == "router":
                    self._routers.kill(self._rng.randrange(len(self._routers.urls)))
                else:
                    processes = self._rng.choice(self._servers).processes
                    self._rng.choice([each for each in processes if MODULES[kind] in each.cmdline()]).kill()
                self.kills[kind] += 1


async def storm(
    servers: Sequence[Server], routers: Routers, streams: int, seed: int, cuts: int, kills: int, every_s: float
) -> dict[str, Any]:
    """Cut `streams` concurrent streams until there have been `cuts`, and `kills` of each kind, one every `every_s`."""
    asked = bodies(max(12, streams // 4))
    uncut = [Stream(*each) for each in asked]
    for each in uncut:
        await each.read(servers[0].url, 2**40)
        assert each.is_over and not each.refused, each.refused
    made, began_s = Storm(servers, routers, seed, cuts, kills), time.monotonic()
    killer = asyncio.create_task(made.killer(every_s))
    await asyncio.gather(*(made.client(asked, uncut) for _ in range(streams)))
    killer.cancel()
    return {
        "seed": seed, "streams": made.found["streams"], "at_once": streams, "cuts": made.found["cuts"],
        "broken_by_kills": made.found["broken by kills"], "kills": dict(made.kills),
        "lost": made.found["lost"], "repeated": made.found["repeated"], "changed": made.found["changed"],
        "faults": made.faults, "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--cuts", type=int, default=1000, help="at least so many")
    parser.add_argument("--kills", type=int, default=15, help="at least so many of each kind of process")
    parser.add_argument("--kill-every", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write a record here")
    options = parser.parse_args()
    before, amounts = machine(), (options.streams, options.seed, options.cuts, options.kills, options.kill_every)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vnext-cut-"))) for _ in range(2)]
        counts = [("--api-server-count", str(count)) for count in (2, 1)]
        servers = [stack.enter_context(serving(folder, *OPTIONS, *count)) for folder, count in zip(folders, counts)]
        for server in servers:
            in_background(server.process.stderr.read)
        routers = Routers(2, servers)
        stack.callback(routers.close)
        found = asyncio.run(storm(servers, routers, *amounts))
    print(json.dumps(found, indent=2))
    if options.json:
        command = f"python scripts/cut_streams.py --seed {options.seed}"
        record = {"command": command, "machine": msgspec.to_builtins(before), "found": found}
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    return bool(found["faults"])


if __name__ == "__main__":
    sys.exit(main())
