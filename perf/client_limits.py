"""What vnext-bench's client carries, and what it sees: `python -m perf.client_limits --json RECORD`.

Carried: a server, a process of its own, writes the events of STREAMS answers at the ticks of a clock, at more tokens a second each time.
`client_cores` is the client's processor time by the length of the run, start and end included. Seen: a server that is paced by a clock
stands still for FROZEN_S in the middle of a run, at several rates of requests; about FROZEN_S of each run's length meet it.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perf.clients import ANSWER, FIRST_S, GAP_S, models_answer, paced_server, run as run_client
from perf.record import machine, parser_of, record_of, write_record
from vnext.runtime.processes.launch import DEMO_MODEL

STREAMS, TICK_S, SECONDS = 64, 0.005, 10
CARRIED = (5_000, 10_000, 20_000, 30_000, 40_000)
RATES = (1, 4, 16)
FROZEN_S, FROZEN_AFTER_S, ASKED_S = 2.0, 4.0, 10
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(event: dict[str, Any]) -> bytes:
    data = b"data: %s\n\n" % json.dumps(event).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = chunk({"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " the", "finish_reason": None}]})
LAST = chunk({"id": "cmpl-1", "choices": [{"index": 0, "text": " the", "finish_reason": "length"}]})


def end_of(count: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    return LAST + chunk({"id": "cmpl-1", "choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Pouring(asyncio.Protocol):
    """One connection of a server that answers at `tokens_s` for all STREAMS together."""

    tokens_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        if not found or len(body) < sum(lengths):
            return
        self.data = b""
        if head.startswith(b"POST"):
            asyncio.get_running_loop().create_task(self.pour(json.loads(body)["max_tokens"]))
        else:
            told = models_answer()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told))

    async def pour(self, count: int) -> None:
        loop, gap_s = asyncio.get_running_loop(), STREAMS / self.tokens_s
        begun_s, sent = loop.time(), 0
        self.transport.write(HEAD)
        while sent < count - 1:
            due = min(count - 1, int((loop.time() - begun_s) / gap_s) + 1)
            self.transport.writelines([TOKEN] * (due - sent))
            sent = due
            await asyncio.sleep(max(gap_s, TICK_S))
        self.transport.write(end_of(count))


async def pouring(tokens_s: float) -> None:
    """Serve until killed; the port is the first line."""
    Pouring.tokens_s = tokens_s
    server = await asyncio.get_running_loop().create_server(Pouring, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def asked(url: str, folder: Path, requests: int, answer: int, *more: str) -> dict[str, Any]:
    """What vnext-bench serve finds, and how many cores it takes."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run_client([
        sys.executable, "-m", "vnext.commands.bench.cli", "serve", "--backend", "openai", "--base-url", url, "--tokenizer", str(DEMO_MODEL),
        "--dataset-name", "random", "--ignore-eos", "--random-input-len", "8", "--random-output-len", str(answer), "--num-prompts",
        str(requests), "--save-result", "--result-dir", str(folder), "--result-filename", "found.json", *more,
    ])  # fmt: skip
    after, lasted_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun_s
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert found["completed"] == requests, found
    cores = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / lasted_s
    return found | {"client_cores": round(cores, 3)}


def carried(tokens_s: int, folder: Path) -> dict[str, float]:
    serving = subprocess.Popen([sys.executable, "-m", "perf.client_limits", "--pour", str(tokens_s)], stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    try:
        url = f"http://127.0.0.1:{serving.stdout.readline().strip()}"
        found = asked(url, folder, STREAMS, SECONDS * tokens_s // STREAMS, "--max-concurrency", str(STREAMS))
    finally:
        serving.kill()
        serving.communicate()
    names = ("output_throughput", "client_cores", "median_tpot_ms", "p99_itl_ms")
    return {"paced_tokens_s": tokens_s, "paced_gap_ms": 1000 * STREAMS / tokens_s} | {name: found[name] for name in names}


def seen(rate: int, folder: Path) -> dict[str, float]:
    with paced_server(FROZEN_AFTER_S, FROZEN_S) as url:
        found = asked(url, folder, rate * ASKED_S, ANSWER, "--request-rate", str(rate), "--burstiness", "1000000")
    names = ("median_ttft_ms", "p99_ttft_ms", "median_e2el_ms", "p99_e2el_ms", "median_itl_ms", "p99_itl_ms", "max_itl_ms")
    return {"requests_s": rate} | {name: found[name] for name in names if name in found}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pour", type=float, default=0.0, help="serve this many tokens a second: this program starts itself so")
    options, before = parser.parse_args(), machine()
    if options.pour:
        asyncio.run(pouring(options.pour))
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            "paced_first_ms": 1000 * FIRST_S, "paced_gap_ms": 1000 * GAP_S, "streams": STREAMS, "frozen_s": FROZEN_S,
            "carried": [carried(each, Path(folder)) for each in CARRIED], "seen": [seen(each, Path(folder)) for each in RATES],
        }  # fmt: skip
    print(json.dumps(measured, indent=2))
    if options.json:
        write_record(options.json, record_of("python -m perf.client_limits", before, measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
