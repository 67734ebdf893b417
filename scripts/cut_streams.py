"""Cut streams at random bytes while what serves them is killed: `python scripts/cut_streams.py --json RECORD`.

Owns two `vnext serve` over the bundled model behind two `vnext router`, streams of all APIs that read from any of the four, and
the killing of API servers, engine cores and routers by SIGKILL. A client that is cut sends its request again with
`Last-Event-ID`, to any of the four. What it has in the end must be what an uncut stream of the same request has: nothing lost,
repeated or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
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

from serving import Server, serving  # noqa: E402

from vnext.commands.machine import machine  # noqa: E402

OPTIONS = ("--dtype", "float32", "--threads", "1", "--served-model-name", "demo", "--max-restarts", "1000")
CORE, API = "vnext.runtime.engine.main", "vnext.server"
TEXT = rb'"(?:text|content|delta|partial_json|arguments)":"((?:[^"\\]|\\.)*)"'
OWN = re.compile(
    rb'"(?:id|item_id|call_id)":"[^"]*",?|"(?:created|created_at|completed_at|sequence_number|completion_tokens|total_tokens|'
    rb'cached_tokens|input_tokens|cache_read_input_tokens|cache_creation_input_tokens)":\d+,?'
)
"""What differs between two calls, or depends on how many tokens came in one event."""
ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
READ_TIMEOUT_S = 20.0
PAUSE_S = 0.2
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

    def content(self) -> dict[bytes, tuple[bytes, list[bytes]]]:
        """By choice: its text, and what is not text, in order."""
        found: dict[bytes, tuple[bytes, list[bytes]]] = {}
        for event in self.events:
            shown = OWN.sub(b"", event.partition(b"\n")[2])
            match = re.search(rb'"index":(\d+),"(?:text|delta)":(?!\{"type")', shown)
            text, others = found.setdefault(match[1] if match else b"", (b"", []))
            other = re.sub(rb'"logprobs":\{.*?\}\]?\}|"logprobs":\[.*?\]', b"", re.sub(TEXT, b"", shown))
            is_new = other not in others and (b"delta" not in event or b'_reason":null' not in event)
            found[match[1] if match else b""] = text + b"".join(re.findall(TEXT, shown)), others + [other] * is_new
        return found

    def faults(self, uncut: Stream) -> list[str]:
        """How the stream differs from an uncut one of the same request."""
        ids = [event.partition(b"\n")[0] for event in self.events]
        numbers = [int(each) for each in re.findall(rb'"sequence_number":(\d+)', b"\n".join(self.events))]
        found = ["refused " + self.refused] if self.refused else []
        found += ["an id twice"] if len({*ids}) < len(ids) else []
        found += ["two requests"] if len({each.rpartition(b".")[0] for each in ids}) != 1 else []
        found += ["numbers with a gap"] if numbers != [*range(len(numbers))] else []
        return found + (["other text"] if self.content() != uncut.content() else [])


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


async def storm(servers: Sequence[Server], routers: Routers, streams: int, cuts: int, seed: int, kill_s: float) -> dict[str, Any]:
    """Cut `streams` concurrent streams until there have been `cuts`, with a kill every `kill_s`."""
    rng, urls = random.Random(seed), [*routers.urls, *(server.url for server in servers)]
    asked = bodies(max(12, streams // 4))
    uncut = [Stream(*each) for each in asked]
    for each in uncut:
        await each.read(servers[0].url, 2**40)
        assert each.is_over and not each.refused, each.refused
    found: Counter[str] = Counter()
    faults: list[str] = []
    kills: Counter[str] = Counter()

    async def client() -> None:
        while found["cuts"] < cuts:
            place = rng.randrange(len(asked))
            stream = Stream(*asked[place])
            while not stream.is_over and not stream.refused:
                bytes_max = rng.randrange(1, 12_000) if found["cuts"] < cuts else 2**40
                try:
                    was_cut = await stream.read(rng.choice(urls), bytes_max)
                    found["cuts"] += was_cut
                except (OSError, asyncio.IncompleteReadError, TimeoutError):
                    found["broken"] += 1
                    await asyncio.sleep(PAUSE_S)
            found["streams"] += 1
            faults.extend(f"{stream.path}: {each}" for each in stream.faults(uncut[place]))

    killer = asyncio.create_task(_kill(servers, routers, rng, kill_s, kills))
    began_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(streams)))
    killer.cancel()
    return {
        "streams": found["streams"], "at_once": streams, "cuts": found["cuts"], "broken_by_kills": found["broken"],
        "kills": dict(kills), "faults": faults, "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip


async def _kill(servers: Sequence[Server], routers: Routers, rng: random.Random, kill_s: float, kills: Counter[str]) -> None:
    while True:
        await asyncio.sleep(kill_s * rng.uniform(0.5, 1.5))
        kind = rng.choice(["API server", "engine core", *(["router"] if routers.urls else [])])
        if kind == "router":
            routers.kill(rng.randrange(len(routers.urls)))
        else:
            with suppress(psutil.Error, StopIteration):
                os.kill(rng.choice(servers).process_of(API if kind == "API server" else CORE).pid, signal.SIGKILL)
        kills[kind] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--kill-every", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write a record here")
    options = parser.parse_args()
    before = machine()
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vnext-cut-"))) for _ in range(2)]
        servers = [stack.enter_context(serving(folder, *OPTIONS)) for folder in folders]
        routers = Routers(2, servers)
        stack.callback(routers.close)
        found = asyncio.run(storm(servers, routers, options.streams, options.cuts, options.seed, options.kill_every))
    print(json.dumps(found, indent=2))
    if options.json:
        record = {"command": "python scripts/cut_streams.py", "machine": msgspec.to_builtins(before), "found": found}
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    return bool(found["faults"])


if __name__ == "__main__":
    sys.exit(main())
