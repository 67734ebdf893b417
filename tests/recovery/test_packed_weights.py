"""An engine whose ranks map packed weights gives the tokens, log-probabilities and records of one that packs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vnext.api.llm import LLM
from vnext.kernels.cpu import native
from vnext.models.loading import packed_file
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import fold
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled here")
LEVELS = [level.name.lower() for level in native.levels()] if native.is_built() else []
PROMPTS = ["The module", "What is", "Return the", "A list of numbers that", "def main"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "two ranks": {"dtype": "bfloat16", "tensor_parallel_size": 2},
    "two ranks, int8": {"dtype": "bfloat16", "quantization": "int8", "tensor_parallel_size": 2},
    "two stages": {"dtype": "bfloat16", "pipeline_parallel_size": 2},
    "two engines": {"dtype": "bfloat16", "data_parallel_size": 2, "data_parallel_policy": "round_robin"},
    **{level: {"dtype": "bfloat16", "isa": level} for level in LEVELS},
}  # fmt: skip


def answered(tmp_path: Path, folder: Path | str, **settings: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """Tokens and log-probabilities, the engine's environment, and what its log's digests cover."""
    with LLM(
        packed_weights_dir=str(folder), threads=1, log="full", log_dir=str(tmp_path / "logs"), digest_interval=1, seed=3,
        num_blocks_override=200, **settings,
    ) as llm:  # fmt: skip
        found = [(each.outputs[0].token_ids, str(each.outputs[0].logprobs)) for each in llm.generate(PROMPTS, GREEDY, False)]
        for prompt in PROMPTS:  # one after the other, so that records are alike
            found += [each.outputs[0].token_ids for each in llm.generate([prompt], DRAWN, False)]
        environment, log_dir = dict(llm.ready.environment), llm.log_dir
    if settings.get("data_parallel_size"):
        return found, environment, None
    assert replay(["verify", "--laws", log_dir]) == 0
    return found, environment, [each.state.token_digest for each in fold(open_log(Path(log_dir))) if hasattr(each, "state")][-1]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_log_probabilities_and_records_are_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tmp_path / "packed"
    plain = answered(tmp_path, "", **settings)
    first = answered(tmp_path, folder, **settings)
    kept = {path: path.stat().st_mtime_ns for path in files(folder)}
    later = answered(tmp_path, folder, **settings)
    assert plain == first == later
    assert len(kept) == settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    assert {path: path.stat().st_mtime_ns for path in files(folder)} == kept, "the later start wrote none"


def test_the_later_start_computes_with_what_the_file_holds(tmp_path: Path) -> None:
    """So the test above compares what it says: a file with other weights, under checksums of their own, gives other tokens."""
    settings, folder = {"dtype": "bfloat16", "executor": "inproc"}, tmp_path / "packed"
    plain = answered(tmp_path, folder, **settings)
    (path,) = files(folder)
    with path.open("rb") as file:
        made_for = packed_file._read_index(file.fileno())["made_for"]
    mapped = packed_file.open_packed(path, made_for)
    norm = next(buffer for name, buffer in mapped.buffers.items() if name.startswith("model.norm.weight"))
    norm[:] = norm[::-1].copy()
    packed_file.finish(packed_file.write_draft(path, made_for, mapped.buffers, lambda: False), path)
    assert answered(tmp_path, folder, **settings)[0] != plain[0]
