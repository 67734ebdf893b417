"""Benchmark of the API server alone, beside a bare echo of aiohttp. `python -m perf.bench_api_overhead --json RECORD`

Owns an engine that answers at once, an aiohttp handler that writes as many events of the same size, and one client that
only counts bytes. Server, engine and client are processes; rounds ask the server and the echo in turn. The kernel counts the
server's processor time, which other programs on the machine disturb less than the rates. A second part gives
each of STREAMS streams a token every PACE_S and takes the time from the engine's sending to the client's receiving.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zmq
from aiohttp import web

from perf.bench_server_cost import thread_seconds
from perf.record import parser_of, record_of, write_record
from perf.recording import spread
from perf.steady_edge import CONFIG, HEAD, PROMPT
from vnext.commands.machine import machine
from vnext.runtime.client.client import EngineClient
from vnext.runtime.engine.clients import client_decoder
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.messages import EngineReady, Hello, Outputs, RequestOutput, SubmitRequest, encoder
from vnext.server.context.text_work import settle
from vnext.server.run import make_app, make_runner
from vnext.server.settings import ServerSettings
from vnext.state.events import pack_tokens
from vnext.text.tokenizer import Tokenizer

STREAMS, TOKENS, ROUNDS, SHORT_LOADS = 32, 256, 5, 4
PACE_S = 0.02
TOKEN = 300
FRAME_BYTES = 240
"""The size of a token's event from the server; the echo writes events of this size."""


