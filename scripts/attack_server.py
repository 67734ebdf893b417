"""Attack a private server and measure the effect on its other clients: `python scripts/attack_server.py --json RECORD`.

Owns the attacks of a client that may ask, and the measurement, which attack_guarded.py uses too. Each attack is something one
client may send by mistake or on purpose, repeated for some seconds against a real `vnext serve` over the bundled model, on
loopback. Meanwhile a separate process polls /health and reads short streams. The table shows the latencies of that process (ms:
median, 99th percentile, longest), the API process's memory, and the attacker's answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.base.version import __version__  # noqa: E402
from vnext.commands.bench.load.client import COMPLETIONS, Client  # noqa: E402
from vnext.commands.bench.load.generator import Request, keep_sending  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402

SETTLE_S = 1.0
DRAIN_TIMEOUT_S = 120.0
IDLE_CONNECTIONS = 2_000
STREAM = json.dumps({"prompt": "Once upon a time", "stream": True, "max_tokens": 16, "ignore_eos": True}).encode()
CHUNKS = b"1\r\n \r\n" * 2_000_000 + b"0\r\n\r\n"
SLOW = (
    "{% for m in messages %}{% if 'slow' in m.content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)

Outcome = Counter[str]
Attack = Callable[[str, float], Awaitable[Outcome]]
Serve = Callable[[Path, Path], AbstractContextManager[tuple[str, psutil.Process]]]
"""Serves from a checkout, with a folder for what it writes: the address and the API process."""


def completion(**body: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps(body).encode()


def chat(messages: list[dict[str, str]]) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1}).encode()


def words(size: int) -> str:
    return ("one two three four five six seven. " * (size // 30))[:size]


BODIES: dict[str, tuple[int, Callable[[], tuple[str, bytes]]]] = {
    "a prompt of 20 MB": (1, lambda: completion(prompt=words(20_000_000), max_tokens=1)),
    "prompts of 2 MB from 3 senders": (3, lambda: completion(prompt=words(2_000_000), max_tokens=1)),
    "4,096 prompts of 2 kB": (1, lambda: completion(prompt=[words(2_000)] * 4096, max_tokens=1)),
    "256 prompts of 2 kB": (1, lambda: completion(prompt=[words(2_000)] * 256, max_tokens=1)),
    "8 M token ids": (1, lambda: ("/v1/completions", b'{"prompt":[' + b"7," * 8_000_000 + b"7]}")),
    "256 prompts of 1,000 ids": (1, lambda: completion(prompt=[[7] * 1000] * 256, max_tokens=1)),
    "300,000 messages": (1, lambda: chat([{"role": "user", "content": "hi"}] * 300_000)),
    "/detokenize of 8 M ids": (1, lambda: ("/detokenize", b'{"tokens":[' + b"7," * 8_000_000 + b"7]}")),
    "/detokenize of 65,536 ids, 3 senders": (3, lambda: ("/detokenize", b'{"tokens":[' + b"7," * 65_535 + b"7]}")),
    "a slow template from 3 senders": (3, lambda: chat([{"role": "user", "content": "slow"}])),
}


def sending(name: str) -> Attack:
    """Sends one of BODIES repeatedly, from each of its senders."""
    senders, body = BODIES[name]

    async def attack(url: str, seconds: float) -> Outcome:
        path, data = body()
        async with Client(url, timeout_s=DRAIN_TIMEOUT_S) as client:
            return (await keep_sending(client, [Request(path=path, body=data)], senders, seconds))[0]

    return attack


async def idle(url: str, seconds: float) -> Outcome:
    """Open connections that send nothing, part of a request head, or one byte of it at intervals."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    opened = []
    for place in range(IDLE_CONNECTIONS):
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            if place % 3:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: ")
            opened.append((reader, writer))
    end_s = time.monotonic() + max(seconds, 12)  # the server waits 10 s for a request head
    while time.monotonic() < end_s:
        await asyncio.sleep(1)
        for reader, writer in opened[::3]:
            if not (reader.at_eof() or writer.is_closing()):
                writer.write(b"x")
    outcome = Counter("closed" if reader.at_eof() or writer.is_closing() else "open" for reader, writer in opened)
    for _, writer in opened:
        writer.close()
    return outcome


def posted(path: str, kind: str, body: bytes, head: str = "") -> bytes:
    """The bytes of a request whose connection ends behind it. `kind`: the body's type; `head`: more headers, or its length."""
    length = head or f"Content-Length: {len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{length}Connection: close\r\n\r\n".encode() + body


def raw(make: Callable[[], bytes], senders: int = 2) -> Attack:
    """Sends bytes, from each of some senders, and reads the status."""

    async def attack(url: str, seconds: float) -> Outcome:
        end_s, outcome = time.monotonic() + seconds, Outcome()

        async def send() -> None:
            while time.monotonic() < end_s:
                reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
                with contextlib.suppress(ConnectionError):
                    writer.write(make())
                    await writer.drain()
                with contextlib.suppress(ConnectionError):
                    outcome[(await reader.readline())[9:12].decode() or "closed"] += 1
                writer.close()

        await asyncio.gather(*[send() for _ in range(senders)])
        return outcome

    return attack


