"""What a hand-over takes: `python -m perf.handover --model FOLDER --json RECORD`.

Two engines on one host: one computes prompts, the other answers. Each round sends new prompts of random tokens: one over shared memory,
one over TCP to a second loopback address, one computed by one engine of the same settings. From the logs' timestamps comes the time from
the step that has the last full block until the blocks are in the other engine's prefix index, and from the cache's shape their bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vnext import LLM, SamplingParams
from vnext.log.codec import Frame
from vnext.machine import machine
from vnext.replay.reading.source import open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.runtime.processes.run_dir import shared_twin
from vnext.state.events import BlocksHandedOver, BlocksReceived
from vnext.version import __version__

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, 1000, (count, length)).tolist()


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to it, and the token."""
    began_s = time.perf_counter()
    (found,) = llm.generate([prompt], ONE, use_tqdm=False)
    return round(time.perf_counter() - began_s, 4), found.outputs[0].token_ids[0]


def times(log_dir: str, kind: type[BlocksHandedOver | BlocksReceived]) -> list[tuple[float, int]]:
    """When events of a kind were logged, in microseconds of the machine's clock, and their blocks."""
    log, found = open_log(Path(log_dir)), []
    clock = Clock(timestamps_of(log), absolute=True)
    for item in log.items():
        for event in item.events if isinstance(item, Frame) else ():
            if isinstance(event, kind):
                found.append((clock.frame_us(item.first_event + len(item.events)), event.count))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, help="file for the record")
    chosen = options.parse_args()
    before, rounds = machine(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {kind: stack.enter_context(LLM(chosen.model, **settings)) for kind, settings in _kinds(chosen, Path(folder))}
        one = engines.pop("one engine")
        for prompt in prompts(1, chosen.rounds, chosen.tokens):
            seconds, token = first_token(one, prompt)
            found: dict[str, Any] = {"one engine": {"seconds": seconds}}
            for kind, llm in engines.items():
                seconds, again = first_token(llm, prompt)
                assert again == token, "a block has changed an answer"
                found[kind] = {"seconds": seconds}
            rounds.append(found)
        logs = {kind: llm.log_dirs for kind, llm in engines.items()}
        files = [path.stat().st_size for path in shared_twin(engines["tcp"]._engine.run_dir).rglob("*") if len(path.name) == 32]
        stack.close()
        for kind, (prefill, decode) in logs.items():
            for found, left, came in zip(rounds, times(prefill, BlocksHandedOver), times(decode, BlocksReceived), strict=True):
                found[kind] |= {"blocks": came[1], "bytes": came[1] * files[0], "hand_over_seconds": round((came[0] - left[0]) / 1e6, 4)}
    record = {
        "command": "python -m perf.handover", "vnext": __version__, "model": Path(chosen.model).name or "demo", "tokens": chosen.tokens,
        "machine": msgspec.to_builtins(before), "load_after": machine().load, "rounds": rounds,
        "hand_over_seconds": {kind: statistics.median(each[kind]["hand_over_seconds"] for each in rounds) for kind in engines},
    }  # fmt: skip
    print({name: record[name] for name in ("rounds", "hand_over_seconds")})
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


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
