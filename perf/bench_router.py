"""Benchmark of `vnext router` between clients and servers that answer at once. `python -m perf.bench_router --json RECORD`

Owns two servers that look like vnext's, the router over them, and one client that only counts bytes; each is a process. Rounds
ask a server itself and the router in turn. The kernel counts the router's processor time, which other programs on the machine
disturb less than the rates: one core passes 1e6 / cpu_us_a_request requests a second. A last part paces the streams, whose events
carry the time of their sending, and asks one request at a time: what the router adds to an event and to a request.
The same requests then go to servers that show their events and convert prompts to tokens (followed.py), so that the router knows
them exactly: of four of these, how long a router takes that was killed, from its start until it knows all.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from aiohttp import web

from perf.bench_server_cost import thread_seconds
from perf.followed import COMPLETION, IDENTITY, answered, followed
from perf.record import parser_of, record_of, write_record
from perf.recording import spread
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.machine import machine
from vnext.gateway.context import RouterContext
from vnext.gateway.run import make_app, make_runner
from vnext.gateway.settings import RouterSettings
from vnext.server.context.text_work import settle

CLIENTS, REQUESTS, STREAMS, EVENTS, ROUNDS = 16, 1000, 16, 250, 5
PACED, PACE_S, PROMPT_BYTES = 200, 0.005, 2000
EXACT_SERVERS, KEY, POLL_S, START_S = 4, "key", 0.005, 30.0
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def server(ready: Connection) -> None:
    """A server that looks like vnext's: a stream has `max_tokens` events, each with the time of its sending as its text."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        if not body.get("stream"):
            return web.json_response(COMPLETION | {"choices": [{"index": 0, "text": " sea", "finish_reason": "length"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            choice = {"index": 0, "text": f"{time.monotonic():.6f} ", "logprobs": None, "finish_reason": None, "stop_reason": None}
            await response.write(b"data: " + msgspec.json.encode(COMPLETION | {"choices": [choice]}) + b"\n\n")
            if body.get("user"):
                await asyncio.sleep(PACE_S)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    for path, answer in (("/health", {}), ("/v1/models", {"data": [{"id": "demo"}]}), ("/server_info", IDENTITY)):
        app.router.add_get(path, lambda _, answer=answer: answered(answer))
    asyncio.run(_serve(web.AppRunner(app, access_log=None), ready))


def router(ready: Connection, *urls: str) -> None:
    """The router over the servers."""

    async def run() -> None:
        context = RouterContext(RouterSettings(backends=urls))
        for backend in context.fleet:
            await context.health.look(backend)
            context.health.watch(backend)
        settle()
        await _serve(make_runner(make_app(context)), ready)

    asyncio.run(run())


async def _serve(runner: web.AppRunner, ready: Connection) -> None:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ready.send(site.port)
    await asyncio.Event().wait()


class Process:
    """A server or the router on a port."""

    def __init__(self, target: Callable[..., None], *given: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, *given), daemon=True)
        self._process.start()
        assert ours.poll(60), "it did not start"
        self.port, self.pid = ours.recv(), self._process.pid

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


# ---- the client ----------------------------------------------------------------------------------------------------


def body_of(number: int, **more: Any) -> bytes:
    """A request whose prompt shares its first half with others."""
    prompt = "x" * (PROMPT_BYTES // 2) + f"{number:08}" * (PROMPT_BYTES // 16)
    body = json.dumps({"model": "demo", "prompt": prompt} | more).encode()
    return HEAD.format(len(body)).encode() + body


async def requests(port: int, count: int, client: int) -> list[float]:
    """Ask so many times on one connection; returns the seconds that each took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    for number in range(count):
        began_s = time.perf_counter()
        writer.write(body_of(client * count + number, max_tokens=1))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(size)
        took.append(time.perf_counter() - began_s)
    writer.close()
    return took


async def stream(port: int, count: int, client: int, paced: bool = False) -> list[float]:
    """Read one stream to its end; returns the seconds from the sending of the newest event of each read, where it is paced."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(body_of(client, max_tokens=count, stream=True, seed=1, **({"user": "paced"} if paced else {})))
    late: list[float] = []
    events, rest = 0, b""
    while b"[DONE]" not in rest:
        data = await reader.read(1 << 16)
        events += data.count(b"data: ")
        rest = rest[-16:] + data
        if paced and (at := data.rfind(b'"text":"')) >= 0:
            late.append(time.monotonic() - float(data[at + 8 : at + 40].split(b" ")[0]))
    writer.close()
    assert events >= count, events
    return late


async def all_requests(port: int) -> None:
    await asyncio.gather(*(requests(port, REQUESTS // CLIENTS, client) for client in range(CLIENTS)))


async def all_streams(port: int) -> None:
    await asyncio.gather(*(stream(port, EVENTS, client) for client in range(STREAMS)))


def round_of(port: int, pid: int) -> dict[str, float]:
    """Rates through a port, and microseconds that the process computes for a request and for an event."""
    before_s, began_s = thread_seconds(pid), time.perf_counter()
    asyncio.run(all_requests(port))
    between_s, middle_s = thread_seconds(pid), time.perf_counter()
    asyncio.run(all_streams(port))
    ended_s, after_s = time.perf_counter(), thread_seconds(pid)
    count, request_s = REQUESTS // CLIENTS * CLIENTS, (between_s - before_s) / (REQUESTS // CLIENTS * CLIENTS)
    return {
        "requests_per_s": count / (middle_s - began_s),
        "events_per_s": STREAMS * EVENTS / (ended_s - middle_s),
        "cpu_us_a_request": 1e6 * request_s,
        "cpu_us_an_event": 1e6 * (after_s - between_s - STREAMS * request_s) / (STREAMS * EVENTS),
    }


async def paced_streams(port: int) -> list[float]:
    """How late each paced event of STREAMS streams came."""
    return sum(await asyncio.gather(*(stream(port, PACED, client, paced=True) for client in range(STREAMS))), [])


def delays(port: int, pid: int) -> dict[str, float]:
    """Milliseconds of single requests, and from the sending of a paced event to its arrival; what such an event costs."""
    took = sorted(asyncio.run(requests(port, PACED, 0)))
    before_s = thread_seconds(pid)
    late = sorted(asyncio.run(paced_streams(port)))
    return {
        "cpu_us_a_paced_event": 1e6 * (thread_seconds(pid) - before_s) / (STREAMS * PACED),
        "request_ms_p50": 1e3 * statistics.median(took), "request_ms_p99": 1e3 * took[int(0.99 * len(took))],
        "event_ms_p50": 1e3 * statistics.median(late), "event_ms_p99": 1e3 * late[int(0.99 * len(late))],
    }  # fmt: skip


# ---- servers that are followed -------------------------------------------------------------------------------------


def exact(rounds: int) -> dict[str, Any]:
    """The requests' rate and processor time through a router with exact views, and its milliseconds from a start until it has them."""
    servers = [Process(followed) for _ in range(EXACT_SERVERS)]
    urls = [f"http://127.0.0.1:{each.port}" for each in servers]
    between = Process(router, *urls)
    try:
        asyncio.run(all_requests(between.port))
        found = [requests_of(between) for _ in range(rounds)]
        between.close()
        return {"rounds": found, "exact_again_ms": [1e3 * each for each in starts_again(urls, rounds)]}
    finally:
        for each in (between, *servers):
            each.close()


def requests_of(between: Process) -> dict[str, float]:
    before_s, began_s = thread_seconds(between.pid), time.perf_counter()
    asyncio.run(all_requests(between.port))
    count = REQUESTS // CLIENTS * CLIENTS
    took_s, spent_s = time.perf_counter() - began_s, thread_seconds(between.pid) - before_s
    return {"requests_per_s": count / took_s, "cpu_us_a_request": 1e6 * spent_s / count}


def starts_again(urls: list[str], rounds: int) -> list[float]:
    """Seconds of each start (`started_again`), after one that compiles vnext's modules into a folder of their own: an installed vnext
    has them compiled, whatever this machine's Python keeps."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        started_again(urls, environment)
        return [started_again(urls, environment) for _ in range(rounds)]


def started_again(urls: list[str], environment: dict[str, str]) -> float:
    """Seconds from the start of `vnext router` until it says that it knows every server exactly. It is killed then."""
    command = [sys.executable, "-m", "vnext.commands.cli", "router", "--port", "0", "--admin-key", KEY]
    command += [word for url in urls for word in ("--backend", url)]
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = next(line for line in process.stdout if "routing by" in line)
            address = next(word for word in said.split() if word.startswith("http")).rstrip(";")
            client = BlockingClient(address, KEY, START_S)
            while time.perf_counter() - began_s < START_S:
                if {each["view"] for each in client.ask("/router/backends", None, list)} == {"exact"}:
                    return time.perf_counter() - began_s
                time.sleep(POLL_S)
        finally:
            process.kill()
    raise AssertionError("it never knew all of them")


def measure(rounds: int) -> dict[str, Any]:
    servers = [Process(server), Process(server)]
    between = Process(router, *(f"http://127.0.0.1:{each.port}" for each in servers))
    try:
        ways = {"server": (servers[0].port, servers[0].pid), "router": (between.port, between.pid)}
        for port, pid in ways.values():
            round_of(port, pid)  # warm
        found = [{name: round_of(*way) | delays(*way) for name, way in ways.items()} for _ in range(rounds)]
    finally:
        for each in (between, *servers):
            each.close()
    names = found[0]["router"]
    summary = {name: {way: round(statistics.median(each[way][name] for each in found), 3) for way in ways} for name in names}
    added = {name: spread([each["router"][name] - each["server"][name] for each in found]) for name in names if "_ms_" in name}
    return {"summary": summary, "added": added, "rounds": found}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    before = machine()
    load = {"clients": CLIENTS, "requests": REQUESTS, "streams": STREAMS, "events": EVENTS, "prompt_bytes": PROMPT_BYTES}
    found = measure(options.rounds) | {"exact": exact(options.rounds)}
    record = record_of("python -m perf.bench_router --json RECORD", before, load | found)
    print(json.dumps({"summary": record["summary"], "added": record["added"], "exact": record["exact"]}, indent=1))
    write_record(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
