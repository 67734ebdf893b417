"""One seed, one answer in bfloat16 too, and with int8 weights: alone, among many, chunked, preempted, with a cold and a warm cache.

The CPU's own kernels accumulate in one order whatever the number of rows; where they were not built torch's products in
bfloat16 depend on their neighbours, and there is nothing to hold.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine_here import engines_here

sys.path.append(str(Path(__file__).resolve().parents[1] / "models" / "gguf"))
from gguf_writing import convert, vocabulary_of

from vnext.api.llm import LLM
from vnext.commands.ready_lines import _scheme
from vnext.kernels.cpu import native
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.determinism import cpu_flags, has_strict_path
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.sampling_params import SamplingParams

PROMPT_COUNT = 48
TOKENS = 40
NEIGHBOURS = 60

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the CPU's kernels are not built here: no C++ compiler was found")


def prompts() -> list[list[int]]:
    """Of 3 to 60 tokens, every third greedy; some share a beginning of 32 tokens."""
    shared = [7 + 11 * place % 400 for place in range(32)]
    own = [[5 + (13 * index + 7 * place) % 500 for place in range(3 + index * 5 % 58)] for index in range(PROMPT_COUNT)]
    return [shared + each if index % 4 == 0 else each for index, each in enumerate(own)]


def params(index: int) -> SamplingParams:
    temperature = 0.0 if index % 3 == 0 else 0.9
    return SamplingParams(temperature=temperature, top_p=0.95, seed=index, max_tokens=TOKENS, ignore_eos=True)


def answers(together: bool, **settings: object) -> list[list[int]]:
    """The tokens of every prompt in an engine of these settings, all at once among strangers or one after the other."""
    settings = {"dtype": "bfloat16", "log": "off", "executor": "inproc", **settings}
    needs_process = settings["executor"] == "mp" or settings["dtype"] == "float16"  # float16: an environment before torch
    with nullcontext() if needs_process else engines_here(), LLM(**settings) as llm:
        asked = list(zip(prompts(), map(params, range(PROMPT_COUNT))))
        if not together:
            return [llm.generate([each], [how], use_tqdm=False)[0].outputs[0].token_ids for each, how in asked]
        strangers = [([9 + index, 8, 7 + index], params(1000 + index)) for index in range(NEIGHBOURS)]
        everybody = [*strangers[:30], *asked, *strangers[30:]]
        found = llm.generate([each for each, _ in everybody], [how for _, how in everybody], use_tqdm=False)
        return [each.outputs[0].token_ids for each in found[30 : 30 + PROMPT_COUNT]]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return answers(together=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False, "threads": 1},
        {"max_num_batched_tokens": 24},
        {"num_blocks_override": 60, "max_num_seqs": 40},
        {"async_scheduling": False, "block_size": 32},
    ],
    ids=["together", "cold, one thread", "chunked", "preempted", "other blocks, in step"],
)
def test_an_answer_does_not_depend_on_its_neighbours(alone: list[list[int]], settings: dict[str, object]) -> None:
    assert answers(together=True, **settings) == alone


@pytest.fixture(scope="module")
def alone_int8() -> list[list[int]]:
    return answers(together=False, quantization="int8")


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24, "threads": 1}, {"num_blocks_override": 60, "max_num_seqs": 40}],
    ids=["together", "chunked, one thread", "preempted"],
)
def test_the_same_holds_for_int8_weights(
    alone: list[list[int]], alone_int8: list[list[int]], settings: dict[str, object]
) -> None:
    assert answers(together=True, quantization="int8", **settings) == alone_int8
    assert alone_int8 != alone, "the weights were not rounded"


def test_two_ranks_of_int8_weights(tmp_path: Path) -> None:
    """Both ranks hold one state and one stream of tokens; the log says what the weights were."""
    settings = {"quantization": "int8", "tensor_parallel_size": 2, "executor": "mp", "digest_interval": 1}
    logged = answers(together=True, log="shape", log_dir=str(tmp_path), **settings)
    assert answers(together=True, **settings, threads=1, max_num_batched_tokens=24) == logged
    (folder,) = filter(Path.is_dir, tmp_path.iterdir())
    found = open_log(folder).header.started.environment
    assert (found["quantization"], found["dtype"]) == ("int8", "bfloat16")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model as a GGUF file of blocks."""
    spec = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    file = tmp_path_factory.mktemp("blocks") / "demo.gguf"
    return str(convert(DEMO_MODEL, file, vocabulary_of(spec, "gpt-2"), type_="Q4_1"))


@pytest.mark.parametrize("activations", ["auto", "bf16"])
def test_the_same_holds_for_blocks_of_a_file(activations: str, blocks: str, tmp_path: Path) -> None:
    """Alone and with the prefix cold; among many, warm, in chunks of 7 and preempted."""
    expected = answers(together=False, model=blocks, activations=activations, enable_prefix_caching=False)
    small = {"activations": activations, "max_num_batched_tokens": 7, "max_num_seqs": 7, "num_blocks_override": 20}
    assert answers(together=True, model=blocks, log="shape", log_dir=str(tmp_path), **small) == expected
    (folder,) = filter(Path.is_dir, tmp_path.iterdir())
    log = open_log(folder)
    started = log.header.started.environment
    assert (started["quantization"], started["codes"]) == ("codes", "Q4_1 blocks")
    assert started.get("activations", "auto") == activations
    by = ", activations in bf16" if activations == "bf16" else ""
    assert _scheme(started) == f" in Q4_1 blocks{by}" and _scheme({"quantization": "none"}) == ""


def test_sixteen_bits_in_plain_torch_when_it_is_asked_for(tmp_path: Path) -> None:
    """float16 is not the compiled kernels' business, so torch's own products serve."""
    if not (torch.backends.mkl.is_available() and has_strict_path(cpu_flags())):
        pytest.skip("this torch has no MKL with one code path for any number of rows")
    settings = {"dtype": "float16", "deterministic": True}
    expected = answers(together=False, log="shape", log_dir=str(tmp_path), **settings)
    assert answers(together=True, max_num_batched_tokens=24, **settings) == expected
    (folder,) = filter(Path.is_dir, tmp_path.iterdir())
    assert open_log(folder).header.started.environment["batch_invariant"].startswith("yes: plain torch, products of float16")
