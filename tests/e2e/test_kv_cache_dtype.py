"""--kv-cache-dtype int8: the same tokens however they are scheduled, about twice the blocks, and logs that run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vnext import LLM, SamplingParams
from vnext.replay.cli.main import main
from vnext.runtime.protocol.settings import SettingsError

PROMPTS = ["The first page of the book", "One of the rivers " * 20, "A name", "The cache of the engine " * 9, "Nine of ten"] * 4
PARAMS = [
    SamplingParams(max_tokens=40 + place, temperature=place % 2, seed=place, ignore_eos=True, logprobs=1 if place % 3 == 0 else None)
    for place in range(len(PROMPTS))
]
WAYS = {
    "alone": {"max_num_seqs": 1},
    "in chunks": {"max_num_batched_tokens": 24},
    "preempted": {"num_blocks_override": 24, "max_model_len": 256},
    "without hits": {"enable_prefix_caching": False},
    "in step": {"async_scheduling": False},
    "two ranks": {"tensor_parallel_size": 2},
    "drafted": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "row_cost": 0}},
}


def answers(**settings: object) -> list[tuple[object, ...]]:
    with LLM(threads=1, kv_cache_dtype="int8", **settings) as llm:
        found = [each.outputs[0] for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(each.token_ids, each.finish_reason, each.logprobs) for each in found]


@pytest.fixture(scope="module")
def together() -> list[tuple[object, ...]]:
    return answers()


@pytest.mark.parametrize("way", WAYS)
def test_a_request_s_tokens_do_not_depend_on_the_way(way: str, together: list[tuple[object, ...]]) -> None:
    found = answers(**WAYS[way])
    if way == "two ranks":  # sums over ranks have another order: compare what two ranks say in another batch
        together = answers(tensor_parallel_size=2, max_num_seqs=3)
    assert found == together


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_what_vllm_asks_a_gpu_for_is_int8_on_a_cpu_and_a_line_says_so(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(threads=1, kv_cache_dtype=name, kv_cache_memory=2**22, log="off") as llm:
        assert llm.ready.environment["kv_cache_dtype"] == "int8"
    assert capfd.readouterr().err.count("on this CPU they are kept in int8, which takes as much room") == 1


def test_the_same_memory_holds_nearly_twice_the_blocks() -> None:
    counts = []
    for dtype in ("auto", "int8"):
        with LLM(threads=1, kv_cache_dtype=dtype, kv_cache_memory=2**22) as llm:
            counts.append(llm.ready.config.page_count)
    assert 1.8 < counts[1] / counts[0] < 2.1 or 3.6 < counts[1] / counts[0] < 4.1


def test_a_log_runs_again_with_its_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(log="full", log_dir=str(tmp_path))
    (log,) = tmp_path.iterdir()
    assert main(["verify", str(log), "--laws"]) == 0 and main(["exec", str(log), "--threads", "1"]) == 0
    assert "a cache of int8" in " ".join(capsys.readouterr().out.split())
    assert main(["exec", str(log), "--threads", "1", "--kv-cache-dtype", "auto", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_cache_dtype": "fp4"}, "must be one of 'auto', 'int8', 'fp8'"),
        ({"kv_cache_dtype": "fp8_e4m3", "attention": "flashinfer"}, "does not read keys and values in 8 bits, and kv_cache_dtype is fp8"),
        ({"kv_cache_dtype": "int8", "attention": "flashinfer"}, "does not read keys and values in 8 bits, and kv_cache_dtype is int8"),
    ],
)
def test_what_there_is_not_gets_a_sentence(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        LLM(**settings)
