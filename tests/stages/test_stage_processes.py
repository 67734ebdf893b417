"""Pipelines of real processes: the tokens are those of one process, bit for bit, however the requests are computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_here import engines_here
from msgspec.structs import replace

from vnext import LLM, AsyncLLM, SamplingParams
from vnext.kernels.cpu import native
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the CPU's kernels are not built here: no C++ compiler was found")
Answer = tuple[list[int], object]


def wishes() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 3 to 90 tokens, some with a common beginning; greedy and seeded, penalties, scores, constraints."""
    shared = [7 + 11 * place % 400 for place in range(32)]
    prompts = [[5 + (13 * at + 7 * place) % 500 for place in range(3 + at * 7 % 88)] for at in range(24)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {}, {"logprobs": 2}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{20,30}"), "ignore_eos": False},
    ]  # fmt: skip
    params = [
        SamplingParams(**{"temperature": 0.9, "top_p": 0.95, "seed": at, "max_tokens": 24, "ignore_eos": True, **kinds[at % 6]})
        for at in range(24)
    ]
    return [shared + each if at % 4 == 0 else each for at, each in enumerate(prompts)], params


def answers(llm: LLM) -> list[Answer]:
    outputs = llm.generate(*wishes(), use_tqdm=False)
    return [(each.outputs[0].token_ids, (each.outputs[0].logprobs, each.prompt_logprobs)) for each in outputs]


def alone(**settings: Any) -> list[Answer]:
    with engines_here(), LLM(executor="inproc", log="off", **settings) as llm:
        return answers(llm)


def staged(log_dir: Path, **settings: Any) -> list[Answer]:
    """Of an engine whose ranks compare their states and inputs at every step, and whose log is verified."""
    with LLM(log_dir=str(log_dir), digest_interval=1, threads=1, **{"pipeline_parallel_size": 2, **settings}) as llm:
        found = answers(llm)
    (folder,) = filter(Path.is_dir, log_dir.iterdir())
    assert replay(["verify", "--laws", str(folder)]) == 0
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "num_blocks_override": 30, "max_num_batched_tokens": 24, "max_model_len": 256},
        {"dtype": "bfloat16", "pipeline_parallel_size": 3, "max_num_seqs": 8, "quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "float32", "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "row_cost": 0}'},
    ],
    ids=["float32", "preempted, in chunks", "three stages, int8", "with drafts"],
)
def test_stages_give_the_tokens_of_one_process(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = {name: settings[name] for name in ("dtype", "quantization", "kv_cache_dtype") if name in settings}
    assert staged(tmp_path, **settings) == alone(**plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_of_two_ranks_give_the_tokens_of_two_ranks(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "one").mkdir()
    one = staged(tmp_path / "one", dtype=dtype, tensor_parallel_size=2, pipeline_parallel_size=1)
    (tmp_path / "two").mkdir()
    assert staged(tmp_path / "two", dtype=dtype, tensor_parallel_size=2) == one


def test_no_step_waits_where_requests_decode_in_microbatches() -> None:
    """Counted on the first stage. In one microbatch every step goes on from the tokens of the step before."""
    waited = {}
    for microbatches, steps in ((2, 65), (1, 33)):
        with LLM(log="off", pipeline_parallel_size=2, threads=1, dtype="float32", pipeline_microbatches=microbatches) as llm:
            prompts = [[5 + at, 6, 7] for at in range(8)]
            llm.generate(prompts, SamplingParams(max_tokens=33, ignore_eos=True), use_tqdm=False)
            first = llm.collective_rpc("stage_counts")[1]
            assert first["steps"] >= steps
            waited[microbatches] = first["waited"]
    assert waited[2] <= 2 < waited[1]


def test_prompts_overlap_and_tokens_follow_each_other(tmp_path: Path) -> None:
    """Counted on the first stage: chunks of one prompt wait for no token, while further tokens wait for the one before, unless its
    commit has come. What a pipeline cannot do is refused when it is asked for."""
    with LLM(log="off", pipeline_parallel_size=2, threads=1, max_num_batched_tokens=16, dtype="float32") as llm:
        llm.generate([list(range(5, 5 + 160))], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        last, first = llm.collective_rpc("stage_counts")
        assert (last["waited"], first) == (0, {"steps": 10, "waited": 0})
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=21, ignore_eos=True), use_tqdm=False)
        first = llm.collective_rpc("stage_counts")[1]
        assert first["steps"] == 31 and 0 < first["waited"] <= 20
        with pytest.raises(Exception, match="the weights of a pipeline's stages cannot be updated: start another engine"):
            llm.update_weights(str(tmp_path))


def test_a_grammar_that_fails_within_an_answer_ends_that_answer_alone() -> None:
    """Too many items at a position that the first tokens do not reach: rank 0 of the last stage says so, with tokens in flight."""
    names = [{"type": "object", "properties": {f"{word}{at}": {} for at in range(200)}} for word in "pq"]
    required = {"a": {"const": "x" * 12}, "b": {"anyOf": names}}
    schema = {"type": "object", "properties": required, "required": ["a", "b"], "additionalProperties": False}
    plain = [SamplingParams(temperature=0.9, seed=at, max_tokens=60, ignore_eos=True) for at in range(6)]
    bad = SamplingParams(temperature=0.9, max_tokens=90, structured_outputs=StructuredOutputsParams(json=schema))
    params = [each for pair in zip(plain, (replace(bad, seed=at) for at in range(6))) for each in pair]

    async def answer(llm: AsyncLLM, at: int) -> tuple[list[int], str]:
        taken: list[int] = []
        try:
            async for output in llm.generate([5 + at, 6, 7], params[at]):
                taken = output.outputs[0].token_ids
        except InvalidRequest as error:
            return taken, error.message
        return taken, ""

    async def story(stages: int) -> list[tuple[list[int], str]]:
        settings = {"dtype": "float32", "threads": 1, "log": "off", "digest_interval": 1}
        async with AsyncLLM(pipeline_parallel_size=stages, **settings) as llm:
            return await asyncio.gather(*(answer(llm, at) for at in range(len(params))))

    found, right = asyncio.run(story(2)), asyncio.run(story(1))
    assert found[::2] == right[::2] and all(len(tokens) == 60 for tokens, _ in found[::2])
    why = "The answer cannot keep to its constraint: a position of its grammar has too many items, or takes too much work, simplify it."
    failed = [tokens for tokens, sentence in found[1::2] if sentence == why]
    assert len(failed) >= 3 and all(len(tokens) > 10 for tokens in failed)
    assert [sentence for _, sentence in found] == [sentence for _, sentence in right]
