"""Measure what-if under heavy load on a simulated device: `python -m perf.what_if_heavy DIR [--json RECORD]`.

Forty clients send more than the engine can do: the queue is long, pages run short, requests give way. Three runs under the base
settings differ by hiccups, slow stretches and noise of steps. Each setting is predicted from the first, with the others beside it
(--like), and run twice itself: how many first tokens (the median, the 99th percentile) lie in the printed interval, and how far
the prediction is. The true law of step times is known, so what a real machine adds (perf.what_if_settings) is not here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "replay" / "causes"))

import incidents  # noqa: E402  (needs the path above)
from story_logs import Coming, Story, config, fraction, text  # noqa: E402

from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402
from vnext.replay import Log  # noqa: E402
from vnext.replay.futures.what_if import candidates, what_if  # noqa: E402
from vnext.replay.reading.objective import Objective  # noqa: E402

REQUESTS, CLIENTS, EVERY_US = 300, 40, 12_000
BASE = {"page_count": 600, "max_num_seqs": 32, "max_num_batched_tokens": 512, "policy": "fair"}
SETTINGS = (
    "max_num_seqs=16", "max_num_seqs=64", "page_count=300", "page_count=1200", "max_num_batched_tokens=128", "policy=fcfs",
    "long_prefill_token_threshold=64",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="the record to write")
    options = parser.parse_args()
    base = [recorded(options.folder, "base", {}, seed) for seed in range(3)]
    tried = [each for setting in SETTINGS for each in candidates([setting], [])]
    said = what_if(base[0], tried, Objective(), like=base[1:])
    again = {"": [firsts(log) for log in base[1:]]}
    for setting in SETTINGS:
        again[setting] = [firsts(recorded(options.folder, setting, dict([setting.split("=")]), seed)) for seed in range(2)]
    found = judged([msgspec.to_builtins(run) for run in (said.unchanged, *said.runs)], again)
    print(json.dumps(found["verdict"]))
    if options.json:
        options.json.write_text(json.dumps(about() | found, indent=1) + "\n")
    return 0


def about() -> dict[str, object]:
    return {
        "command": "python -m perf.what_if_heavy DIR --json RECORD", "vnext": __version__,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": msgspec.to_builtins(machine()), "base": BASE,
    }  # fmt: skip


def recorded(folder: Path, name: str, changes: dict[str, str], seed: int) -> Path:
    """The log of one run under other settings."""
    values = {key: int(value) if value.isdecimal() else value for key, value in changes.items()}
    story = Story(config=config(**(BASE | values)), clients=asked())
    place = f"{name.replace('=', '-')}-{seed}"
    incidents.record(folder, place, incidents.Incident(cause="", story=story, pace=lambda us, step: pace(name, seed, step)))
    return folder / place


def asked() -> list[Coming]:
    """Arrivals of a Poisson process, a few clients with most of them, and lengths with a long tail."""
    found, at_us = [], 0
    for number in range(REQUESTS):
        at_us += int(-EVERY_US * math.log(1 - fraction("gap", number)))
        client = int(CLIENTS * fraction("client", number) ** 2)
        prompt = [*text(f"system {client}", 64), *text(f"prompt {number}", 30 + int(600 * fraction("length", number) ** 3))]
        found.append(Coming(at_us=at_us, prompt=prompt, answer=20 + int(200 * fraction("answer", number) ** 2), client=client + 1))
    return found


def pace(name: str, seed: int, step: int) -> float:
    """How many times as long a step takes: its own noise, a slow or fast stretch, and in 1 of 250 steps a hiccup."""
    noise, stretch = (2 * fraction(kind, name, seed, place) - 1 for kind, place in (("step", step), ("stretch", step // 200)))
    return (1 + 0.04 * noise) * (1 + 0.03 * stretch) * (3.0 if fraction("hiccup", name, seed, step) < 0.004 else 1.0)


def firsts(log: Path) -> list[float]:
    """The median and the 99th percentile of the first tokens, in ms."""
    times = np.sort(Log(log).requests["ttft_ms"].astype(float))
    times = times[~np.isnan(times)]
    return [float(times[int(share * (len(times) - 1))]) for share in (0.5, 0.99)]


def judged(runs: list[dict], again: dict[str, list[list[float]]]) -> dict[str, object]:
    """What was predicted beside what the same settings gave, and how many of these lie in the interval."""
    found, inside, errors = {}, [], []
    for run in runs:
        between = run["between"]["ttft_ms"]
        for figures in again[run["changes"]]:
            inside += [low <= figure <= high for figure, (low, high) in zip(figures, between)]
            errors += [abs(predicted / figure - 1) for figure, predicted in zip(figures, run["ttft_ms"])]
        found[run["changes"] or "base"] = {
            "predicted_ttft_ms": [round(each, 1) for each in run["ttft_ms"]], "between": [[round(x, 1) for x in each] for each in between],
            "rerun_ttft_ms": [[round(x, 1) for x in each] for each in again[run["changes"]]], "preemptions": run["preemptions"],
        }  # fmt: skip
    verdict = {"inside": sum(inside), "of": len(inside), "median_error": round(median(errors), 4), "largest_error": round(max(errors), 4)}
    return {"verdict": verdict, "found": found}


if __name__ == "__main__":
    sys.exit(main())
