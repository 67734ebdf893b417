"""Whole engines with drafts and without: the same tokens, reasons and log-probabilities, whatever is asked and however it runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from vnext import LLM, SamplingParams
from vnext.replay.cli.main import main
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.sampling_params import StructuredOutputsParams
from vnext.runtime.protocol.settings import SettingsError

PHRASES = ("def add(a, b):\n    return a + b\n", "for name in names:\n    print(name)\n", "The module is a module. ", "one two three one two ")
SCHEMA = {
    "type": "object", "properties": {"first_name": {"type": "string", "maxLength": 6}, "is_known": {"type": "boolean"}},
    "required": ["first_name", "is_known"], "additionalProperties": False,
}  # fmt: skip
CONSTRAINTS = (
    StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(regex=r"(abcdefgh|abcdzzzz)+ [0-9]{2,5} the end"),
    StructuredOutputsParams(choice=["the first answer", "the second answer"]),
)  # fmt: skip
SPECULATION = {"method": "ngram", "num_speculative_tokens": 5, "row_cost": 0}  # a measured cost may forbid every draft
SUFFIX = {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_cached_requests": 9, "row_cost": 0}


def wishes() -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(11)
    prompts = ["".join(rng.choice(PHRASES) for _ in range(rng.randint(1, 6))) for _ in range(24)]
    params = [
        SamplingParams(
            max_tokens=rng.choice((1, 7, 60)), temperature=rng.choice((0, 0, 0.4, 1.0)), seed=rng.randrange(99),
            repetition_penalty=rng.choice((1, 1, 1.1)), frequency_penalty=rng.choice((0, 0, 0.3)), min_tokens=rng.choice((0, 0, 1)),
            top_p=rng.choice((1, 0.9)), logprobs=rng.choice((None, 1)), stop_token_ids=rng.choice(([], [5, 7, 300])),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in prompts
    ]  # fmt: skip
    for place, asked in enumerate(CONSTRAINTS * 2):
        mine = params[3 * place]
        params[3 * place] = replace(mine, structured_outputs=asked, ignore_eos=False, min_tokens=0, stop_token_ids=[], max_tokens=60)
    params[1] = replace(params[1], bad_words=["a", "the"])
    return prompts, params


def answers(**settings: object) -> list[tuple[object, ...]]:
    with LLM(threads=1, seed=1, **settings) as llm:
        found = llm.generate(*wishes(), use_tqdm=False)
    return [(each.token_ids, each.finish_reason, each.stop_reason, each.logprobs) for each in (answer.outputs[0] for answer in found)]


@pytest.fixture(scope="module")
def undrafted() -> list[tuple[object, ...]]:
    return answers(log="off")


@pytest.mark.parametrize(
    "settings",
    [
        {"digest_interval": 1, "check_laws": True},
        {"async_scheduling": False},
        {"num_blocks_override": 40},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
        {"log_max_bytes": 2**20},
        {"speculative_config": SUFFIX, "num_blocks_override": 40},
    ],
    ids=["every law", "in step", "preempted", "uncached", "log", "suffix, preempted"],
)
def test_drafts_change_no_answer(undrafted: list[tuple[object, ...]], settings: dict[str, object], tmp_path: Path) -> None:
    assert answers(**{"speculative_config": SPECULATION, "log": "full", "log_dir": str(tmp_path)} | settings) == undrafted
    (log,) = tmp_path.iterdir()
    assert main(["verify", str(log), "--laws"]) == 0


def test_a_request_may_forbid_its_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for bound in (0, None):
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, num_speculative_tokens=bound)
        with LLM(threads=1, speculative_config=SPECULATION, log="full", log_dir=str(tmp_path / str(bound))) as llm:
            tokens = llm.generate(PHRASES[3] * 6, params, use_tqdm=False)[0].outputs[0].token_ids
        (log,) = (tmp_path / str(bound)).iterdir()
        assert main(["show", str(log), "--json"]) == 0
        found.append((tokens, json.loads(capsys.readouterr().out)["state"]["counters"]["draft_tokens"]))
    assert found[0][0] == found[1][0] and found[0][1] == 0 < found[1][1]


def test_a_grammar_s_forced_tokens_save_steps(undrafted: list[tuple[object, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(speculative_config={"method": "grammar", "num_speculative_tokens": 8, "row_cost": 0}, log="full", log_dir=str(tmp_path)) == undrafted
    (log,) = tmp_path.iterdir()
    assert main(["show", str(log), "--json"]) == 0
    counters = json.loads(capsys.readouterr().out)["state"]["counters"]
    assert counters["draft_tokens"] >= counters["accepted_tokens"] > 30
    assert main(["verify", str(log), "--grammar"]) == 0 and main(["exec", str(log), "--threads", "1"]) == 0


@pytest.mark.parametrize("config", [SPECULATION, SUFFIX], ids=["ngram", "suffix"])
def test_drafts_of_two_ranks_change_no_answer(config: dict[str, object]) -> None:
    assert answers(tensor_parallel_size=2, speculative_config=config, digest_interval=1) == answers(tensor_parallel_size=2)


@pytest.mark.parametrize("kept", [0, 100])
def test_earlier_answers_are_drafted_if_they_are_kept(kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SUFFIX | {"suffix_decoding_max_cached_requests": kept}
    asked = ["A quite ordinary question"], SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    with LLM(threads=1, log="full", log_dir=str(tmp_path), speculative_config=config) as llm:
        first, second = (llm.generate(*asked, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    (log,) = tmp_path.iterdir()
    assert main(["show", str(log), "--json"]) == 0
    accepted = json.loads(capsys.readouterr().out)["state"]["counters"]["accepted_tokens"]
    assert first == second and (accepted > 40) == (kept > 0)


def test_a_log_with_drafts_is_executed_again(undrafted: list[tuple[object, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(speculative_config=SPECULATION, log="full", log_dir=str(tmp_path)) == undrafted
    (log,) = tmp_path.iterdir()
    assert main(["exec", str(log), "--threads", "1"]) == 0 and "every token is the same" in capsys.readouterr().out


def test_drafts_save_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(threads=1, log="full", log_dir=str(tmp_path), speculative_config=SPECULATION) as llm:
        llm.generate(["one two three one two "], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    (log,) = tmp_path.iterdir()
    assert main(["show", str(log), "--json"]) == 0
    counters = json.loads(capsys.readouterr().out)["state"]["counters"]
    assert counters["generated_tokens"] == 60 and counters["draft_tokens"] >= counters["accepted_tokens"] > 3


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"method": "psychic"}, "must be one of ngram"),
        ({"num_speculative_tokens": 0}, "between 1 and 64"),
        ({"num_speculative_tokens": 100}, "between 1 and 64"),
        ({"num_speculative_tokens": "many"}, "speculative_config"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "swap the two"),
        ({"draft": 1}, "may have"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "between 1 and 1024"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "between 0 and 1"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "between 0 and 1000000"),
        ("{", "JSON"),
    ],
)
def test_a_speculation_that_cannot_be_is_refused(config: object, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        LLM(speculative_config=config)


@pytest.mark.parametrize("given, ranks", [(None, 1), (None, 2), (7, 1)])
def test_the_row_cost_is_measured_unless_it_is_given(given: int | None, ranks: int, tmp_path: Path) -> None:
    config = {"method": "ngram"} | ({} if given is None else {"row_cost": given})
    with LLM(threads=1, log="full", log_dir=str(tmp_path), speculative_config=config, tensor_parallel_size=ranks):
        pass
    (log,) = tmp_path.iterdir()
    cost = open_log(log).header.started.config.speculation.row_cost
    assert cost == given if given else 0 <= cost <= 1000