def bracketed() -> bytes:
    """A request with a content type of its own, which takes its reader long."""
    return posted("/v1/completions", f"application/json;x={time.time_ns()};a={'(' * 7_000}", b"{}")


async def nothing(url: str, seconds: float) -> Outcome:
    await asyncio.sleep(seconds)
    return Counter()


ATTACKS: dict[str, Attack] = {
    "none": nothing,
    **{name: sending(name) for name in BODIES},
    f"{IDLE_CONNECTIONS:,} idle connections": idle,
    "content types of brackets": raw(bracketed),
    "2 M chunks of a byte": raw(lambda: posted("/v1/completions", "application/json", CHUNKS, "Transfer-Encoding: chunked\r\n"), 1),
}


async def probe(url: str, key: str, end: asyncio.Event) -> dict[str, list[float]]:
    """Measure latencies (ms) until `end`: of /health, of the first token of short streams, and between two chunks."""
    found: dict[str, list[float]] = {"health": [], "first": [], "gaps": []}

    async def ask(client: Client) -> None:
        begun_s = time.monotonic()
        await client.answer("/health")
        found["health"].append((time.monotonic() - begun_s) * 1e3)
        await asyncio.sleep(0.02)

    async def stream(client: Client) -> None:
        last_s, name = time.perf_counter(), "first"
        async for chunk in client.stream(COMPLETIONS, STREAM):
            found[name].append((chunk.at_s - last_s) * 1e3)
            last_s, name = chunk.at_s, "gaps"
        await asyncio.sleep(0.05)

    async def repeat(work: Callable[[Client], Awaitable[None]]) -> None:
        async with Client(url, key, DRAIN_TIMEOUT_S) as client:
            while not end.is_set():
                await work(client)

    await asyncio.gather(repeat(ask), repeat(stream))
    return found


async def probe_until_told(url: str, key: str) -> None:
    """Run the probe in its own process until SIGTERM, then print the latencies."""
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    print("ready", flush=True)
    print(json.dumps(await probe(url, key, end)), flush=True)


@contextmanager
def serving(root: Path, folder: Path, template: str = SLOW, more: Sequence[str] = ()) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the address of a server and its API process. `root`: the checkout it runs from; `template`: of its chats; `more`
    options."""
    (folder / "template.jinja").write_text(template)
    options = ("--port", "0", "--threads", "1", "--log", "off", "--chat-template", str(folder / "template.jinja"), *more)
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", *options]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("vnext: try"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        api = next(child for child in children if "vnext.server" in child.cmdline())
        yield re.search(r"http://[\d.:]+", "".join(lines))[0], api
    finally:
        process.terminate()
        process.wait(60)


def attacked(running: tuple[str, psutil.Process], attack: Attack, seconds: float, key: str = "") -> dict[str, Any]:
    """Run one attack on a server and return its line of the record. `key`: that of the others."""
    url, api = running
    before, begun_s = api.memory_info().rss, time.monotonic()
    command = [sys.executable, __file__, "--probe", url, "--key", key]
    probing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert probing.stdout.readline() == "ready\n"
        outcome = asyncio.run(attack(url, seconds))
    finally:
        probing.terminate()
        said = probing.communicate(timeout=2 * DRAIN_TIMEOUT_S)[0]
    time.sleep(SETTLE_S)
    latencies = {kind: spread(values) for kind, values in json.loads(said).items()}
    memory = {"rss_before": before, "rss_after": api.memory_info().rss}
    return {"seconds": round(time.monotonic() - begun_s, 1), "got": dict(outcome), **latencies, **memory}


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {name: round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 1) for name, part in at.items()}
    return found | {"count": len(values)}


def line(name: str, found: dict[str, Any]) -> str:
    cells = "".join(f"{found[kind][at]:>9.0f}" for kind in ("health", "first", "gaps") for at in ("p50", "p99", "max"))
    memory = f"{found['rss_before'] / 2**20:>6.0f}{found['rss_after'] / 2**20:>6.0f}"
    got = ", ".join(f"{count} x {what}" for what, count in sorted(found["got"].items()))
    return f"{name:48}{cells}{memory}  {got}"


def run(command: str, attacks: Mapping[str, tuple[Serve, Attack]], key: str = "") -> int:
    """The program `command`: run each attack on a server of its own, print the table, write the record."""
    parser = argparse.ArgumentParser(description=f"python scripts/{command}")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose server is attacked")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    before, found = machine(), {}
    print(f"{'attack':48}{'/health p50, p99, max':>27}{'first token':>27}{'between tokens':>27}{'MiB before, after':>12}")
    for name in (name for name in attacks if options.only in name):
        serve, attack = attacks[name]
        with tempfile.TemporaryDirectory() as folder, serve(options.root, Path(folder)) as running:
            found[name] = attacked(running, attack, options.seconds, key)
        print(line(name, found[name]), flush=True)
    if options.json:
        record = {
            "command": f"python scripts/{command} --json RECORD",
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vnext": __version__,
            "machine": msgspec.to_builtins(before),
            "load_after": machine().load,
            "unit": "ms",
            "attacks": found,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        asyncio.run(probe_until_told(sys.argv[2], sys.argv[4]))
    else:
        sys.exit(run("attack_server.py", {name: (serving, attack) for name, attack in ATTACKS.items()}))
