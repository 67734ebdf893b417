"""A recorded arrival process: what clients asked of a real server, and when. `python -m perf.arrivals --seconds 90 --json RECORD`

Clients talk to `vnext serve` with the bundled model: each holds conversations of several turns that begin with one of a few system
prompts, waits for an answer before it thinks about the next turn, and notes when it asked, how long the prompt was and how long the
answer. The record holds these numbers and no texts, since a conversation's texts follow from its number. perf/scale.py plays it to
many replicas.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from perf.record import parser_of, record_of, write_record
from perf.recording import Server
from vnext.commands.bench.load.answers import Chunk
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.machine import machine

CLIENTS, SYSTEMS, SYSTEM_TOKENS = 24, 4, 160
TURN_TOKENS, ANSWER_TOKENS, TURNS, THINK_S = (10, 80), (20, 120), (2, 8), (1.0, 6.0)
CONTEXT, VOCABULARY = 1_000, 3_000
TIMEOUT_S = 60


class Request(msgspec.Struct, frozen=True, array_like=True):
    """When it was asked, from the record's beginning; whose turn it is; the system prompt that this conversation begins with; the
    tokens of prompt and answer."""

    at_ms: int
    conversation: int
    system: int
    prompt_tokens: int
    answer_tokens: int


class Arrivals(msgspec.Struct, frozen=True):
    """All requests of `seconds`, in order. Every system prompt has `system_tokens` tokens."""

    seconds: float
    system_tokens: int
    requests: list[Request]


def text_of(conversation: int, system: int, system_tokens: int, length: int, copy: int = 0) -> np.ndarray:
    """The first tokens of a conversation (int32[length]), which copies of the record begin alike and go on each in its own way."""
    own = np.random.default_rng((1, copy, conversation)).integers(1, VOCABULARY, max(length, CONTEXT), dtype=np.int32)
    own[:system_tokens] = np.random.default_rng((2, system)).integers(1, VOCABULARY, system_tokens, dtype=np.int32)
    return own[:length]


def talk(address: str, client: int, began_s: float, until_s: float, found: list[Request]) -> None:
    """One client: a conversation after the other until the time is over."""
    rng, server = random.Random(client), BlockingClient(address, timeout_s=TIMEOUT_S)
    for conversation in range(client, 10**6, CLIENTS):
        system, length = rng.randrange(SYSTEMS), SYSTEM_TOKENS
        for _ in range(rng.randint(*TURNS)):
            time.sleep(rng.uniform(*THINK_S))
            length, answer = length + rng.randint(*TURN_TOKENS), rng.randint(*ANSWER_TOKENS)
            if length + answer > CONTEXT:
                break
            if time.monotonic() > until_s:
                return
            at_ms = int(1e3 * (time.monotonic() - began_s))
            prompt = text_of(conversation, system, SYSTEM_TOKENS, length).tolist()
            body = {"prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0}
            usage = server.ask("/v1/completions", body, Chunk).usage
            found.append(Request(at_ms, conversation, system, usage.prompt_tokens, usage.completion_tokens))
            length += answer


def recorded(seconds: float) -> Arrivals:
    """What the clients ask in this time."""
    found: list[Request] = []
    with tempfile.TemporaryDirectory() as folder, Server("off", folder, 1) as server:
        began_s = time.monotonic()
        given = [(server.address, client, began_s, began_s + seconds, found) for client in range(CLIENTS)]
        clients = [threading.Thread(target=talk, args=each) for each in given]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
    return Arrivals(seconds, SYSTEM_TOKENS, sorted(found, key=lambda each: each.at_ms))


def load(path: Path) -> Arrivals:
    """The arrivals of a record."""
    return msgspec.json.decode(path.read_bytes(), type=Arrivals)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    before = machine()
    arrivals = recorded(options.seconds)
    print(f"{len(arrivals.requests)} requests in {options.seconds:g} s")
    command = f"python -m perf.arrivals --seconds {options.seconds:g}"
    write_record(options.json, record_of(command, before, msgspec.to_builtins(arrivals)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
