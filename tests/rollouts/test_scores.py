"""What `generate` reports of an answer's tokens and what `score` finds for the same answer are the same float32 numbers.

On every instruction set of this machine, and whatever shared the steps of either: batches, chunks, preemptions, hits, drafts, ranks.
"""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_here import engines_here

from vnext import LLM, SamplingParams, Scored
from vnext.kernels.cpu import native
from vnext.replay.answers.stat import stat
from vnext.replay.console.commands import index_of
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.sampling_params import InvalidRequest

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))  # family_cases is shared with the models' tests
from family_cases import save_case  # noqa: E402

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the CPU's kernels are not built here: no C++ compiler was found")
LEVELS = [level.name.lower() for level in native.levels()] if native.is_built() else []
DTYPES = ("float32", "bfloat16")
PROMPTS = 40
TOKENS = 30
COMMON: dict[str, Any] = {"executor": "inproc", "log": "off", "threads": 1}
PREEMPTED = {"num_blocks_override": 30, "max_num_seqs": 40, "max_num_batched_tokens": 60, "long_prefill_token_threshold": 7}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "in chunks": {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 7},
    "preempted": PREEMPTED,
    "blocks of 32, in step": {"async_scheduling": False, "block_size": 32},
}
Answered = list[tuple[list[int], list[int], list[float]]]
"""(prompt, answer, log-probabilities) of each."""


def prompts(vocab_size: int = 500) -> list[list[int]]:
    """Of 1 to 90 tokens; some share a beginning of 32 tokens."""
    shared = [7 + 11 * place % (vocab_size - 10) for place in range(32)]
    own = [[5 + (13 * index + 7 * place) % (vocab_size - 10) for place in range(1 + index * 5 % 58)] for index in range(PROMPTS)]
    return [shared + each if index % 4 == 0 else each for index, each in enumerate(own)]


def params(index: int) -> SamplingParams:
    """Every third greedy; others with filters and penalties, which change what is drawn and not what is reported."""
    how = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "repetition_penalty": 1.2})[index % 3]
    return SamplingParams(**how, seed=index, max_tokens=TOKENS, ignore_eos=True, logprobs=0)


def generated(vocab_size: int = 500, **settings: object) -> Answered:
    with engines_here(), LLM(**{**COMMON, **settings}) as llm:
        return generate(llm, prompts(vocab_size))


def generate(llm: LLM, asked: list[list[int]]) -> Answered:
    answers = llm.generate(asked, list(map(params, range(len(asked)))), use_tqdm=False)
    found = [(each.prompt_token_ids, each.outputs[0]) for each in answers]
    return [(prompt, one.token_ids, logprobs_of(one)) for prompt, one in found]


def logprobs_of(answer: Any) -> list[float]:
    return [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]


def scored(answered: Answered, **settings: object) -> list[Scored]:
    with engines_here(), LLM(**{**COMMON, **settings}) as llm:
        return llm.score([prompt for prompt, *_ in answered], [answer for _, answer, _ in answered])


def unequal(answered: Answered, found: list[Scored]) -> int:
    """How many log-probabilities have other bits. Every one is compared."""
    ours, theirs = np.concatenate([each for *_, each in answered]), np.concatenate([each.logprobs for each in found])
    assert len(ours) == len(theirs) == PROMPTS * TOKENS
    assert len(np.unique(ours)) > len(ours) // 4, "these are numbers of different tokens"
    return int((ours.astype(np.float32).view(np.int32) != theirs.astype(np.float32).view(np.int32)).sum())


