"""A rank whose steps are single calls of the CPU kernels never imports torch, from loading to the last token."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parents[2] / "models"), str(Path(__file__).resolve().parents[2] / "kernels")]
from cpu_levels import needs_native
from family_cases import VOCAB_SIZE, save_case

from vnext.runtime.processes.launch import DEMO_MODEL

FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2", "gemma3")
SCRIPT = """
import hashlib, json, sys
from pathlib import Path
from vnext.models.layers.kv_cache import kv_groups
from vnext.runtime.collectives.group import join_group, leave_group
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank import serving
from vnext.runtime.rank.steps import HostSteps
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

path, dtype, fault, rank, world_size, meeting = sys.argv[1:]
runner = ModelRunner(Path(path), dtype, "cpu", join_group(int(rank), int(world_size), Path(meeting)))
windows = kv_groups(runner.config).windows
config = SchedulerConfig(
    block_size=4, page_count=40 * len(windows), max_num_batched_tokens=24, max_num_seqs=4, max_model_len=64, vocab_size=runner.config.vocab_size,
    pipeline_depth=1, windows=windows if any(windows) else (),
)
state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
steps = HostSteps(runner)
steps.start(state)
asked = Sampling(seed=3, max_tokens=9, temperature=0.7, ignore_eos=True, logprobs=0 if fault else -1)
arrived = RequestArrived(id=0, name="", prompt=pack_tokens([5, 6, 7, 8, 9]), sampling=asked, priority=0, arrival_ns=0)
state, tokens = reduce(state, arrived), []
while state.requests:
    state = reduce(state, schedule(state))
    steps.launch(state)
    computed = steps.wait().tokens
    tokens += unpack_tokens(computed).tolist()
    state = reduce(state, StepCommitted(step=state.committed, tokens=computed))
leave_group()
cache = hashlib.sha256(b"".join(each.tobytes() for each in runner.cache_memory())).hexdigest()
print(json.dumps({"tokens": tokens, "cache": cache, "torch": "torch" in sys.modules}))
"""


def run(path: Path, dtype: str, fault: str = "", world_size: int = 1) -> list[dict[str, object]]:
    """What each rank says."""
    meeting = tempfile.mkdtemp()
    words = [sys.executable, "-c", SCRIPT, str(path), dtype, fault]
    ranks = [
        subprocess.Popen([*words, str(rank), str(world_size), meeting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    shutil.rmtree(meeting)
    assert not any(rank.returncode for rank in ranks), ends
    return [json.loads(said) for said, _ in ends]


@needs_native
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_need_no_torch(name: str, tmp_path: Path) -> None:
    """The same tokens come out where a request asks for more, which torch computes."""
    save_case(tmp_path, name)
    for dtype in ("float32", "bfloat16"):
        (plain,) = run(tmp_path, dtype)
        assert len(plain["tokens"]) == 9 and max(plain["tokens"]) < VOCAB_SIZE
        assert not plain["torch"], "torch was imported"
    assert run(tmp_path, "bfloat16", "log-probabilities") == [plain | {"torch": True}]


@needs_native
@pytest.mark.parametrize("name", ["demo", "gemma3"])
def test_several_ranks_need_no_torch(name: str, tmp_path: Path) -> None:
    """They meet, load, compute, sum and sample; in torch they leave the same bits in their caches."""
    path = DEMO_MODEL if name == "demo" else tmp_path
    if path is tmp_path:
        save_case(tmp_path, name)
    ranks = run(path, "bfloat16", "", 2)
    assert [rank["torch"] for rank in ranks] == [False, False], "torch was imported"
    assert ranks[0]["tokens"] == ranks[1]["tokens"] and len(ranks[0]["tokens"]) == 9
    assert ranks[0]["cache"] != ranks[1]["cache"]
    assert run(path, "bfloat16", "log-probabilities", 2) == [rank | {"torch": True} for rank in ranks]
