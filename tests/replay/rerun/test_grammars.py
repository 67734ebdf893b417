"""verify --grammar holds each token to its request's constraint; exec repeats constrained requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_here import engines_here
from llguidance import LLMatcher
from msgspec.structs import replace
from tokenizers import Tokenizer

from vnext import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.batch.masks import RowMasks
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import pack_tokens
from vnext.state.params import Constraint, Sampling

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
GRAMMAR = LLMatcher.grammar_from_regex("(yes|no|perhaps)( indeed){2,3}")
BOUND = Sampling(seed=5, max_tokens=40, temperature=1.2, constraint=Constraint(grammar=GRAMMAR))


def recorded(folder: Path, log: str = "full", **settings: Any) -> tuple[Path, dict[str, str]]:
    """The log of two constrained requests and a free one, and how each ended."""
    prompt = pack_tokens(TOKENIZER.encode("Is Python a language?").ids)
    wanted = (BOUND, replace(BOUND, constraint=None, ignore_eos=True), replace(BOUND, seed=9))
    requests = [SubmitRequest(name=str(at), prompt=prompt, sampling=each) for at, each in enumerate(wanted)]
    with engines_here(), LLM(executor="inproc", log=log, log_dir=str(folder), **settings) as llm:
        finishes = {output.name: output.finish for output in llm._client.run(requests)}
    path = next(each for each in folder.iterdir() if each.is_dir())
    return path, finishes


def test_a_sound_log_is_held_to_its_grammars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, finishes = recorded(tmp_path, max_num_batched_tokens=8, max_num_seqs=8)
    assert finishes == {"0": "stop", "1": "length", "2": "stop"}
    assert replay(["verify", "--grammar", "--json", str(path)]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["constrained_requests"] == 2 and verdict["constrained_tokens"] >= 10
    assert replay(["verify", "--grammar", str(path)]) == 0 and "of 2 requests" in capsys.readouterr().out
    for alone in ((), ("--solo",)):
        assert replay(["exec", *alone, "--json", str(path)]) == 0
        assert json.loads(capsys.readouterr().out)["differ"] == 0


def test_a_token_that_the_grammar_forbids_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that forgets its masks."""
    monkeypatch.setattr(RowMasks, "allowed", lambda self, places: None)
    path, _ = recorded(tmp_path)
    assert replay(["verify", str(path)]) == 0
    capsys.readouterr()
    assert replay(["verify", "--grammar", "--json", str(path)]) == 1
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["field"] == "tokens" and "which its constraint forbids there" in difference["message"]


def test_a_log_without_texts_says_that_it_holds_no_grammars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = recorded(tmp_path, log="shape")
    assert replay(["verify", "--grammar", str(path)]) == 2 and "--log full" in capsys.readouterr().err
