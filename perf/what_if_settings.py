"""Measure the accuracy of what-if for unseen settings: `python -m perf.what_if_settings DIR [--json RECORD]`.

Real servers of the bundled model under several settings receive the same requests at the same moments, in turn, ROUNDS times,
the base setting twice in each round. Each setting is predicted from the logs of the base (one, with the others beside it by --like)
and compared with its own recorded logs: how many figures lie in the printed interval, and how far the prediction is from them.
Logs that exist in DIR are reused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import msgspec

from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.replay.futures.what_if import candidates, what_if
from vnext.replay.futures.what_if_score import RunScore
from vnext.replay.reading.objective import Objective

BASE = "base"
SETTINGS = {
    "base": {}, "max_num_seqs": {"max_num_seqs": 4}, "max_num_batched_tokens": {"max_num_batched_tokens": 128},
    "num_blocks_override": {"num_blocks_override": 160}, "long_prefill_token_threshold": {"long_prefill_token_threshold": 32},
    "scheduling_policy": {"scheduling_policy": "fcfs"},
}  # fmt: skip
COMMON = ("--port", "0", "--threads", "1", "--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--disable-log-stats")
LOADS = {
    "light": ("--request-rate", "10", "--num-prompts", "150"),
    "heavy": ("--request-rate", "40", "--num-prompts", "400", "--output-len", "32"),
}
ROUNDS = 2
JUDGED = ("ttft_ms", "ttft_p99_ms", "itl_ms")
TIMEOUT_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="the record to write")
    options = parser.parse_args()
    before = machine()
    found = {load: compared(options.folder / load, arguments) for load, arguments in LOADS.items()}
    verdict = judged(found)
    print(json.dumps(verdict))
    if options.json:
        record = {
            "command": "python -m perf.what_if_settings DIR --json RECORD", "vnext": __version__,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": msgspec.to_builtins(before),
            "load_after": machine().load, "server": COMMON, "clients": LOADS, "settings": SETTINGS, "verdict": verdict, "found": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def compared(folder: Path, load: tuple[str, ...]) -> dict[str, object]:
    """Return the recorded figures of each setting, and those predicted from the logs of the base."""
    logs: dict[str, list[Path]] = {name: [] for name in SETTINGS}
    others = [name for name in SETTINGS if name != BASE]
    for _ in range(ROUNDS):
        for name in (BASE, *others[:2], BASE, *others[2:]):
            logs[name].append(recorded_log(folder / f"{name}-{len(logs[name])}", SETTINGS[name], load))
    found = {}
    tried = [
        pair
        for name, settings in SETTINGS.items()
        if name != BASE
        for pair in candidates([f"{k}={v}" for k, v in settings.items()], [])
    ]
    said = [what_if(path, tried, Objective(), like=[each for each in logs[BASE] if each != path]) for path in logs[BASE][:ROUNDS]]
    for name in SETTINGS:
        place = list(SETTINGS).index(name) - 1
        predicted = [answer.unchanged if name == BASE else answer.runs[place] for answer in said]
        shown = [what_if(path, [], Objective()).recorded for path in logs[name]]
        found[name] = {"recorded": [figures(each) for each in shown], "predicted": [figures(each) for each in predicted]}
        print(folder.name, name, json.dumps(found[name]), flush=True)
    return found


def judged(found: dict[str, dict[str, dict[str, list[dict[str, object]]]]]) -> dict[str, object]:
    """Return how many recorded figures of other settings lie in the printed interval, and the median errors of its middle."""
    inside, errors = [], {name: [] for name in JUDGED}
    for each in (each for load in found.values() for name, each in load.items() if name != BASE):
        for figure in JUDGED:
            low, high = each["predicted"][0][f"{figure}_between"]
            values = [recorded[figure] for recorded in each["recorded"]]
            inside += [low <= value <= high for value in values]
            errors[figure] += [abs((low * high) ** 0.5 / value - 1) for value in values]
    return {"inside": sum(inside), "of": len(inside)} | {name: round(median(each), 3) for name, each in errors.items()}


def figures(score: RunScore) -> dict[str, object]:
    """Return the compared figures, with bounds where they have some."""
    own = {
        "ttft_ms": score.ttft_ms[0],
        "ttft_p99_ms": score.ttft_ms[1],
        "itl_ms": score.itl_ms[0],
        "tokens_s": score.tokens_s,
    }
    own = {name: round(value, 2) for name, value in own.items()} | {
        "steps": score.steps,
        "preemptions": score.preemptions,
    }
    if score.between is not None:
        bounds = {
            "ttft_ms": score.between.ttft_ms[0],
            "ttft_p99_ms": score.between.ttft_ms[1],
            "itl_ms": score.between.itl_ms[0],
        }
        own |= {f"{name}_between": [round(value, 2) for value in pair] for name, pair in bounds.items()}
    return own


def recorded_log(folder: Path, settings: dict[str, int], load: tuple[str, ...]) -> Path:
    """Return the log of a server under these settings, recording it if it is missing."""
    if not folder.exists():
        options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        process = subprocess.Popen(
            [sys.executable, "-m", "vnext.commands.cli", "serve", "--log-dir", str(folder), *COMMON, *options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ,
        )  # fmt: skip
        try:
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line)))
            command = [sys.executable, "-m", "vnext.commands.bench.cli", "throughput", "--url", url, *load]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT_S)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(TIMEOUT_S)
            process.stdout.close()
    return next(path for path in folder.iterdir() if path.is_dir())


if __name__ == "__main__":
    sys.exit(main())
