"""Benchmark of a server's processor time beside its model, per step and token. `python -m pytest perf/bench_server_cost.py`

Owns the load: the bundled model behind `vnext serve`, and BATCH concurrent streams read by one client. The kernel counts the
processor time of all threads of the engine core and of the API server (schedstat); /metrics counts steps. Rounds alternate
between two answer lengths: the difference gives the cost of a steady step and of a streamed token.
`python -m perf.bench_server_cost --against CHECKOUT --json RECORD` compares two checkouts in alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from perf.recording import BATCH, PROMPT_LENGTH, Server, fresh_prompts, spread
from vnext.base.version import __version__
from vnext.commands.machine import machine

SHORT, LONG = 64, 448
"""Answer lengths in tokens; between them the ranks' digests are due a whole number of times."""
ROUNDS = 6
TIMEOUT_S = 120
PROCESSES = ("core", "api")
HERE = Path(__file__).resolve().parent.parent
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Spent(msgspec.Struct, frozen=True):
    """The cost of one call of all streams: seconds of each process and of the clock, and events (one may hold several tokens)."""

    core_s: float
    api_s: float
    took_s: float
    steps: int
    events: int


def test_step_and_token(benchmark) -> None:
    """The cost of a step and of a streamed token in this checkout's server."""
    found: list[tuple[Spent, Spent]] = []
    with tempfile.TemporaryDirectory(prefix="vnext-cost-") as folder, Server("shape", folder, 1) as server:
        rng = random.Random(0)
        both(server, rng)
        benchmark.pedantic(lambda: found.append(both(server, rng)), rounds=ROUNDS)
    costs = [cost(*each) for each in found]
    benchmark.extra_info.update({name: round(statistics.median(each[name] for each in costs), 2) for name in costs[0]})


def both(server: Server, rng: random.Random) -> tuple[Spent, Spent]:
    """Run both answer lengths."""
    return stream_all(server, rng, SHORT), stream_all(server, rng, LONG)


def stream_all(server: Server, rng: random.Random, length: int) -> Spent:
    """Make BATCH concurrent calls, each answered by a stream of `length` tokens, and read until all end."""
    bodies = [
        json.dumps({"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True})
        for prompt in fresh_prompts(rng)
    ]
    steps, before, began_s = server.steps_and_bytes()[0], computed(server), time.perf_counter()
    events = read_all(server.address, bodies)
    took_s, after = time.perf_counter() - began_s, computed(server)
    time.sleep(0.1)  # lets the engine core's last messages of this call reach the API server
    return Spent(after[0] - before[0], after[1] - before[1], took_s, server.steps_and_bytes()[0] - steps, events)


def read_all(address: str, bodies: list[str]) -> int:
    """Count the events of all streams in one thread that does nothing else."""
    host, port = address.split(":")
    events, ends = 0, {}
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
            connection.sendall((HEAD.format(len(body)) + body).encode())
            selector.register(connection, selectors.EVENT_READ)
            ends[connection] = b""
        until_s = time.monotonic() + TIMEOUT_S
        while ends and time.monotonic() < until_s:
            for key, _ in selector.select(1.0):
                connection = key.fileobj
                data = ends[connection] + connection.recv(1 << 16)
                events += data.count(b"\n\n", max(0, len(ends[connection]) - 1))
                ends[connection] = data[-16:]
                if b"data: [DONE]" in data:
                    selector.unregister(connection)
                    connection.close()
                    del ends[connection]
    assert not ends, f"{len(ends)} streams have not ended"
    return events - len(bodies)  # [DONE]


def computed(server: Server) -> tuple[float, float]:
    """Return the processor seconds of the engine core and of the API server, all threads."""
    return thread_seconds(server.core), thread_seconds(server.api.pid)


def thread_seconds(pid: int) -> float:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def cost(short: Spent, long: Spent) -> dict[str, float]:
    """Return microseconds: of a steady step in the engine core, and of a token and an event in the API server; "whole" figures
    include arrivals and ends."""
    steps, tokens = long.steps - short.steps, BATCH * (LONG - SHORT)
    step, token = (long.core_s - short.core_s) / steps, (long.api_s - short.api_s) / tokens
    return {
        "core_us_a_step": 1e6 * step,
        "api_us_a_token": 1e6 * token,
        "api_us_an_event": 1e6 * (long.api_s - short.api_s) / (long.events - short.events),
        "whole_core_us_a_step": 1e6 * (short.core_s + long.core_s) / (short.steps + long.steps),
        "whole_api_us_a_token": 1e6 * (short.api_s + long.api_s) / (BATCH * (SHORT + LONG)),
        "tokens_per_s": BATCH * LONG / long.took_s,
    }


# ---- two checkouts in turn ---------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="another checkout, its extensions built")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="record to write")
    options = parser.parse_args()
    before = machine()
    rounds = measure({"before": options.against, "after": HERE}, options.rounds)
    record = {
        "command": "python -m perf.bench_server_cost --against CHECKOUT --json RECORD",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "load_after": machine().load,
        "streams": BATCH, "prompt_length": PROMPT_LENGTH, "answer_lengths": [SHORT, LONG],
        "summary": summary(rounds),
        "rounds": rounds,
    }  # fmt: skip
    print(json.dumps(record["summary"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(checkouts: dict[str, Path], count: int) -> list[dict[str, dict[str, float]]]:
    """Measure the servers of both checkouts, which run side by side, in alternating order."""
    rounds = []
    with tempfile.TemporaryDirectory(prefix="vnext-cost-") as folder, ExitStack() as stack:
        servers = {name: stack.enter_context(Server("shape", folder, 1, checkout=path)) for name, path in checkouts.items()}
        for number in range(-1, count):
            order = list(servers) if number % 2 else list(reversed(servers))
            costs = {name: cost(*both(servers[name], random.Random(f"{number} {name}"))) for name in order}
            if number >= 0:
                rounds.append({name: {of: round(value, 2) for of, value in each.items()} for name, each in costs.items()})
    return rounds


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of both, and the ratio after / before over all pairs with its interval."""
    return {
        of: {name: round(statistics.median(each[name][of] for each in rounds), 1) for name in ("before", "after")}
        | {"ratio": spread([each["after"][of] / each["before"][of] for each in rounds])}
        for of in rounds[0]["after"]
    }


if __name__ == "__main__":
    sys.exit(main())