def engine(address: str, pace_s: float) -> None:
    """Give every live request a token at each step, a step each `pace_s` or as fast as it goes."""
    core = zmq.Context().socket(zmq.ROUTER)
    core.bind(address)
    live: dict[str, list[int]] = {}
    names = 0
    while True:
        while core.poll(0 if live else 100):
            peer, *frames = core.recv_multipart()
            for message in map(client_decoder.decode, frames):
                if isinstance(message, Hello):
                    core.send_multipart((peer, encoder.encode(EngineReady(config=CONFIG, model="demo", world_size=1, log_dir=""))))
                elif isinstance(message, SubmitRequest):
                    live[message.name] = [names, message.sampling.max_tokens, 0]
                    names += 1
        numbers, others = b"", []
        for name, entry in list(live.items()):
            number, count, done = entry
            entry[2] += 1
            if 0 < done < count - 1:
                numbers += number.to_bytes(8, "little")
                continue
            finish = "length" if done == count - 1 else ""
            others.append(RequestOutput(name=name, tokens=pack_tokens([TOKEN]), number=number, finish=finish))
            if finish:
                del live[name]
        if numbers or others:
            tokens = pack_tokens([TOKEN] * (len(numbers) // 8))
            core.send_multipart((peer, encoder.encode(Outputs(outputs=tuple(others), numbers=numbers, tokens=tokens))))
            time.sleep(pace_s)


def api(address: str, ready: Connection) -> None:
    """The API server."""

    async def run() -> None:
        client = await EngineClient.connect(address)
        settings = ServerSettings(served_model_names=("demo",), model_path=str(DEMO_MODEL))
        runner = make_runner(make_app(client, Tokenizer.load(DEMO_MODEL), None, settings))
        settle()
        await _serve(runner, ready)

    asyncio.run(run())


def echo(_: str, ready: Connection) -> None:
    """A bare handler that writes an answer's events."""
    frame = b"data: " + b"x" * (FRAME_BYTES - 8) + b"\n\n"

    async def answer(request: web.Request) -> web.StreamResponse:
        count = json.loads(await request.read())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await response.write(frame)
        await response.write_eof()
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        await _serve(web.AppRunner(app, access_log=None), ready)

    asyncio.run(run())


async def _serve(runner: web.AppRunner, ready: Connection) -> None:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ready.send(site._server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def ask(port: int, count: int, arrivals: list[float] | None = None) -> int:
    """One streamed answer of `count` tokens; returns its events. `arrivals` collects the times at which they came."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": count, "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD.format("/v1/completions", len(body)).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").encode() + body)
    events = 0
    while data := await reader.read(1 << 16):
        found = data.count(b"data: ")
        events += found
        if arrivals is not None:
            arrivals += [time.monotonic()] * found
    writer.close()
    return events


async def load(port: int, count: int) -> tuple[float, int]:
    """Seconds that STREAMS answers of `count` tokens take, and their events: an API server that is behind merges tokens."""
    began_s = time.perf_counter()
    events = await asyncio.gather(*(ask(port, count) for _ in range(STREAMS)))
    assert min(events) > 1, events
    return time.perf_counter() - began_s, sum(events)


async def gaps(port: int) -> list[float]:
    """How much later than PACE_S after the one before each event came, in ms: what the way adds, but for a constant."""
    found: list[list[float]] = [[] for _ in range(STREAMS)]
    await asyncio.gather(*(ask(port, TOKENS, arrivals) for arrivals in found))
    late = []
    for arrivals in found:
        steps = [second - first for first, second in zip(arrivals, arrivals[1:])]
        late += [1e3 * (step - statistics.median(steps)) for step in steps[1:-2]]
    return late


class Process:
    """A server of this file on a port, with an engine of its own where it has one."""

    def __init__(self, target: Callable[[str, Connection], None], pace_s: float | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="vnext-overhead-")
        address = f"ipc://{self._folder.name}/engine"
        ours, theirs = spawn.Pipe()
        self._all = [spawn.Process(target=target, args=(address, theirs), daemon=True)]
        if pace_s is not None:
            self._all.append(spawn.Process(target=engine, args=(address, pace_s), daemon=True))
        for process in self._all:
            process.start()
        assert ours.poll(60), "the server did not start"
        self.port, self.pid = ours.recv(), self._all[0].pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.terminate()
            process.join()
        self._folder.cleanup()


def round_of(server: Process) -> dict[str, float]:
    """Rates, and microseconds that the server computes for a token and for a request of two tokens."""
    began_s = thread_seconds(server.pid)
    long, events = asyncio.run(load(server.port, TOKENS))
    between_s = thread_seconds(server.pid)
    short = sum(asyncio.run(load(server.port, 2))[0] for _ in range(SHORT_LOADS))
    requests, tokens = SHORT_LOADS * STREAMS, STREAMS * (TOKENS - 2)
    request_s = (thread_seconds(server.pid) - between_s) / requests
    return {
        "tokens_per_s": STREAMS * TOKENS / long,
        "events_per_s": events / long,
        "requests_per_s": requests / short,
        "cpu_us_a_token": 1e6 * (between_s - began_s - STREAMS * request_s) / tokens,
        "cpu_us_a_request": 1e6 * request_s,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Rounds of both, and the latency of the paced server."""
    found: dict[str, list[dict[str, float]]] = {"api": [], "echo": []}
    with Process(api, 0.0) as own, Process(echo, None) as bare:
        for number in range(-1, rounds):
            for name, server in (("api", own), ("echo", bare)) if number % 2 else (("echo", bare), ("api", own)):
                each = round_of(server)
                if number >= 0:
                    found[name].append(each)
    with Process(api, PACE_S) as paced:
        late = sorted(asyncio.run(gaps(paced.port)))
    figures = {
        name: {of: round(statistics.median(each[of] for each in rounds_of), 1) for of in rounds_of[0]} for name, rounds_of in found.items()
    }
    shares = {
        of: spread([(other[of] / one[of] if "cpu" in of else one[of] / other[of]) for one, other in zip(found["api"], found["echo"])])
        for of in found["api"][0]
    }
    jitter = {f"p{share}": round(late[len(late) * share // 100], 2) for share in (50, 90, 99)}
    return {"figures": figures, "share_of_echo": shares, "event_later_than_usual_ms": jitter}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    before = machine()
    load = {"streams": STREAMS, "tokens": TOKENS, "pace_s": PACE_S, "rounds": options.rounds}
    record = record_of("python -m perf.bench_api_overhead --json RECORD", before, load | measure(options.rounds))
    print(json.dumps({key: record[key] for key in ("figures", "share_of_echo", "event_later_than_usual_ms", "load_after")}, indent=1))
    write_record(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
