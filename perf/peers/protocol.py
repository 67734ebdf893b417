"""The interface of all engines: a process that takes jobs as lines of JSON and answers each with its tokens and seconds.

Owns the runner's side: arguments, the channel, the clock around a job. Standard library only, and Python 3.11 up: every
runner imports it inside its engine's own environment, where neither vnext nor the rest of perf is installed.

    job     {"prompts": [[id, ...], ...], "lengths": [n, ...]}      greedy, n tokens to each prompt, nothing ends early
    answer  {"seconds": s, "answers": [[id, ...], ...], "about": {...}, "roots": [pid, ...]}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """The interface that a runner implements."""

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """All prompts at once, greedily; answer i has lengths[i] tokens. Returns when the last one is there."""

    def about(self) -> dict[str, Any]:
        """Return versions and all settings that differ from the engine's defaults, for the record."""

    def roots(self) -> list[int]:
        """Processes that are the engine; with all their children they make up its memory."""

    def close(self) -> None:
        """End it."""


def run(make: Callable[[Path, int], Engine]) -> None:
    """Answer jobs until the input ends. `make(model, threads)` starts the engine; libraries are imported there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    channel = private_output()
    engine = make(options.model, options.threads)
    try:
        for line in sys.stdin:
            answer = timed(engine, json.loads(line)) | {"about": engine.about(), "roots": engine.roots()}
            channel.write(json.dumps(answer) + "\n")
            channel.flush()
    finally:
        engine.close()


def timed(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    answers = engine.generate(job["prompts"], job["lengths"])
    return {"seconds": time.perf_counter() - begin_s, "answers": answers}


def private_output() -> Any:
    """Return the original standard output and redirect later prints of libraries to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel
