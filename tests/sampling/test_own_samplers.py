"""A sampler from outside chooses an engine's tokens, the same ones in any batch; one that does not is refused in one sentence."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from engine_here import engines_here, installed

from vnext import LLM, SamplingParams
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused
from vnext.sampling import outside
from vnext.sampling.outside import OwnSampler, Rows, SamplerError, own_sampler, require_pure, trial
from vnext.sampling.sampling import SamplingInputs, sample

OWN = '''
import torch

def gumbel(logits, rows):
    """The largest logit after Gumbel noise: Gumbel, Statistical Theory of Extreme Values, 1954."""
    noise = -(-((rows.words(logits.shape[1]).double() + 0.5) / 2**32).log()).log()
    return (logits.double() / rows.temperature[:, None].double() + noise).argmax(1)

def crowd(logits, rows):
    return logits.topk(1 + len(logits) % 2).indices[:, -1]
'''
PROMPTS = ["def f(x):", "The", "import os\nimport sys\n\nclass A:\n    def", "a b c d e f g h i j k l m n o p q r s t u v w x y z"] * 2
VOCABULARY = 150


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers both functions."""
    points = {name: f"own_samplers:{name}" for name in ("gumbel", "crowd")}
    installed(tmp_path, monkeypatch, outside.GROUP, points, {"own_samplers": OWN})


def answers(**settings: object) -> list[list[int]]:
    """What an engine answers to the prompts; the last one is greedy, and the first has three tokens only."""
    own = {0: {"allowed_token_ids": [5, 9, 60]}, len(PROMPTS) - 1: {"temperature": 0.0}}
    usual = {"temperature": 0.8, "max_tokens": 14, "ignore_eos": True}
    asked = [SamplingParams(**usual | {"seed": number} | own.get(number, {})) for number in range(len(PROMPTS))]
    here = settings.keys().isdisjoint({"tensor_parallel_size", "pipeline_parallel_size"})
    settings |= {"executor": "inproc"} if here else {}
    with engines_here() if here else nullcontext(), LLM(str(DEMO_MODEL), threads=1, log="off", **settings) as llm:
        return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, asked, use_tqdm=False)]


@pytest.mark.usefixtures("package")
def test_an_engine_s_tokens_are_its_own_and_the_same_in_any_batch() -> None:
    usual, found = answers(), answers(sampler="gumbel")
    assert {*found[0]} <= {5, 9, 60} and found[-1] == usual[-1]
    assert sum(one != other for one, other in zip(found, usual)) >= len(PROMPTS) - 2
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    ways = {"tensor_parallel_size": 2, "max_num_batched_tokens": 7}, {"max_num_seqs": 2, "speculative_config": drafts}
    for way in (*ways, {"pipeline_parallel_size": 2}):
        assert answers(sampler="gumbel", **way) == found, way


@pytest.mark.usefixtures("package")
def test_what_an_engine_refuses() -> None:
    for name, why in {"crowd": "for the same rows alone", "none": "'none' as an entry point of vnext.samplers; there are: crowd, gumbel"}.items():
        with pytest.raises(StartRefused, match=f"^--sampler: .*{why}"):
            LLM(str(DEMO_MODEL), threads=1, log="off", sampler=name)


def test_the_words_are_those_of_the_row() -> None:
    _, rows = trial(VOCABULARY)
    words = rows.words(9)
    assert words.shape == (len(rows.seed), 9) and int(words.min()) >= 0 and int(words.max()) < 2**32
    assert torch.equal(words[:, :4], rows.words(4)) and len(words.unique()) == words.numel()
    alone = Rows(*(column[2:3] for column in rows))
    assert torch.equal(alone.words(9), words[2:3])


def test_what_may_not_come_does_not() -> None:
    """Whatever the function says: tokens that are none, that are masked, and rows of NaN and of temperature 0 get the likeliest one."""
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 6)
    logits[3, 2], logits[4, 0] = float("-inf"), float("nan")
    said = torch.tensor([-1, 3, 2, 2, 2, 2])
    ones, whole = torch.ones(6), torch.zeros(6, dtype=torch.int64)
    inputs = SamplingInputs(ones.clone(), whole, ones, ones * 0, whole, whole)
    inputs.temperature[5] = 0.0
    spoilt = torch.zeros(6, dtype=torch.bool)
    own = OwnSampler("own", lambda logits, rows: said)
    assert own(logits, inputs, spoilt=spoilt).tolist() == [1, 1, 2, 1, 0, 1] == sample(logits, inputs, own=own).tokens.tolist()
    assert spoilt.tolist() == [False] * 4 + [True, False]
    assert own(logits, inputs._replace(any_random=False)).tolist() == [1, 1, 1, 1, 0, 1]


IMPURE = {
    "changes the logits that it is given": lambda logits, rows: logits.fill_(0.0).argmax(1),
    "chooses what may not come": lambda logits, rows: rows.seed % 1 + 1,
    "again: a row's token may depend on its own": lambda logits, rows: (logits + torch.rand(logits.shape) * 9).argmax(1),
    "in another order": lambda logits, rows: (logits + torch.arange(len(logits))[:, None] * torch.arange(VOCABULARY)).argmax(1),
    "beside more of them": lambda logits, rows: logits.topk(1 + (len(logits) > 6)).indices[:, -1],
    "alone": lambda logits, rows: logits.topk(1 + (len(logits) == 1)).indices[:, -1],
    r"returns torch.float32\[6, 150\]: it must return torch.int64\[6\], a token a row": lambda logits, rows: logits,
    "returns int": lambda logits, rows: 0,
    "fails with ZeroDivisionError: division by zero": lambda logits, rows: 1 / 0,
}


@pytest.mark.parametrize("why", IMPURE)
def test_a_sampler_that_is_not_pure_is_refused(why: str) -> None:
    with pytest.raises(SamplerError, match=f"^the sampler own .*{why}"):
        require_pure(OwnSampler("own", IMPURE[why]), VOCABULARY)


def test_a_sampler_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints([EntryPoint("own", "no.such:thing", group)]))
    with pytest.raises(SamplerError, match="^the sampler own cannot be imported .ModuleNotFoundError"):
        own_sampler("own", VOCABULARY)
