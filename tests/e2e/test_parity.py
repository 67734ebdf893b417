"""Real checkpoint, real oracle: the running server gives transformers' greedy tokens, and one sampled stream, whatever the
scheduler does; and every run's log verifies with all laws and all ranks' digests."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from serving import Server, complete_all, eventually, serving

from vnext.replay.cli import main as replay

CONCURRENCY = 32
TOKEN_COUNT = 200
SAMPLED_COUNT = 12
BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sun. One day,",
    "Once upon a time, there was a little girl named Lily. She loved to play with her dog. The dog",
    "Once upon a time, there was a little girl",
    "Once upon a time, there was a big bear. The bear lived in the forest with his mom and dad.",
    "One day, Tom and his friend Sue went to the beach. They saw",
    "One day, a boy named Tim found a red ball. He wanted to",
    "The cat and the dog were friends. They liked to",
    "Lily and Ben are twins. They like to play with their toys. One day, they",
    "The sun was hot and",
    "Tom had a big blue boat. He",
    "A bird sat on a tree. It",
    "In a small house, there lived",
    "Mom said, \"Let's go to the store.\"",
    "She was very sad because",
    "He saw a",
    "They",
    "The big dog ran fast. The little cat ran",
    "Sam was a happy frog. He liked to jump and",
    "It was time for bed, but Anna did not want to sleep. She",
)
SCHEDULES = {"async": ["--async-scheduling"], "sync": ["--no-async-scheduling"]}
CACHES = {"cached": ["--enable-prefix-caching"], "uncached": ["--no-enable-prefix-caching"]}
PREFILLS = {
    "whole": ["--no-enable-chunked-prefill"],
    "chunked": ["--max-num-batched-tokens", "40", "--long-prefill-token-threshold", "9"],
}
ROOMS = {"roomy": [], "tiny": ["--num-blocks-override", "100"]}
COMBINATIONS = list(itertools.product(SCHEDULES, CACHES, PREFILLS, ROOMS))


@pytest.fixture(scope="module")
def prompts(stories_path: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(stories_path / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in BEGINNINGS]


@pytest.fixture(scope="module")
def greedy_tokens(stories_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy continuation, prompt by prompt, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle: pip install transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(stories_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        whole = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKEN_COUNT, pad_token_id=0
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def sampled_streams() -> list[list[int]]:
    """The sampled streams of the first run, which all others must repeat."""
    return []


def request(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {
        "model": "stories", "prompt": prompt, "max_tokens": TOKEN_COUNT, "ignore_eos": True, "return_token_ids": True,
        **sampling,
    }  # fmt: skip


def token_ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def run_all(server: Server, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """All prompts greedily, and some of them sampled as well, mixed in one crowd of 32."""
    greedy = [request(prompt, temperature=0) for prompt in prompts]
    sampled = [request(prompt, temperature=0.8, seed=index) for index, prompt in enumerate(prompts[:SAMPLED_COUNT])]
    mixed = [body for pair in itertools.zip_longest(greedy, sampled) for body in pair if body is not None]
    tokens = dict(zip(map(json.dumps, mixed), token_ids(complete_all(server.url, mixed, CONCURRENCY))))
    return [tokens[json.dumps(body)] for body in greedy], [tokens[json.dumps(body)] for body in sampled]


def assert_log_verifies(server: Server, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The stopped server's log: every plan, state and rank digest recomputed, all laws checked."""
    capsys.readouterr()
    assert replay(["verify", "--laws", "--json", str(server.log_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] >= TOKEN_COUNT
    assert found["rank_digests"] == world_size * found["steps"]


def check_run(
    log_dir: Path,
    model: Path,
    arguments: list[str],
    prompts: list[list[int]],
    expected: list[list[int]],
    streams: list[list[int]],
    capsys: pytest.CaptureFixture[str],
    world_size: int = 1,
) -> float:
    """One server with these arguments gives the expected tokens; returns how many requests it preempted."""
    common = ["--dtype", "float32", "--served-model-name", "stories", "--digest-interval", "1", "--threads", "1"]
    with serving(log_dir, str(model), *common, *arguments) as server:
        greedy, sampled = run_all(server, prompts)
        assert eventually(lambda: server.metric("vnext_blocks_held") == 0)
        preempted = server.metric("vnext_preemptions_total")
        assert server.stop() == 0
    assert greedy == expected
    streams[:] = streams or sampled
    assert sampled == streams
    assert_log_verifies(server, world_size, capsys)
    return preempted


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_tokens_are_the_oracle_s_under_every_schedule(
    combination: tuple[str, str, str, str],
    tmp_path: Path,
    stories_path: Path,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    sampled_streams: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule, cache, prefill, room = combination
    arguments = [*SCHEDULES[schedule], *CACHES[cache], *PREFILLS[prefill], *ROOMS[room]]
    preempted = check_run(tmp_path, stories_path, arguments, prompts, greedy_tokens, sampled_streams, capsys)
    assert (preempted > 0) == (room == "tiny")


def test_two_ranks_give_the_same_tokens_and_digests(
    tmp_path: Path,
    stories_path: Path,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    sampled_streams: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--tensor-parallel-size", "2", "--log", "full"]
    check_run(tmp_path, stories_path, arguments, prompts, greedy_tokens, sampled_streams, capsys, world_size=2)