@cache
def usual(dtype: str) -> Answered:
    return generated(dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", LEVELS)
def test_on_every_instruction_set(isa: str, dtype: str) -> None:
    settings = {"isa": isa, "dtype": dtype}
    assert unequal(generated(**settings, **PREEMPTED), scored(generated(**settings), **settings)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", ELSEWHERE.values(), ids=ELSEWHERE)
def test_whatever_shares_the_steps(settings: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    logs = [{"log": "shape", "log_dir": tmp_path / name} for name in ("generated", "scored")]
    assert unequal(generated(dtype=dtype, **settings, **logs[0]), scored(usual(dtype), dtype=dtype)) == 0
    assert unequal(usual(dtype), scored(usual(dtype), dtype=dtype, **settings, **logs[1])) == 0
    seen = [stat(index_of(folder)) for folder in sorted(tmp_path.glob("*/*/"))]
    assert len(seen) == 2 and all((each.preemptions > 0) == (settings is PREEMPTED) for each in seen)
    assert all((each.batch[-1] > 1) == (settings.get("max_num_seqs") != 1) for each in seen)


def test_with_drafts_and_in_eight_bits() -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert unequal(generated(dtype="bfloat16", **drafts), scored(usual("bfloat16"), dtype="bfloat16")) == 0
    for rounded in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        answered = generated(dtype="bfloat16", **rounded)
        assert unequal(answered, scored(answered, dtype="bfloat16", **rounded, max_num_batched_tokens=40)) == 0


@pytest.mark.parametrize("case", ["qwen3_moe", "gemma3_caps", "mixtral_window", "gpt2"])
def test_other_families(case: str, tmp_path: Path) -> None:
    """Experts, capped logits, windows, learned positions; transformers writes the model."""
    save_case(tmp_path, case)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    for dtype in DTYPES:
        settings = {"model": str(tmp_path), "dtype": dtype, "max_model_len": 256}
        answered = generated(97, **settings, max_num_batched_tokens=48)
        assert unequal(answered, scored(answered, **settings)) == 0


def test_two_ranks() -> None:
    settings = {"dtype": "bfloat16", "executor": "mp", "tensor_parallel_size": 2, "digest_interval": 1}
    with LLM(**{**COMMON, **settings}) as llm:
        answered = generate(llm, prompts())
        found = llm.score([prompt for prompt, *_ in answered], [answer for _, answer, _ in answered])
    assert unequal(answered, found) == 0


def test_prompt_logprobs_are_the_same_numbers() -> None:
    """Of prompt and answer as one prompt: the way over HTTP, and that of vLLM."""
    whole = [prompt + answer for prompt, answer, _ in usual("bfloat16")]
    with engines_here(), LLM(**COMMON, dtype="bfloat16") as llm:
        found = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    for (prompt, answer, logprobs), each in zip(usual("bfloat16"), found, strict=True):
        entries = each.prompt_logprobs[len(prompt) :]
        assert [entry[token].logprob for token, entry in zip(answer, entries, strict=True)] == logprobs


def test_a_group_computes_its_prompt_once(tmp_path: Path) -> None:
    """Eight answers to a prompt of 70 tokens: all but the last block's tokens are computed once."""
    count, size, prompt = 8, 16, [3 + 5 * place % 400 for place in range(70)]
    how = SamplingParams(n=count, seed=1, temperature=1.0, max_tokens=4, ignore_eos=True, logprobs=0)
    with engines_here(), LLM(executor="inproc", threads=1, log="full", log_dir=tmp_path, block_size=size) as llm:
        (group,) = llm.generate(prompt, how, use_tqdm=False)
        folder, rest = Path(llm.log_dir), (len(prompt) - 1) % size + 1
        found = llm.score([prompt] * count, [each.token_ids for each in group.outputs])
    answers, scores = len(prompt) + (count - 1) * rest + count * 3, count * (len(prompt) + 3)
    assert stat(index_of(folder)).computed_tokens == answers + scores
    assert len({tuple(each.token_ids) for each in group.outputs}) == count
    assert [each.logprobs for each in found] == [logprobs_of(each) for each in group.outputs]


def test_an_answer_of_the_whole_length_is_scored() -> None:
    """Its last token needs no place in the cache, so the score has the room that the answer had."""
    with engines_here(), LLM(**COMMON, max_model_len=64) as llm:
        how = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)
        answer = llm.generate([1, 2, 3, 4], how, use_tqdm=False)[0].outputs[0]
        (found,) = llm.score([1, 2, 3, 4], answer.token_ids)
        assert (len(found.logprobs), found.logprobs) == (60, logprobs_of(answer))
        assert found.cumulative_logprob == answer.cumulative_logprob
        texts = llm.score("The module", " is a list")
        ids = (llm.tokenizer.encode("The module"), llm.tokenizer.encode(" is a list", add_special_tokens=False))
        assert texts == llm.score(*ids)
        end = llm.ready.config.eos_token_ids[0]
        assert len(llm.score([1, 2], [3, end])[0].logprobs) == len(llm.score([[1]], [[end]])[0].logprobs) + 1 == 2
        for prompt, given, message in (
            ([1, 2, 3, 4], answer.token_ids + [5], "maximum context length is 64 tokens. However, prompt and answer have 65"),
            ([[1]], [[]], "The answer has no tokens"),
            ([1], [2, 10**6], "The answer holds 1000000: token ids lie"),
            ([[1], [2]], [[3]], "There are 2 prompts and 1 answers: give one for each"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                llm.score(prompt, given)
    assert msgspec.structs.asdict(found)["token_ids"] == answer.token_ids
