"""Fuzz HTTP: send hostile requests to a real server: `python scripts/fuzz_http.py --requests 100000 --json RECORD`.

Owns the sending and the checks. Each request gets an answer in time with a status below 500: a complete result, or an error
object with a sentence. The server writes no traceback; its memory does not grow after the first fifth of the run; and a fixed
request in between always gets the same tokens. `--first-seed N --requests 1` repeats one request. Exits with status 1 if a
check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from hostile_requests import Case, case

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402

ANSWER_S = 60.0  # enough for a busy machine; a hang lasts longer
BROKEN_S = 0.3  # a broken request need not be answered: the server may wait for more bytes
WORKERS = 16
ROUND = 5_000
GROWTH_MAX, GROWTH_BYTES_MAX = 1.2, 48 * 2**20
FAULTS_MAX = 20
PROBE = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
SERVER = ("--dtype", "float32", "--threads", "1", "--max-model-len", "128", "--show-log", "--log-max-bytes", "64M")
DIGESTS = ("--digest-interval", "1")  # a rank that differs is detected at once
BLOCKS = ("--num-blocks-override", "512")  # the prefix cache fills soon and then stops growing
SMALL_POOL = ("--num-blocks-override", "12")  # requests preempt each other all the time
RESPONSE_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")


class Response(NamedTuple):
    """An answer. `status` 0: none came. `headers` have lower-case names. `body` is complete only if `is_whole`."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool


NONE = Response(0, {}, b"", False)

# ---- one request ---------------------------------------------------------------------------------------------------


