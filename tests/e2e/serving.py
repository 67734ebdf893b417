"""A real server for tests: `vnext serve` as a stranger starts it, on a free loopback port, ended by the test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.bench.load.client import COMPLETIONS, Client

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 60
SOON_S = 60
"""What was killed serves again after 13 s on a busy machine."""
REQUEST_TIMEOUT_S = 240


class Server:
    """A server that has said that it is ready."""

    def __init__(self, process: subprocess.Popen[str], said: str) -> None:
        self.process = process
        self.said = said
        self.url = re.search(r"http://[\d.:]+", said)[0]
        self.log_dir = Path(re.search(r"^vnext: log +(\S+)$", said, re.MULTILINE)[1])

    @property
    def processes(self) -> list[psutil.Process]:
        """This server's processes: itself first, then API, engine core and ranks."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def process_of(self, module: str) -> psutil.Process:
        """The process that runs `python -m module`."""
        return next(process for process in self.processes if module in process.cmdline())

    def stop(self) -> int:
        """As Ctrl-C does; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        self.process.stdout.read()
        return self.process.wait(END_TIMEOUT_S)

    def metric(self, name: str) -> float:
        """The value of one sample of /metrics, summed over its labels."""
        text = BlockingClient(self.url).read("/metrics").decode()
        lines = (line for line in text.splitlines() if re.match(rf"{name}(\{{|\s)", line))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """What the work gives, or its error, is put into the list when the thread ends."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # the thread's outcome is the test's to judge
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@contextmanager
def held(server: Server) -> Iterator[None]:
    """Its rank is stopped: what is asked in the block begins, and goes on behind it."""
    rank = server.process_of("vnext.runtime.rank.main")
    rank.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.resume()


def eventually(condition: Callable[[], bool], timeout_s: float = SOON_S) -> bool:
    """Whether it becomes true: figures in /metrics follow what they tell of by a moment."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def fill(process: subprocess.Popen[str], descriptor: int) -> None:
    """Leave no room in the pipe that is its standard output or error."""
    full = os.open(f"/proc/{process.pid}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while os.write(full, b"." * size):
                pass
    os.close(full)


@contextmanager
def serving(log_dir: Path, *arguments: str, by: Sequence[str] = (), more: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`vnext serve --port 0 ...` until the block ends; `by`: words before it, of a program that turns into it; `more` environment."""
    command = [*by, sys.executable, "-P", "-m", "vnext.commands.cli", "serve", "--port", "0", "--log-dir", str(log_dir), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(more or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    family: list[psutil.Process] = []
    try:
        said = said_until_ready(process)
        server = Server(process, said)
        family = server.processes
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()
        process.stderr.close()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def said_until_ready(process: subprocess.Popen[str]) -> str:
    """What the server printed up to its curl line. AssertionError with its complaint if it ended instead."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("vnext: try"):
            return "".join(lines)
    raise AssertionError(f"the server did not start: {''.join(lines)}{process.stderr.read()}")


def complete_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    """POST all bodies to /v1/completions, so many at a time; the answers in order."""
    return asyncio.run(_complete_all(url, bodies, concurrency))


async def _complete_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    limiter = asyncio.Semaphore(concurrency)
    async with Client(url, timeout_s=REQUEST_TIMEOUT_S) as client:

        async def complete(body: dict[str, Any]) -> dict[str, Any]:
            async with limiter:
                return await client.ask(COMPLETIONS, body, dict)

        return await asyncio.gather(*(complete(body) for body in bodies))
