"""A rank whose steps are single calls of the CPU kernels never imports torch, from loading to the last token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parents[2] / "models"), str(Path(__file__).resolve().parents[2] / "kernels")]
from cpu_levels import needs_native
from family_cases import VOCAB_SIZE, save_case

FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", "smollm3", "gemma2", "gemma3")
SCRIPT = """
import json, sys
from pathlib import Path
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank import serving
from vnext.runtime.rank.steps import HostSteps
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

path, dtype, fault = sys.argv[1:]
runner = ModelRunner(Path(path), dtype, "cpu", alone())
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
print(json.dumps({"tokens": tokens, "torch": "torch" in sys.modules}))
"""


def run(path: Path, dtype: str, fault: str = "") -> dict[str, object]:
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(path), dtype, fault], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    answer: dict[str, object] = json.loads(found.stdout)
    return answer


@needs_native
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_need_no_torch(name: str, tmp_path: Path) -> None:
    """The same tokens come out where a request asks for more, which torch computes."""
    save_case(tmp_path, name)
    for dtype in ("float32", "bfloat16"):
        plain = run(tmp_path, dtype)
        assert len(plain["tokens"]) == 9 and max(plain["tokens"]) < VOCAB_SIZE
        assert not plain["torch"], "torch was imported"
    assert run(tmp_path, "bfloat16", "log-probabilities") == {"tokens": plain["tokens"], "torch": True}
