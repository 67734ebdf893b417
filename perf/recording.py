"""Measure the log's cost in a whole server: `python -m perf.recording --seconds 130 --json RECORD`.

Owns the pairing. Servers that differ only in `--log` run side by side and are queried in the order off, shape, full, full,
shape, off, so that drift on the machine affects all of them equally. The rank is pinned to the last core and all other
processes to the first; otherwise the kernel's placement dominates the noise. One round queries each server twice with the same
new prompts. Its figures are the ratio of the times, and the difference in processor time of the engine core's thread, as the
kernel counts it. Medians over all rounds have distribution-free intervals (binomial, from order statistics). Each call adds to
the record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil

from vnext.base.version import __version__
from vnext.commands.bench.load.answers import Chunk
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.machine import machine

MODES = ("off", "shape", "full")
BATCH, PROMPT_LENGTH, ANSWER_LENGTH = 64, 16, 64
VOCABULARY = 3000
CONFIDENCE = 0.95
END_TIMEOUT_S = 30
REQUEST_TIMEOUT_S = 100
HERE = Path(__file__).resolve().parent.parent


class Server:
    """`vnext serve` with the bundled model and default options except log and threads, in this environment plus `env`.
    A context manager that ends the server."""

    def __init__(
        self, mode: str, folder: str, threads: int, env: dict[str, str] | None = None, options: tuple[str, ...] = (),
        checkout: Path = HERE,
    ) -> None:  # fmt: skip
        self._checkout = checkout
        command = [sys.executable, "-m", "vnext.commands.cli", "serve", "--port", "0", "--log", mode, "--max-num-seqs", str(BATCH)]
        command += ["--threads", str(threads), "--log-dir", folder, *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | (env or {}), cwd=checkout)

    def __enter__(self) -> Server:
        said = []
        for line in self._process.stdout:
            said.append(line)
            if line.startswith("vnext: try"):
                self.address = re.search(r"http://([\d.]+:\d+)", "".join(said))[1]
                self.client = BlockingClient(self.address, timeout_s=REQUEST_TIMEOUT_S)
                family = psutil.Process(self._process.pid).children(recursive=True)
                self.core = self._child(family, "vnext.runtime.engine.main").pid
                self.api = self._child(family, "vnext.server")
                pin([psutil.Process(self._process.pid), *family])
                return self
        raise RuntimeError(f"the server did not start: {''.join(said)}")

    def _child(self, family: list[psutil.Process], module: str) -> psutil.Process:
        """The process of `module`. Ends the server and the program where the checkout has none by that name."""
        if (found := next((each for each in family if module in each.cmdline()), None)) is None:
            self._process.terminate()
            self._process.wait(END_TIMEOUT_S)
            raise SystemExit(f"{self._checkout} runs no process of {module}: take a checkout whose processes have these names.")
        return found

    def ask(self, prompts: list[list[int]], answer_length: int = ANSWER_LENGTH) -> tuple[float, float]:
        """Make one call with all prompts; return its duration and the engine core thread's processor time, in seconds."""
        body = {"prompt": prompts, "max_tokens": answer_length, "temperature": 0, "ignore_eos": True}
        core_s, began_s = self._core_s(), time.perf_counter()
        answer = self.client.ask("/v1/completions", body, Chunk)
        took_s = time.perf_counter() - began_s
        assert answer.usage.completion_tokens == BATCH * answer_length, answer
        return took_s, self._core_s() - core_s

    def _core_s(self) -> float:
        return int(Path(f"/proc/{self.core}/schedstat").read_text().split()[0]) / 1e9

    def steps_and_bytes(self) -> tuple[int, int]:
        """Return the steps and the log's bytes so far, from /metrics."""
        text = self.client.read("/metrics").decode()
        found = (re.search(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE) for name in ("vnext_steps_total", "vnext_log_bytes"))
        return tuple(int(float(match[1])) for match in found)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.stdout.read()
        self._process.stdout.close()
        self._process.wait(END_TIMEOUT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=130.0, help="of asking, beside start and end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of the rank: with one less than cores the others have one")
    parser.add_argument("--json", type=Path, help="record to begin or to add to")
    options = parser.parse_args()
    before = machine()
    rounds, seen = measure(options)
    record = added(options, before, rounds, seen)
    for mode in MODES[1:]:
        print(mode, json.dumps(record["summary"][mode]))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace) -> tuple[list[dict[str, float]], dict[str, tuple[int, int]]]:
    """Return the rounds (seconds of each mode, both turns together, and "core" thereof) and each server's final
    (steps, log bytes)."""
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="vnext-recording-") as folder, ExitStack() as stack:
        servers = {mode: stack.enter_context(Server(mode, folder, options.threads)) for mode in MODES}
        until_s = time.monotonic() + options.seconds
        for number in range(-2, 10**6):
            if time.monotonic() > until_s:
                break
            order = MODES if number % 2 else (MODES[0], *reversed(MODES[1:]))  # shape and full alternate in the middle
            took = dict.fromkeys((*MODES, *map(core_of, MODES)), 0.0)
            for turn, modes in enumerate((order, tuple(reversed(order)))):
                prompts = fresh_prompts(random.Random(f"{options.seed} {number} {turn}"))
                for mode in modes:
                    asked_s, core_s = servers[mode].ask(prompts)
                    took[mode] += asked_s
                    took[core_of(mode)] += core_s
            if number >= 0:
                rounds.append(took)
        return rounds, {mode: server.steps_and_bytes() for mode, server in servers.items()}


