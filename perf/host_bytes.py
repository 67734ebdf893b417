"""Bytes that a step sends between two hosts: `python -m perf.host_bytes [--json FILE]`. Counted, so the load does not matter.

Owns the count of what the wire carries at a number of requests: the frames to a host's agent of a step that admits all of them, of a
steady decode step, and of one with an arrival, and the frame that comes back from a rank. The ranks' own exchange over gloo is computed
from the model's shape: each rank sends each other its part of every sum.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import numpy as np

from vnext.commands.machine import machine
from vnext.runtime.hosts.frames import FromRank, RingMessage, encode
from vnext.runtime.hosts.wire import MAC_BYTES
from vnext.runtime.protocol.messages import StepResult, encoder
from vnext.runtime.transport.ring.broadcast import encode_events
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepCommitted, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

REQUESTS = (32, 256, 1024)
PROMPT = 128
HEAD_BYTES = 4 + MAC_BYTES
SEED_TABLE = {"full broadcast": 12_800_000, "incremental": 4_200}
"""What the seed article's engine sends at batch 256."""
HIDDEN, LAYERS, VOCABULARY, DTYPE_BYTES, SUM_BYTES = 576, 30, 49152, 2, 4
"""Of the 135 M shape in bfloat16; what products add up to is float32 until it is whole, and logits are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write a record")
    path = parser.parse_args().json
    found = {str(count): counted(count) for count in REQUESTS}
    for count, each in found.items():
        print(f"{count:>5} requests: " + ", ".join(f"{name} {size:,}" for name, size in each.items()))
    if path is not None:
        record = {
            "command": "python -m perf.host_bytes --json FILE", "bytes": found, "seed_table_at_256": SEED_TABLE,
            "shape": f"{LAYERS} layers of {HIDDEN}, {VOCABULARY} tokens, 2 ranks, bfloat16", "machine": msgspec.to_builtins(machine()),
        }  # fmt: skip
        path.write_text(json.dumps(record, indent=1) + "\n")


def counted(count: int) -> dict[str, int]:
    """Bytes by name at `count` requests."""
    state = _started(count + 1)
    arrivals = [_arrival(at) for at in range(count)]
    for event in arrivals:
        state = reduce(state, event)
    plan = schedule(state)
    admitted = _frame([*arrivals, plan])
    state = _committed(reduce(state, plan))
    steady_events, state = _turn(state)
    late = _arrival(count)
    state = reduce(state, late)
    arrival_events, state = _turn(state)
    result = StepResult(rank=1, step=100_000, digest=0, token_digest=0, seconds=0.01)
    return {
        "a step that admits all": admitted, "of which prompts": 4 * PROMPT * count, "a steady step": _frame(steady_events),
        "a step that admits one": _frame([late, *arrival_events]),
        "a rank's result": len(encode(FromRank(generation=0, data=encoder.encode(result)))) + HEAD_BYTES,
        "sums of a decode step, each way": count * HIDDEN * (2 * LAYERS * SUM_BYTES + DTYPE_BYTES),
        "logits of a decode step, each way": count * VOCABULARY // 2 * SUM_BYTES,
    }  # fmt: skip


def _started(rows: int) -> State:
    config = SchedulerConfig(
        block_size=16, page_count=rows * 16, max_num_batched_tokens=rows * PROMPT, max_num_seqs=rows, max_model_len=256,
        pipeline_depth=1, vocab_size=VOCABULARY,
    )  # fmt: skip
    return start(EngineStarted(config=config, model="", model_digest="", world_size=2, environment={}, started_ns=0))


def _arrival(at: int) -> RequestArrived:
    tokens = np.random.default_rng(at).integers(5, 49000, PROMPT).tolist()
    sampling = Sampling(seed=at, max_tokens=100, ignore_eos=True)
    return RequestArrived(id=RequestId(at), name=f"r{at}", prompt=pack_tokens(tokens), sampling=sampling, priority=0, arrival_ns=0)


def _committed(state: State) -> State:
    return reduce(state, _commit(state))


def _commit(state: State) -> StepCommitted:
    sampled = int(np.count_nonzero(state.in_flight[0].samples))
    return StepCommitted(step=state.committed, tokens=pack_tokens([7] * sampled))


def _turn(state: State) -> tuple[list[AnyEvent], State]:
    """A step and its commit, as they travel."""
    plan = schedule(state)
    planned = reduce(state, plan)
    commit = _commit(planned)
    return [plan, commit], reduce(planned, commit)


def _frame(events: list[AnyEvent]) -> int:
    return len(encode(RingMessage(generation=0, data=encode_events(events)))) + HEAD_BYTES


if __name__ == "__main__":
    main()
