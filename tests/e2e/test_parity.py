"""Real checkpoint, real oracle: transformers' greedy tokens, and one sampled stream, whatever the scheduler does; and every
run's log verifies with all laws and all ranks' digests.

Servers serve with every pair of choices, the other combinations are engines in this process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_here import engines_here
from serving import Server, complete_all, eventually, serving

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.sampling_params import SamplingParams

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
SCHEDULES = {"async": {"async_scheduling": True}, "sync": {"async_scheduling": False}}
CACHES = {"cached": {"enable_prefix_caching": True}, "uncached": {"enable_prefix_caching": False}}
PREFILLS = {
    "whole": {"enable_chunked_prefill": False},
    "chunked": {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 9},
}
ROOMS = {"roomy": {}, "tiny": {"num_blocks_override": 100}}
CHOICES = (SCHEDULES, CACHES, PREFILLS, ROOMS)
COMBINATIONS = list(itertools.product(*CHOICES))
COMMON = {"dtype": "float32", "digest_interval": 1, "threads": 1}


def is_served(combination: tuple[str, ...]) -> bool:
    """Five of the sixteen: any two choices meet in one of them."""
    return sum(list(choice).index(name) for choice, name in zip(CHOICES, combination)) in (0, 3)


def settings_of(combination: tuple[str, ...]) -> dict[str, Any]:
    return {field: value for choice, name in zip(CHOICES, combination) for field, value in choice[name].items()}


def flags(settings: dict[str, Any]) -> list[str]:
    """The settings as words of the command line."""
    words = {f"--{'no-' if value is False else ''}{field.replace('_', '-')}": value for field, value in settings.items()}
    return [word for flag, value in words.items() for word in ([flag] if isinstance(value, bool) else [flag, str(value)])]


@pytest.fixture(scope="module")
def prompts(stories_path: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(stories_path / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in BEGINNINGS]


Oracle = Callable[[list[int], list[int]], list[int]]


@pytest.fixture(scope="module")
def oracle(stories_path: Path) -> Oracle:
    """transformers' own choice at each place of an answer to a prompt, after all the tokens before it, in float32.

    An answer that is everywhere what it chose is its greedy continuation: one forward, not one a token.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle: pip install transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(stories_path, dtype=torch.float32).eval()

    @cache
    def chosen(prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
        return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()

    return lambda prompt, answer: chosen(tuple(prompt), tuple(answer))


@pytest.fixture(scope="module")
def sampled_streams(tmp_path_factory: pytest.TempPathFactory, stories_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The sampled streams of one run, which all others must repeat."""
    return ran_here(tmp_path_factory.mktemp("once"), stories_path, prompts).sampled


def body_of(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {
        "model": "stories", "prompt": prompt, "max_tokens": TOKEN_COUNT, "ignore_eos": True, "return_token_ids": True,
        **sampling,
    }  # fmt: skip


def token_ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def run_all(server: Server, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """All prompts greedily, and some of them sampled as well, mixed in one crowd of 32."""
    greedy = [body_of(prompt, temperature=0) for prompt in prompts]
    sampled = [body_of(prompt, temperature=0.8, seed=index) for index, prompt in enumerate(prompts[:SAMPLED_COUNT])]
    mixed = [body for pair in itertools.zip_longest(greedy, sampled) for body in pair if body is not None]
    tokens = dict(zip(map(json.dumps, mixed), token_ids(complete_all(server.url, mixed, CONCURRENCY))))
    return [tokens[json.dumps(body)] for body in greedy], [tokens[json.dumps(body)] for body in sampled]


def assert_greedy(answers: list[list[int]], prompts: list[list[int]], oracle: Oracle) -> None:
    assert [len(answer) for answer in answers] == [TOKEN_COUNT] * len(prompts)
    assert answers == [oracle(prompt, answer) for prompt, answer in zip(prompts, answers)]


def assert_log_verifies(log_dir: Path | str, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A stopped engine's log: every plan, state and rank digest recomputed, all laws checked."""
    capsys.readouterr()
    assert replay(["verify", "--laws", "--json", str(log_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] >= TOKEN_COUNT
    assert found["rank_digests"] == world_size * found["steps"]


class Ran(msgspec.Struct, frozen=True):
    """What a run answered, how many requests it preempted, and its log."""

    greedy: list[list[int]]
    sampled: list[list[int]]
    preempted: float
    log_dir: Path | str


def ran_by_server(log_dir: Path, model: Path, prompts: list[list[int]], **settings: Any) -> Ran:
    with serving(log_dir, str(model), "--served-model-name", "stories", *flags(COMMON | settings)) as server:
        greedy, sampled = run_all(server, prompts)
        assert eventually(lambda: server.metric("vnext_blocks_held") == 0)
        preempted = server.metric("vnext_num_preemptions_total")
        assert server.stop() == 0
    return Ran(greedy, sampled, preempted, server.log_dir)


def ran_here(log_dir: Path, model: Path, prompts: list[list[int]], **settings: Any) -> Ran:
    greedy = [SamplingParams(temperature=0, max_tokens=TOKEN_COUNT, ignore_eos=True)] * len(prompts)
    sampled = [
        SamplingParams(temperature=0.8, seed=index, max_tokens=TOKEN_COUNT, ignore_eos=True) for index in range(SAMPLED_COUNT)
    ]
    with engines_here(), LLM(str(model), executor="inproc", log_dir=str(log_dir), **COMMON, **settings) as llm:
        answers = llm.generate([*prompts, *prompts[:SAMPLED_COUNT]], [*greedy, *sampled], use_tqdm=False)
        assert eventually(lambda: llm._client.stats.blocks_held == 0)
        preempted = llm._client.stats.preempted
    tokens = [answer.outputs[0].token_ids for answer in answers]
    return Ran(tokens[: len(prompts)], tokens[len(prompts) :], preempted, llm.log_dir)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_tokens_are_the_oracle_s_under_every_schedule(
    combination: tuple[str, str, str, str],
    tmp_path: Path,
    stories_path: Path,
    prompts: list[list[int]],
    oracle: Oracle,
    sampled_streams: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ran_by_server if is_served(combination) else ran_here
    ran = run(tmp_path, stories_path, prompts, **settings_of(combination))
    assert_greedy(ran.greedy, prompts, oracle)
    assert ran.sampled == sampled_streams
    assert (ran.preempted > 0) == (combination[-1] == "tiny")
    assert_log_verifies(ran.log_dir, 1, capsys)


def test_servers_meet_every_pair_of_choices() -> None:
    pairs = [itertools.combinations(combination, 2) for combination in COMBINATIONS if is_served(combination)]
    assert len(pairs) == 5 and len(set(itertools.chain(*pairs))) == 6 * 4


def test_two_ranks_give_the_same_tokens_and_digests(
    tmp_path: Path,
    stories_path: Path,
    prompts: list[list[int]],
    oracle: Oracle,
    sampled_streams: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = ran_by_server(tmp_path, stories_path, prompts, tensor_parallel_size=2, log="full")
    assert_greedy(ran.greedy, prompts, oracle)
    assert ran.sampled == sampled_streams
    assert_log_verifies(ran.log_dir, 2, capsys)
