"""A rank whose steps are single calls of the CPU kernels never imports torch, from loading to the last token of any kind of request."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

sys.path += [str(Path(__file__).resolve().parents[2] / "models"), str(Path(__file__).resolve().parents[2] / "kernels")]
from cpu_levels import needs_native
from family_cases import VOCAB_SIZE, save_case
from hybrids import save_hybrid

from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.state.params import POOLINGS, Constraint, Sampling

FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2", "gemma3")
HYBRIDS = ("minimax", "qwen3_5", "kimi_linear", "nemotron_h", "jamba")
PIECES = 4
KINDS = {
    "plain": (1, {}),
    "a prompt in pieces": (PIECES, {}),
    "log-probabilities": (1, {"logprobs": 3}),
    "penalties": (1, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
    "a bias": (1, {"logit_bias": ((7, 4.0), (9, -3.0))}),
    "a minimum length": (1, {"min_tokens": 6, "stop_token_ids": tuple(range(20)), "ignore_eos": False}),
    "lists of tokens": (1, {"constraint": Constraint(allowed=tuple(range(5, 40)), banned=((6,), (7, 8)))}),
    "a thinking budget": (1, {"constraint": Constraint(reasoning_end=(7, 8), reasoning_max=3)}),
    "scores of a prompt": (PIECES, {"prompt_logprobs": 2}),
    "an embedding": (PIECES, {"pooling": POOLINGS.index("mean")}),
    "everything": (
        PIECES,
        {"logprobs": 0, "prompt_logprobs": 1, "pooling": 1, "repetition_penalty": 1.2, "logit_bias": ((7, 4.0),)}
        | {"constraint": Constraint(allowed=tuple(range(5, 90)))},
    ),
}  # fmt: skip
"""How often a prompt of five tokens is repeated, in steps of at most eight tokens, and what its request asks for."""
GRAMMAR = {"a grammar": (1, {"constraint": Constraint(grammar=LLMatcher.grammar_from_regex("[a-z ]{30,40}")), "ignore_eos": False})}
Kinds = dict[str, tuple[int, dict[str, Any]]]
SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import msgspec
from vnext.models.layers.kv_cache import kv_groups
from vnext.runtime.transport.collectives.group import join_group, leave_group
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank import serving
from vnext.runtime.rank.steps import HostSteps
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

path, dtype, asked, by_torch, rank, world_size, meeting = sys.argv[1:]
runner = ModelRunner(Path(path), ModelSettings(dtype=dtype), "cpu", join_group(int(rank), int(world_size), Path(meeting)))
windows = kv_groups(runner.config).windows
config = SchedulerConfig(
    block_size=4, page_count=40 * len(windows), max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, vocab_size=runner.config.vocab_size,
    state_pages=40 * (runner.config.recurrent is not None), snapshot_interval=8,
    pipeline_depth=1, windows=windows if any(windows) else (), eos_token_ids=(0,), speculation=Speculation(method="suffix", num_speculative_tokens=3),
)
state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
steps, found = HostSteps(runner), {}
steps.start(state)
if by_torch:
    runner.cache.run = lambda inputs: None
for id_, (kind, times, sampling) in enumerate(msgspec.msgpack.decode(bytes.fromhex(asked), type=list[tuple[str, int, Sampling]])):
    prompt = pack_tokens([5, 6, 7, 8, 9] * times)
    state = reduce(state, RequestArrived(id=id_, name="", prompt=prompt, sampling=sampling, priority=0, arrival_ns=0))
    results = []
    while state.requests:
        state = reduce(state, schedule(state))
        steps.launch(state)
        done = steps.wait()
        results.append((unpack_tokens(done.tokens).tolist(), *map(repr, (done.logprobs, done.prompts, done.failed))))
        state = reduce(state, StepCommitted(step=state.committed, tokens=done.tokens, counts=done.counts, drafted=done.drafted))
    found[kind] = {"results": results, "torch": "torch" in sys.modules}
leave_group()
cache = hashlib.sha256(b"".join(each.tobytes() for each in runner.cache_memory())).hexdigest()
print(json.dumps({"kinds": found, "cache": cache}))
"""


def run(path: Path, dtype: str, by_torch: bool = False, world_size: int = 1, kinds: Kinds = KINDS) -> list[dict[str, Any]]:
    """What each rank says: of every kind of request its tokens and reports, and whether torch was imported by then."""
    meeting = tempfile.mkdtemp()
    common = {"seed": 3, "max_tokens": 9, "temperature": 0.7, "ignore_eos": True}
    asked = [(kind, times, Sampling(**(common | given))) for kind, (times, given) in kinds.items()]
    words = [sys.executable, "-c", SCRIPT, str(path), dtype, msgspec.msgpack.encode(asked).hex(), "torch" * by_torch]
    ranks = [
        subprocess.Popen([*words, str(rank), str(world_size), meeting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    shutil.rmtree(meeting)
    assert not any(rank.returncode for rank in ranks), ends
    return [json.loads(said) for said, _ in ends]


def with_torch(said: dict[str, Any]) -> list[str]:
    """The kinds of requests after which torch was there."""
    return [kind for kind, found in said["kinds"].items() if found["torch"]]


def results(said: dict[str, Any]) -> Any:
    return said["cache"], {kind: found["results"] for kind, found in said["kinds"].items()}


@needs_native
@pytest.mark.parametrize("name", (*FAMILIES, *HYBRIDS))
def test_steps_need_no_torch(name: str, tmp_path: Path) -> None:
    """Whatever requests ask for. In torch the same tokens, log-probabilities, embeddings and caches come out."""
    (save_hybrid if name in HYBRIDS else save_case)(tmp_path, name)
    said = {dtype: run(tmp_path, dtype)[0] for dtype in ("float32", "bfloat16")}
    for each in said.values():
        assert not with_torch(each), "torch was imported"
        tokens = [token for step in each["kinds"]["plain"]["results"] for token in step[0]]
        assert len(tokens) == 9 and max(tokens) < VOCAB_SIZE
        assert len({str(found["results"]) for found in each["kinds"].values()}) == len(KINDS)
    dtype = ("float32", "bfloat16")[(*FAMILIES, *HYBRIDS).index(name) % 2]
    (torchs,) = run(tmp_path, dtype, by_torch=True)
    assert len(with_torch(torchs)) == len(KINDS) and results(torchs) == results(said[dtype])


@needs_native
@pytest.mark.parametrize("name", ["demo", "gemma3"])
def test_several_ranks_need_no_torch(name: str, tmp_path: Path) -> None:
    """They meet, load, compute, sum and sample; in torch they leave the same bits in their caches."""
    path, kinds = (DEMO_MODEL, KINDS | GRAMMAR) if name == "demo" else (tmp_path, KINDS)
    if path is tmp_path:
        save_case(tmp_path, name)
    ranks = run(path, "bfloat16", False, 2, kinds)
    assert [with_torch(rank) for rank in ranks] == [[], []], "torch was imported"
    assert ranks[0]["kinds"] == ranks[1]["kinds"] and ranks[0]["cache"] != ranks[1]["cache"]
    assert [results(rank) for rank in run(path, "bfloat16", True, 2, kinds)] == [results(rank) for rank in ranks]
