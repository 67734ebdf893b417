"""An agent's turns with and without a pin, while others flood the cache: `python -m perf.retention --model FOLDER --json RECORD`.

An agent has instructions and tools, and ten turns: each prompt is the last one, its answer, and the result of a tool. In each round three
agents take the same turn, one after the other. Two of them, one with a pin and one without, are disturbed: between their turns other
prompts pass through all pages. Nobody disturbs the third. Times run from the call to the stream's first token; processor times are
those of all processes of the server until then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from perf.bench_server_cost import thread_seconds
from perf.recording import Server
from vnext.base.version import __version__
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.machine import machine

TURNS = 10
TOOLS, RESULT, ANSWER = 800, 64, 16
"""Tokens of the instructions and tools, of a tool's result, and of an answer."""
PAGES, BLOCK = 240, 16
FLOOD = (1856, 1856)
"""Tokens of the prompts of a flood: together as many blocks as there are pages, nearly."""
LENGTH = 2048
TIMEOUT_S = 300


class Client:
    """A client of a server, and the processor time of the server's processes."""

    def __init__(self, server: Server) -> None:
        self._client = BlockingClient(server.address, timeout_s=TIMEOUT_S)
        self._pids = [server.core, *(child.pid for child in psutil.Process(server.core).parent().children(recursive=True))]

    def ask(self, prompt: list[int], pins: bool = False) -> tuple[dict[str, Any], list[int]]:
        """Seconds to the first token, processor seconds until then and tokens that were hits; and the answer."""
        body = {
            "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}, "prompt_cache_retention": "24h" if pins else None,
        }  # fmt: skip
        cpu_s, began_s = self._cpu_s(), time.perf_counter()
        took, found = None, list[int]()
        for chunk in self._client.stream("/v1/completions", body):
            took = took or {"seconds": chunk.at_s - began_s, "cpu": self._cpu_s() - cpu_s}
            found += chunk.token_ids
            if chunk.usage:
                took["hit"] = chunk.usage.prompt_tokens_details.cached_tokens
        assert took and len(found) == ANSWER, found
        return {name: round(value, 4) for name, value in took.items()}, found

    def _cpu_s(self) -> float:
        return sum(map(thread_seconds, set(self._pids)))


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(10, 1000, count).tolist()


def turns(client: Client, rng: np.random.Generator) -> list[dict[str, Any]]:
    """The rounds: of each agent, what its turn took."""
    prompts, rounds = {"pinned": tokens(rng, TOOLS), "without": tokens(rng, TOOLS)}, []
    for turn in range(TURNS + 1):
        found: dict[str, Any] = {"turn": turn}
        for name, prompt in prompts.items():
            found[name], answer = client.ask(prompt, name == "pinned")
            prompts[name] = [*prompt, *answer, *tokens(rng, RESULT)]
        before = tokens(rng, len(prompts["without"]) - 2 * (ANSWER + RESULT)) if turn else []
        if turn:
            _, answer = client.ask(before)
            found["undisturbed"], _ = client.ask([*before, *answer, *tokens(rng, RESULT)])
            rounds.append(found)
        for length in FLOOD:
            client.ask(tokens(rng, length))
    return rounds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--model", default="", help="a folder or hub id (default: the bundled model)")
    options.add_argument("--json", type=Path, help="file for the record")
    chosen = options.parse_args()
    before = machine()
    more = (
        "--num-gpu-blocks-override", str(PAGES), "--max-model-len", str(LENGTH), "--hf-overrides",
        json.dumps({"max_position_embeddings": LENGTH}), "--pinned-kv-fraction", "0.6",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        served = (chosen.model, *more) if chosen.model else more
        with Server("off", folder, 1, options=served) as server:
            rounds = turns(Client(server), np.random.default_rng(1))

    def over(name: str, figure: str) -> float:
        return round(statistics.median(each[name][figure] / each["undisturbed"][figure] for each in rounds), 3)

    figures = {f"{name}_over_undisturbed_{figure}": over(name, figure) for name in ("pinned", "without") for figure in ("seconds", "cpu")}
    record = {
        "command": "python -m perf.retention", "vnext": __version__, "model": Path(chosen.model).name or "demo", **figures,
        "machine": msgspec.to_builtins(before), "load_after": machine().load, "rounds": rounds,
    }  # fmt: skip
    print(json.dumps(figures))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
