"""Benchmark of the accuracy of what-if's step times on this machine: two real engines, a model fitted to each log.

`python -m pytest perf/bench_step_times.py`, about two minutes. The bundled model (steps of a millisecond) and random weights
in the shape of SmolLM-135M (ten and more) answer the waves of scripts/timed_log.py. `extra_info` has the relative
errors on steps left out of the fit, and the noise (the difference between equal steps), which bounds the accuracy of any model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.random_model import SHAPES, write_checkpoint
from scripts.timed_log import BATCH_TOKENS_MAX, serve
from vnext.api.llm import LLM
from vnext.replay.futures.recording import recorded
from vnext.replay.futures.step_times import fit, held_out, misfit, noise
from vnext.replay.reading.source import open_log

SECONDS = {"demo": 20.0, "llama-135m": 45.0}


@pytest.mark.parametrize("name", SECONDS)
def test_fit(benchmark, tmp_path, name: str) -> None:
    model = ""
    if name in SHAPES:
        write_checkpoint(SHAPES[name], tmp_path / "model")
        model = str(tmp_path / "model")
    settings = dict(max_num_batched_tokens=BATCH_TOKENS_MAX, max_model_len=512)
    with LLM(model, log_dir=str(tmp_path / "logs"), **settings) as llm:
        passes, log_dir = serve(llm, SECONDS[name], 1), Path(llm.log_dir)
    taken = recorded(open_log(log_dir))
    found = benchmark.pedantic(lambda: fit(taken.features, taken.step_us, taken.began_us), rounds=5)
    alike, held = noise(taken.features, taken.step_us), held_out(taken.features, taken.step_us)
    own = misfit(*held, found.predict(held[0]))
    benchmark.extra_info |= dict(
        passes=passes, steps=found.steps, step_ms_median=round(float(np.median(taken.step_us)) / 1e3, 2),
        alike=alike.steps, overhead_ms=round(taken.overhead_us / 1e3, 2),
    )  # fmt: skip
    for field in ("p50", "p90", "p99"):
        benchmark.extra_info[f"error_{field}"] = round(getattr(found, f"error_{field}"), 3)
        benchmark.extra_info[f"misfit_{field}"] = round(getattr(own, field), 3)
        benchmark.extra_info[f"noise_{field}"] = round(getattr(alike, field), 3)
