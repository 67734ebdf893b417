"""What LoRA adapters cost: throughput of mixed batches beside the base model, and what streams notice of a loading adapter.

    python -m perf.lora --json FILE [--model FOLDER]

Throughput: 32 requests with the base model, over 8 adapters and over 32, by turns in one engine with 32 slots. Loading: a server
with one slot streams 32 answers, while one request after another needs an adapter that is not in the slot, then the same requests
without adapters; the gaps between a stream's tokens are compared. Adapters are random, of rank 16, on every linear layer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import vnext
from vnext import LLM, LoRARequest, SamplingParams
from vnext.commands.bench.load.answers import Chunk, Models
from vnext.commands.bench.load.client import COMPLETIONS, Client
from vnext.commands.machine import machine

RANK, REQUESTS, TOKENS = 16, 32, 64
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STREAM_TOKENS, LOADS = 160, 12


def main() -> None:
    """Measure and write the record."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", type=Path, help="file for the record")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--model", type=Path, default=Path(vnext.__file__).parent / "demo_model")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        adapters = [random_adapter(chosen.model, Path(parent) / str(seed), seed) for seed in range(REQUESTS)]
        record = {
            "command": "python -m perf.lora", "model": chosen.model.name, "machine": msgspec.to_builtins(machine()), "rank": RANK,
            "throughput": throughput(chosen.model, adapters, chosen.rounds),
            "loading": asyncio.run(loading(chosen.model, adapters[:LOADS])),
        }  # fmt: skip
    print(json.dumps({name: record[name] for name in ("throughput", "loading")}, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def random_adapter(model: Path, folder: Path, seed: int) -> Path:
    """An adapter of every linear layer of the checkpoint, as PEFT writes them."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(str(model / "model.safetensors"), "pt") as weights:
        for name in weights.keys():
            if name.split(".")[-2] in TARGETS:
                out_size, in_size = weights.get_slice(name).get_shape()
                place = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, in_size, generator=rng) * 0.1
                tensors[f"{place}.lora_B.weight"] = torch.randn(out_size, RANK, generator=rng) * 0.01
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS), "bias": "none"}
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def throughput(model: Path, adapters: list[Path], rounds: int) -> dict[str, Any]:
    """Seconds of each batch, and the ratios base / adapters of the rounds. The first round warms up and loads."""
    requests = [LoRARequest(f"adapter {at}", at, str(folder)) for at, folder in enumerate(adapters)]
    over: dict[str, list[LoRARequest | None]] = {
        "base": [None] * REQUESTS,
        **{f"{count} adapters": [requests[at % count] for at in range(REQUESTS)] for count in (8, 32)},
    }
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [f"A text with the number {at}, which begins like this:" for at in range(REQUESTS)]
    seconds: dict[str, list[float]] = {name: [] for name in over}
    with LLM(str(model), threads=1, log="off", enable_lora=True, max_loras=REQUESTS, max_lora_rank=RANK, max_model_len=512) as llm:
        for round_ in range(rounds + 1):
            for name, chosen in over.items():
                began_s = time.perf_counter()
                llm.generate(prompts, params, False, chosen)
                if round_:
                    seconds[name].append(time.perf_counter() - began_s)
    ratios = {name: [base / mine for base, mine in zip(seconds["base"], each)] for name, each in seconds.items() if name != "base"}
    return {
        "requests": REQUESTS, "tokens_each": TOKENS,
        "base_tokens_per_s": round(REQUESTS * TOKENS / statistics.median(seconds["base"]), 1),
        "of_base_median": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "of_base": {name: [round(ratio, 3) for ratio in each] for name, each in ratios.items()},
    }  # fmt: skip


async def loading(model: Path, adapters: list[Path]) -> dict[str, Any]:
    """The gaps between tokens of 32 streams, in ms: beside requests that load adapters, and beside the same without them."""
    names = [f"{at}={folder}" for at, folder in enumerate(adapters)]
    command = [sys.executable, "-m", "vnext.commands.cli", "serve", str(model), "--port", "0", "--threads", "1", "--log", "off"]
    command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK), "--max-model-len", "512", "--lora-modules", *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    gaps: dict[str, list[float]] = {"loading": [], "alone": []}
    try:
        async with Client(re.search(r"http://[\d.]+:\d+", "".join(iter(server.stdout.readline, "vnext: Ctrl-C stops\n")))[0]) as client:
            base = (await client.ask("/v1/models", None, Models)).first.id
            for round_ in range(3):
                for kind, chosen in (("alone", [base] * len(adapters)), ("loading", list(map(str, range(len(adapters)))))):
                    streams = [asyncio.create_task(stream_gaps(client, base, at)) for at in range(REQUESTS)]
                    for model_name in chosen:
                        await client.ask(COMPLETIONS, {"model": model_name, "prompt": "One token:", "max_tokens": 1}, Chunk)
                    found_gaps = [gap for each in await asyncio.gather(*streams) for gap in each]
                    gaps[kind] += found_gaps if round_ else []
    finally:
        server.terminate()
        server.wait()
    p99 = {kind: statistics.quantiles(each, n=100)[98] * 1e3 for kind, each in gaps.items()}
    return {
        "streams": REQUESTS, "loads": len(adapters),
        "gap_p50_ms": {kind: round(statistics.median(each) * 1e3, 2) for kind, each in gaps.items()},
        "gap_p99_ms": {kind: round(each, 2) for kind, each in p99.items()},
        "p99_growth_percent": round((p99["loading"] / p99["alone"] - 1) * 100, 1),
    }  # fmt: skip


async def stream_gaps(client: Client, model: str, seed: int) -> list[float]:
    """The seconds between the events of one stream."""
    body = {
        "model": model, "prompt": f"Stream {seed} begins:", "max_tokens": STREAM_TOKENS, "seed": seed, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    times = [chunk.at_s async for chunk in client.stream(COMPLETIONS, body)]
    return [later - earlier for earlier, later in zip(times, times[1:])]


if __name__ == "__main__":
    main()
