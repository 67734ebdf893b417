"""An agent's talk of ten turns with a model that has recurrent layers: `python -m perf.agent_talk [--model FOLDER] --json RECORD`.

Each turn's prompt is the last one, its answer, and the result of a tool. A turn computes what is new and, of what was said before, what
no snapshot covers: that part is the figure, beside the seconds to the first token, the state pages that the engine has, and how many of
them are snapshots. Between two turns others pass by with prompts of their own, as many as `--others` says. Without a folder the model
has the shape of Qwen3.5-0.8B and random weights. `--beside-llamacpp`: the same talk also with llama.cpp on the same file
(`perf/peers/setup.sh llamacpp`).
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perf.peers.sessions import Peer, Session, checkpoint
from perf.peers.shapes import MIXED
from perf.peers.workloads import Job
from perf.record import machine, parser_of, record_of, write_record
from perf.recording import Server
from scripts.random_model import filled_tokenizer

TURNS = 10
TOOLS, RESULT, ANSWER = 3000, 400, 100
"""Tokens of the instructions and tools, of a tool's result, and of an answer."""
OTHER = 700
SHAPE = "qwen3.5-0.8b"
BOUND = 1024
"""Tokens of what was said before that a turn may compute again."""
WORDS = 3000
GAUGES = ("vnext_state_pages", "vnext_state_pages_held", "vnext_state_snapshots", "vnext_prefix_cache_lost_tokens_total")
PEER = Peer(name="llamacpp-talk", runner="talk_llamacpp.py", venv="llamacpp")


class Said(NamedTuple):
    """An answer, the seconds to its first token, and how many tokens were hits, None where the engine does not say."""

    answer: list[int]
    first_token_s: float
    hits: int | None


Ask = Callable[[list[int]], Said]


def write_shape(folder: Path) -> Path:
    """What a server needs of a model whose weights it draws."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXED[SHAPE]))
    (folder / "tokenizer.json").write_text(json.dumps(filled_tokenizer(WORDS + 200)))
    return folder


def ask_server(server: Server, prompt: list[int]) -> Said:
    body = {
        "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began_s, first_s, hits, answer = time.perf_counter(), 0.0, 0, list[int]()
    for chunk in server.client.stream("/v1/completions", body):
        first_s = first_s or chunk.at_s - began_s
        answer += chunk.token_ids
        if chunk.usage:
            hits = chunk.usage.prompt_tokens_details.cached_tokens
    assert len(answer) == ANSWER, answer
    return Said(answer, round(first_s, 3), hits)


def ask_peer(session: Session, prompt: list[int]) -> Said:
    _, answers = session.answer(Job(prompts=[prompt], lengths=[ANSWER]))
    return Said(answers[0], round(session.about["first_token_s"], 3), None)


def gauges(server: Server) -> dict[str, int]:
    """The state pages, by their names in /metrics."""
    text = server.client.read("/metrics").decode()
    found = {name: re.search(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE) for name in GAUGES}
    return {name: int(float(match[1])) for name, match in found.items() if match}


def talk(ask: Ask, others: int, gauged: Callable[[], dict[str, int]]) -> list[dict[str, Any]]:
    """What each turn took."""
    rng = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return rng.integers(10, WORDS, count).tolist()

    history, turns, new = list[int](), [], TOOLS
    for turn in range(TURNS):
        history += tokens(new)
        said = ask(history)
        known = len(history) - new
        again = {} if said.hits is None else {"hits": said.hits, "again": max(known - said.hits, 0)}
        turns.append({"turn": turn, "prompt": len(history), "new": new, "first_token_s": said.first_token_s, **again, **gauged()})
        history, new = [*history, *said.answer], RESULT
        for _ in range(others):
            ask(tokens(OTHER))
    return turns


def with_vnext(served: tuple[str, ...], folder: str, options: Namespace) -> list[dict[str, Any]]:
    with Server("off", folder, options.threads, options=(*served, "--max-model-len", "8192")) as server:
        return talk(partial(ask_server, server), options.others, partial(gauges, server))


def with_llamacpp(model: Path, options: Namespace) -> list[dict[str, Any]]:
    with Session(PEER, model, options.threads, Job(prompts=[[WORDS]], lengths=[1])) as session:
        return talk(partial(ask_peer, session), options.others, dict)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="a folder or file (default: Qwen3.5-0.8B's shape with random weights)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--others", type=int, default=0, help="prompts of others between two turns")
    parser.add_argument("--beside-llamacpp", action="store_true", help="of the same shape in one GGUF file of 4 bits, both")
    options = parser.parse_args()
    before, theirs = machine(), list[dict[str, Any]]()
    if options.beside_llamacpp:
        options.model = str(checkpoint(f"{SHAPE}-q4", 0))
        theirs = with_llamacpp(Path(options.model), options)
    with tempfile.TemporaryDirectory() as folder:
        served = (options.model,) if options.model else (str(write_shape(Path(folder) / "qwen")), "--load-format", "dummy")
        turns = with_vnext(served, folder, options)
    worst = max(each["again"] for each in turns)
    summary = {"again_max": worst, "bound": BOUND, "holds": worst <= BOUND, "snapshots_max": max(each["vnext_state_snapshots"] for each in turns)}
    for name, some in (("first_token_s", turns), ("llamacpp_first_token_s", theirs)):
        summary |= {name: statistics.median(each["first_token_s"] for each in some[1:])} if some else {}
    print(json.dumps(summary))
    if options.json:
        beside = " --beside-llamacpp" if theirs else ""
        command = f"python -m perf.agent_talk --threads {options.threads} --others {options.others}{beside}"
        write_record(options.json, record_of(command, before, {**summary, "others": options.others, "turns": turns, "llamacpp": theirs}))


if __name__ == "__main__":
    main()
