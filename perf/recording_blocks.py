"""Measure the log's cost in throughput within one server: `python -m perf.recording_blocks --log shape --json RECORD`.

Owns the switch and its measurements. A server (perf.recording) decodes full batches. A switch in its engine core turns the
recording of steady iterations on and off for BLOCK_STEPS steps each, in pairs of random order. Both halves of a pair are a tenth
of a second of the same processes on the same requests, so drift on the machine affects both, and there are thousands of pairs.
An iteration that is not steady is always recorded, because the log's accounting needs it, and ends the pair; its recording is
reported separately, as time spent. The resulting log has gaps and is deleted. The figure is the median over pairs of the ratio
of the blocks' median steps, which ignores interruptions by other programs; the ratio of whole blocks, which includes them, is
given too. Both have intervals from order statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from perf.recording import BATCH, CONFIDENCE, PROMPT_LENGTH, Server, fresh_prompts, spread
from vnext.base.version import __version__
from vnext.commands.machine import machine

BLOCK_STEPS, LEAD_STEPS = 10, 2
"""Steps of a block, and how many of them are skipped: a switch still affects the next step or two."""
ANSWER_LENGTH = 256
MEASURED = "VNEXT_PERF_BLOCKS"
HERE = Path(__file__).resolve().parent


class Switch:
    """Wraps `Recorder.append` in the engine core. Mutable; writes its measurements to a file at the end."""

    def __init__(self, recorder: type, path: Path) -> None:
        self._append, self._close, self._path = recorder.append, recorder.close, path
        self._rng = random.Random(1)
        self._modes: list[bool] = []
        self._step = -1
        self._times: list[int] = []
        self._thread_ns = 0
        self._half: dict[bool, tuple[int, int, int]] = {}
        self._measured: dict[str, Any] = {"pairs": [], "other_ns": 0, "others": 0, "began_ns": time.monotonic_ns()}

    def append(self, recorder: Any, events: Any, befores: Any, *reported: Any) -> None:
        """Record the iteration if recording is on or the iteration is not steady."""
        from vnext.log.codec import steady_pair

        if steady_pair(events) is None or len(befores[0].rows) != BATCH:
            self._step, self._half, self._modes = -1, {}, []
            began_ns = time.perf_counter_ns()
            self._append(recorder, events, befores, *reported)
            self._measured["other_ns"] += time.perf_counter_ns() - began_ns
            self._measured["others"] += 1
            return
        self._step += 1
        if self._step == BLOCK_STEPS or not self._modes:
            self._turn()
        if self._step == LEAD_STEPS:
            self._times, self._thread_ns = [], time.thread_time_ns()
        self._times.append(time.perf_counter_ns())
        if self._modes[0]:
            self._append(recorder, events, befores, *reported)

    def _turn(self) -> None:
        """End a block and begin the next."""
        if self._modes:
            times = [*self._times, time.perf_counter_ns()]
            took = [after - before for before, after in zip(times, times[1:])]
            self._half[self._modes.pop(0)] = round(statistics.median(took)), sum(took), time.thread_time_ns() - self._thread_ns
            if len(self._half) == 2:
                self._measured["pairs"].append([*self._half[False], *self._half[True]])
                self._half = {}
        if not self._modes:
            self._modes = self._rng.sample([False, True], 2)
        self._step = 0

    def close(self, recorder: Any) -> None:
        self._measured["seconds"] = (time.monotonic_ns() - self._measured.pop("began_ns")) / 1e9
        self._path.write_text(json.dumps(self._measured))
        self._close(recorder)


def install() -> None:
    """Install the switch in the engine core's process before it starts (see perf/switched/sitecustomize.py)."""
    from vnext.runtime.record.recorder import Recorder

    switch = Switch(Recorder, Path(os.environ[MEASURED]))
    Recorder.append = lambda recorder, *reported: switch.append(recorder, *reported)
    Recorder.close = lambda recorder: switch.close(recorder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", choices=("shape", "full"), default="shape")
    parser.add_argument("--seconds", type=float, default=200.0, help="of asking, beside start and end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="record to begin or to add to")
    options = parser.parse_args()
    before = machine()
    record = added(options, before, measured(options))
    print(options.log, json.dumps(record["summary"][options.log]))
    if options.json:
        options.json.write_text(json.dumps(record) + "\n")
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Load one server for the given time and return the switch's measurements."""
    with tempfile.TemporaryDirectory(prefix="vnext-recording-") as folder:
        path = Path(folder) / "measured.json"
        env = {"PYTHONPATH": os.pathsep.join((str(HERE / "switched"), str(HERE.parent))), MEASURED: str(path)}
        with Server(options.log, folder, 1, env) as server:
            until_s, rng = time.monotonic() + options.seconds, random.Random(options.seed)
            while time.monotonic() < until_s:
                server.ask(fresh_prompts(rng), ANSWER_LENGTH)
        return json.loads(path.read_text())


def added(options: argparse.Namespace, before: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record with this part added and its summary recomputed."""
    record = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {
        "command": "python -m perf.recording_blocks --log PRIVACY --seconds N --seed N --json RECORD, for each part",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "batch": BATCH, "prompt_length": PROMPT_LENGTH, "answer_length": ANSWER_LENGTH,
        "block_steps": BLOCK_STEPS, "steps_counted": BLOCK_STEPS - LEAD_STEPS,
        "parts": [],
    }  # fmt: skip
    reported = {"log": options.log, "load_before": before.load, "load_after": machine().load}
    record["parts"].append(reported | found)
    record["summary"] = {
        log: summary([part for part in record["parts"] if part["log"] == log])
        for log in sorted({part["log"] for part in record["parts"]})
    }
    return record


def summary(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowdown of a recorded step in percent, the core thread's additional microseconds per step, and the share of
    time spent recording iterations that are not steady."""
    pairs, steps = [pair for part in parts for pair in part["pairs"]], BLOCK_STEPS - LEAD_STEPS
    return {
        "pairs": len(pairs),
        "confidence": CONFIDENCE,
        "step_us": round(statistics.median(pair[0] for pair in pairs) / 1e3, 1),
        "longer_percent": spread([100 * (pair[3] / pair[0] - 1) for pair in pairs]),
        "blocks_longer_percent": spread([100 * (pair[4] / pair[1] - 1) for pair in pairs]),
        "core_us_a_step_more": spread([(pair[5] - pair[2]) / 1e3 / steps for pair in pairs]),
        "others": sum(part["others"] for part in parts),
        "others_percent": round(sum(part["other_ns"] for part in parts) / 1e7 / sum(part["seconds"] for part in parts), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
