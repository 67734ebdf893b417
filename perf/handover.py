"""What a hand-over takes: `python -m perf.handover [--model FOLDER | --shape llama-135m] --json RECORD`.

Two engines on one host: one computes prompts, the other answers. Each round sends new prompts of random tokens: one over shared memory,
one over TCP to a second loopback address, one computed by one engine of the same settings. From the logs' timestamps come the times from
the plan of the step that computes the last full block, and from its end, until the blocks are in the other engine's prefix index; from
the cache's shape their bytes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from perf.disk_tier import first_token, prompts
from perf.peers.shapes import shape_of, write_checkpoint
from perf.record import parser_of, record_of, write_record
from vnext import LLM
from vnext.commands.machine import machine
from vnext.log.codec import Frame
from vnext.replay.reading.source import open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.runtime.processes.run_dir import shared_twin
from vnext.state.events import BlocksHandedOver, BlocksReceived, StepCommitted, StepPlanned

APART = ("shared memory", "tcp")
FIGURES = ("hand_over_seconds", "after_computing_seconds")


class Moment(NamedTuple):
    """An event of a hand-over: when it was logged, when all steps planned by then were complete, in microseconds of the machine's
    clock, its blocks."""

    logged_us: float
    computed_us: float
    blocks: int


def moments(log_dir: str, kind: type[BlocksHandedOver | BlocksReceived]) -> list[Moment]:
    """The events of a kind in a log."""
    log, found = open_log(Path(log_dir)), []
    clock, planned, begun, last = Clock(timestamps_of(log), absolute=True), -1, None, -1
    for item in log.items():
        for event in item.events if isinstance(item, Frame) else ():
            now_us = clock.frame_us(item.first_event + len(item.events))
            planned = event.step if isinstance(event, StepPlanned) else planned
            if isinstance(event, kind):
                begun, last = Moment(now_us, now_us, event.count), planned
            elif isinstance(event, StepCommitted) and begun is not None and event.step >= last:
                found.append(begun._replace(computed_us=now_us))
                begun = None
    return found


def main() -> None:
    options = parser_of(__doc__)
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    options.add_argument("--shape", default="", help="random weights in a shape of scripts/random_model.py, in place of a model")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if chosen.shape:
            chosen.model = str(Path(folder) / chosen.shape)
            write_checkpoint(shape_of(chosen.shape), Path(chosen.model))
        engines = {kind: stack.enter_context(LLM(chosen.model, **settings)) for kind, settings in _kinds(chosen, Path(folder))}
        rounds = [_round(engines, prompt) for prompt in prompts(1, chosen.rounds, chosen.tokens)]
        [file_bytes] = {path.stat().st_size for path in shared_twin(engines["tcp"]._engine.run_dir).glob("*/??/*")}
        stack.close()
        for kind in APART:
            prefill, decode = engines[kind].log_dirs
            left, came = moments(prefill, BlocksHandedOver), moments(decode, BlocksReceived)
            for found, sent, got in zip(rounds, left, came, strict=True):
                found[kind] |= {"bytes": got.blocks * file_bytes}
                found[kind] |= {"hand_over_seconds": round((got.logged_us - sent.logged_us) / 1e6, 4)}
                found[kind] |= {"after_computing_seconds": round((got.logged_us - sent.computed_us) / 1e6, 4)}
    command = f"python -m perf.handover{f' --shape {chosen.shape}' if chosen.shape else ''}"
    record = record_of(command, before, {
        "model": Path(chosen.model).name or "demo", "tokens": chosen.tokens, "rounds": rounds,
        **{name: {kind: round(statistics.median(each[kind][name] for each in rounds), 4) for kind in APART} for name in FIGURES},
    })  # fmt: skip
    print({name: record[name] for name in ("rounds", *FIGURES)})
    write_record(chosen.json, record)


def _round(engines: dict[str, LLM], prompt: list[int]) -> dict[str, Any]:
    """A prompt that no engine has seen, at each of them."""
    answers = {kind: first_token(llm, prompt) for kind, llm in engines.items()}
    assert len({found["token"] for found in answers.values()}) == 1, "a block has changed an answer"
    return {kind: {"seconds": found["seconds"]} for kind, found in answers.items()}


def _kinds(chosen: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    length = chosen.tokens + 16
    secret = folder / "secret"
    secret.write_text("a secret of both engines")
    usual = {
        "max_model_len": length, "hf_overrides": {"max_position_embeddings": length}, "threads": 1, "log": "full",
        "num_gpu_blocks_override": (chosen.rounds + 2) * length // 16,
    }  # fmt: skip
    apart = usual | {"data_parallel_size": 2, "prefill_engines": 1}
    yield "one engine", usual | {"log_dir": str(folder / "one")}
    yield "shared memory", apart | {"log_dir": str(folder / "shm")}
    yield "tcp", apart | {
        "log_dir": str(folder / "tcp"), "handover_transport": "tcp", "handover_address": "127.0.0.2:0", "cluster_secret_file": str(secret),
    }  # fmt: skip


if __name__ == "__main__":
    main()