async def send(port: int, sent: Case, answer_s: float = ANSWER_S) -> Response:
    """Send a case and read the answer, unless the case hangs up first. Raises TimeoutError if no answer comes in time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        with suppress(ConnectionError):
            for piece in sent.pieces:
                writer.write(piece)
                await writer.drain()
        if sent.leave == "early":
            return NONE
        if sent.leave == "mid":
            with suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(200), BROKEN_S)
            return NONE
        return await asyncio.wait_for(_read(reader, sent), answer_s if sent.is_http else BROKEN_S)
    except (ConnectionError, asyncio.IncompleteReadError):
        return NONE
    except TimeoutError:
        if sent.is_http:
            raise
        return NONE
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, sent: Case) -> Response:
    status, headers = 100, {}
    while status == 100:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
    if sent.data.startswith(b"HEAD") or status in (204, 304):
        return Response(status, headers, b"", True)
    if headers.get("transfer-encoding") == "chunked":
        return Response(status, headers, await _read_chunks(reader), True)
    if "content-length" in headers:
        return Response(status, headers, await reader.readexactly(int(headers["content-length"])), True)
    return Response(status, headers, await reader.read(), True)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


def fault_of(sent: Case, got: Response) -> str:
    """Describe the fault in the answer to a case, "" if there is none."""
    if sent.leave or (got.status == 0 and not sent.is_http):
        return ""
    if got.status == 0:
        return "no answer"
    if got.status >= 500:
        return f"status {got.status}: {got.body[:200]!r}"
    if got.status >= 400:
        return "" if not sent.is_http or got.status == 417 or sent.data.startswith(b"HEAD") else _fault_of_refusal(sent, got)
    if "text/event-stream" in got.headers.get("content-type", ""):
        last = got.body.rstrip(b"\n").rpartition(b"\n\n")[2]
        ends = (b'data: {"error"', b"event: error\n", b"event: message_stop\n", *RESPONSE_ENDS)
        last = last.partition(b"\n")[2] if last.startswith(b"id: ") else last
        return "" if last == b"data: [DONE]" or last.startswith(ends) else f"a stream ends with {last[-100:]!r}"
    if "ndjson" in got.headers.get("content-type", ""):
        last = got.body.rstrip(b"\n").rpartition(b"\n")[2]
        return "" if b'"done":true' in last or last.startswith(b'{"error"') else f"a stream of lines ends with {last[-100:]!r}"
    if got.body and "json" in got.headers.get("content-type", ""):
        with suppress(ValueError):
            return "" if json.loads(got.body) is not None else "null"
        return f"no JSON: {got.body[:100]!r}"
    return ""


def _fault_of_refusal(sent: Case, got: Response) -> str:
    try:
        error = json.loads(got.body)["error"]
    except (ValueError, LookupError, TypeError):
        return f"status {got.status} without an error object: {got.body[:200]!r}"
    if isinstance(error, str) and sent.data.partition(b" ")[2].startswith(b"/api/"):  # as Ollama's are
        error = {"message": error, "type": "error"}
    message = error["message"] if isinstance(error, dict) else None
    is_sentence = isinstance(message, str) and 10 < len(message) < 2000 and error["type"] and "x-request-id" in got.headers
    return "" if is_sentence else f"status {got.status} with an odd error: {str(error)[:300]}"


# ---- all of them ---------------------------------------------------------------------------------------------------


class Run:
    """One server and the observations so far. Mutable."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self.port, self.process = port, process
        self.statuses: Counter[int] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self.slowest_s = 0.0
        self._probe: Any = None

    async def all(self, first: int, count: int) -> None:
        """Send rounds of requests and check the server before and after each."""
        await self.look(0)
        for begin in range(0, count, ROUND):
            seeds = iter(range(first + begin, first + min(begin + ROUND, count)))
            await asyncio.gather(*(self._work(seeds) for _ in range(WORKERS)))
            await self.look(min(begin + ROUND, count))
            if len(self.faults) >= FAULTS_MAX:
                return

    async def _work(self, seeds: Any) -> None:
        for seed in seeds:
            if len(self.faults) >= FAULTS_MAX:
                return
            sent, began_s = await asyncio.to_thread(case, seed), time.monotonic()  # generating a large case takes seconds
            try:
                got = await send(self.port, sent)
                fault = fault_of(sent, got)
            except TimeoutError:
                got, fault = NONE, f"no answer within {ANSWER_S:g} s"
            except OSError as error:
                got, fault = NONE, f"no connection: {error}"
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.statuses[got.status] += 1
            if fault:
                self.fault(seed, fault)

    def fault(self, seed: int, what: str) -> None:
        self.faults.append({"seed": seed, "fault": what})
        print(f"seed {seed}: {what}", file=sys.stderr, flush=True)

    async def look(self, done: int) -> None:
        """Check that the fixed request gets its known answer, and note the memory of each process."""
        text = json.dumps(PROBE).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        got = await send(self.port, Case(-1, [f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text], "", True))
        answer = json.loads(got.body).get("choices") if got.status == 200 else f"status {got.status}"
        self._probe = self._probe or answer
        if answer != self._probe or got.status != 200:
            self.fault(-1, f"after {done} requests the usual one gets {answer}")
        sizes = {process.cmdline()[2]: process.memory_info().rss for process in self.process.children(recursive=True)}
        self.memory.append({"requests": done, "bytes": sizes})
        print(f"{done} requests: {dict(sorted(self.statuses.items()))}, {sizes}", flush=True)

    def judge_memory(self, count: int) -> None:
        """Compare each process's memory at the end with its memory after the first fifth."""
        early = next(each for each in self.memory if each["requests"] * 5 >= count)["bytes"]
        for name, size in self.memory[-1]["bytes"].items():
            if name in early and size > GROWTH_MAX * early[name] and size > early[name] + GROWTH_BYTES_MAX:
                self.fault(-1, f"{name} grew from {early[name]} to {size} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--two-ranks", action="store_true", help="two ranks and a cache for one long request and a half")
    parser.add_argument("--json", type=Path, help="write what was seen, and on which machine, into this file")
    options = parser.parse_args()
    before, began_s = machine(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as said:
        pool = (*SMALL_POOL, "--tensor-parallel-size", "2") if options.two_ranks else BLOCKS
        places = ("--port", "0", "--log-dir", folder, "--batch-dir", f"{folder}/batches")
        command = [sys.executable, "-m", "vnext.commands.cli", "serve", *SERVER, *pool, *DIGESTS, *places]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT)
        try:
            run = Run(_port_of(server), psutil.Process(server.pid))
            asyncio.run(run.all(options.first_seed, options.requests))
            run.judge_memory(options.requests)
        except OSError as error:
            run.fault(-1, f"the server is gone: {error}")
        finally:
            server.terminate()
            server.communicate(timeout=60)
        said.seek(0)
        _judge_words(run, said.read(), server.returncode)
    _report(options, run, before, time.monotonic() - began_s)
    return int(bool(run.faults))


def _port_of(server: subprocess.Popen[str]) -> int:
    for line in server.stdout:
        if found := re.search(r"vnext: serving .*:(\d+)$", line):
            port = int(found[1])
        if "Ctrl-C stops" in line:
            return port
    raise SystemExit("the server did not start")


def _judge_words(run: Run, words: str, status: int) -> None:
    if found := re.search(r"^.*(?:ERROR|Traceback).*$", words, re.MULTILINE):
        run.fault(-1, f"the server wrote: {words[found.start() : found.start() + 3000]}")
    if status != 0:
        run.fault(-1, f"the server ended with status {status}: {words[-1000:]}")


def _report(options: argparse.Namespace, run: Run, before: Any, seconds: float) -> None:
    print(f"{options.requests} requests in {seconds:.0f} s, {len(run.faults)} faults, slowest answer {run.slowest_s:.1f} s")
    if options.json is None:
        return
    record = {
        "command": f"python scripts/fuzz_http.py --requests {options.requests} --first-seed {options.first_seed}",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "load_after": [round(each, 2) for each in os.getloadavg()],
        "seconds": round(seconds, 1),
        "slowest_answer_s": round(run.slowest_s, 2),
        "statuses": {str(status): count for status, count in sorted(run.statuses.items())},
        "memory": run.memory,
        "faults": run.faults,
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