def pin(family: list[psutil.Process]) -> None:
    """Pin each process of a server, with all its threads, to its core."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    for process in family:
        core = last if "vnext.runtime.rank.main" in process.cmdline() else first
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def core_of(mode: str) -> str:
    return f"{mode}, core"


def fresh_prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(5, VOCABULARY) for _ in range(PROMPT_LENGTH)] for _ in range(BATCH)]


# ---- the summary -------------------------------------------------------------------------------------------------


def added(
    options: argparse.Namespace, before: Any, rounds: list[dict[str, float]], seen: dict[str, tuple[int, int]]
) -> dict[str, Any]:
    """Return the record with these rounds added and its summary recomputed."""
    record = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {
        "command": f"python -m perf.recording --threads {options.threads} --seconds N --seed N --json RECORD, for each part",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "batch": BATCH, "prompt_length": PROMPT_LENGTH, "answer_length": ANSWER_LENGTH,
        "parts": [],
        "rounds_seconds": [],
    }  # fmt: skip
    done = {mode: {"steps": steps, "log_bytes": size} for mode, (steps, size) in seen.items()}
    record["parts"].append({"rounds": len(rounds), "load_before": before.load, "load_after": machine().load, "servers": done})
    record["rounds_seconds"] += [{name: round(seconds, 6) for name, seconds in each.items()} for each in rounds]
    calls = sum(2 * each["rounds"] + 4 for each in record["parts"])
    steps = sum(each["servers"]["off"]["steps"] for each in record["parts"]) / calls * 2
    record["summary"] = {mode: summary(record["rounds_seconds"], mode, steps) for mode in MODES}
    return record


def summary(rounds: list[dict[str, float]], mode: str, steps: float) -> dict[str, Any]:
    """Return tokens per second, the slowdown against no log in percent, and the core's additional microseconds per step."""
    tokens = 2 * BATCH * ANSWER_LENGTH
    return {
        "rounds": len(rounds),
        "confidence": CONFIDENCE,
        "tokens_per_s_median": round(tokens / statistics.median(each[mode] for each in rounds), 1),
        "longer_percent": spread([100 * (each[mode] / each["off"] - 1) for each in rounds]),
        "core_us_a_step_more": spread([1e6 * (each[core_of(mode)] - each[core_of("off")]) / steps for each in rounds]),
        "core_us_a_step": round(1e6 * statistics.median(each[core_of(mode)] for each in rounds) / steps, 2),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, its interval, and the mean."""
    low, high = interval(len(values))
    ordered = sorted(values)
    median, mean = statistics.median(values), statistics.fmean(values)
    figures = {"median": median, "low": ordered[low], "high": ordered[high], "mean": mean}
    return {name: round(value, 3) for name, value in figures.items()}


def interval(count: int) -> tuple[int, int]:
    """Return the ranks of the two order statistics that enclose the median with at least CONFIDENCE."""
    tail, low = 0.0, 0
    while low < count // 2 and (tail := tail + math.comb(count, low) / 2**count) <= (1 - CONFIDENCE) / 2:
        low += 1
    return max(low - 1, 0), count - 1 - max(low - 1, 0)


if __name__ == "__main__":
    sys.exit(main())
