"""Constraints as folds: what a grammar, a reasoning phase and its budget allow, and where a grammar fails."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tests.sim.scenario_draw import draw_constraint
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.sampling.constraint import COMPILED_MAX, Matcher, Vocabulary
from vnext.sampling.inputs import Allowed, SamplingInputs
from vnext.sampling.sampling import draw_by_inversion, sample
from vnext.sim import toy
from vnext.sim.rng import Rng
from vnext.sim.toy import ToyVocabulary
from vnext.state.params import Constraint

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
SIZE = TOKENIZER.get_vocab_size()
ENDS = (0, 4)
VOCABULARY = Vocabulary(DEMO_MODEL, SIZE, ENDS)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA)
THINK_END = (9, 11, 9)


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def drawn(matcher: Matcher, rng: random.Random) -> list[int]:
    """Tokens drawn among the allowed ones up to an end token."""
    tokens: list[int] = []
    while not tokens or tokens[-1] not in ENDS:
        tokens.append(rng.choice(sorted(allowed(matcher))))
        matcher.take(tokens[-1])
        assert len(tokens) < 400
    return tokens


def test_memory_that_lacks_for_a_grammar_is_not_the_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
        raise OSError(error, "what the system says")

    monkeypatch.setattr(Vocabulary, "compiled", lacking)
    error = errno.EACCES
    assert "what the system says" in Matcher(Constraint(grammar=GRAMMAR), VOCABULARY).error
    error = errno.ENOMEM
    with pytest.raises(MemoryError, match="what the system says"):
        Matcher(Constraint(grammar=GRAMMAR), VOCABULARY)


def test_whatever_is_drawn_keeps_the_schema() -> None:
    for seed in range(30):
        matcher = Matcher(Constraint(grammar=GRAMMAR), VOCABULARY)
        *tokens, _ = drawn(matcher, random.Random(seed))
        value = json.loads(TOKENIZER.decode(tokens))
        assert set(value) == {"name", "on"} and len(value["name"]) <= 6 and not matcher.error


def test_a_finished_grammar_admits_only_an_end() -> None:
    matcher = Matcher(Constraint(grammar=LLMatcher.grammar_from_regex("yes")), VOCABULARY)
    for token in TOKENIZER.encode("yes", add_special_tokens=False).ids:
        assert not allowed(matcher) & set(ENDS)
        matcher.take(token)
    assert allowed(matcher) == set(ENDS)


def test_a_fold_over_the_answer_so_far_is_where_a_fold_token_by_token_is() -> None:
    tokens = drawn(Matcher(Constraint(grammar=GRAMMAR), VOCABULARY), random.Random(5))
    steady = Matcher(Constraint(grammar=GRAMMAR), VOCABULARY)
    for at, token in enumerate(tokens):
        resumed = Matcher(Constraint(grammar=GRAMMAR), VOCABULARY, tokens[:at])
        assert allowed(resumed) == allowed(steady)
        steady.take(token)


def test_the_grammar_begins_after_the_reasoning() -> None:
    matcher = Matcher(Constraint(grammar=GRAMMAR, reasoning_end=THINK_END), VOCABULARY)
    for token in (20, 9, 9, 11, 20, 9, 11):  # a part of the end is no end
        assert allowed(matcher) == set(range(SIZE)) - set(ENDS)
        matcher.take(token)
    matcher.take(9)
    assert not matcher.is_reasoning and allowed(matcher) == allowed(Matcher(Constraint(grammar=GRAMMAR), VOCABULARY))


@pytest.mark.parametrize("grammar", ["", GRAMMAR])
@pytest.mark.parametrize("thought, forced", [([], [9, 11, 9]), ([20, 21], [9, 11, 9]), ([20, 9, 11], [9]), ([20, 9], [11, 9])])
def test_a_budget_forces_the_end_of_the_reasoning(grammar: str, thought: list[int], forced: list[int]) -> None:
    matcher = Matcher(Constraint(grammar=grammar, reasoning_end=THINK_END, reasoning_max=len(thought)), VOCABULARY, thought)
    for token in forced:
        assert allowed(matcher) == {token}
        matcher.take(token)
    assert not matcher.is_reasoning and bool(grammar) != matcher.allowed().all()


@pytest.mark.parametrize("token", [0, 31, 32, 65, 1057, SIZE - 1])
def test_a_banned_token_is_the_only_one_that_is_forbidden(token: int) -> None:
    assert allowed(Matcher(Constraint(banned=((token,),)), VOCABULARY)) == set(range(SIZE)) - {token}


def test_without_a_grammar_nothing_is_forbidden_within_the_budget() -> None:
    matcher = Matcher(Constraint(reasoning_end=THINK_END, reasoning_max=2), VOCABULARY, (20,))
    assert matcher.allowed().all()


@pytest.mark.parametrize("grammar", ["{", "start: /(/", '{"grammars": [{"json_schema": {"type": "nothing"}}]}'])
def test_a_grammar_that_cannot_be_read_is_an_error_and_allows_an_end(grammar: str) -> None:
    matcher = Matcher(Constraint(grammar=grammar), VOCABULARY)
    assert matcher.error and "\n" not in matcher.error and allowed(matcher) == set(ENDS)


def test_a_token_that_the_grammar_forbids_is_an_error() -> None:
    matcher = Matcher(Constraint(grammar=LLMatcher.grammar_from_regex("yes")), VOCABULARY)
    matcher.take(TOKENIZER.encode("no", add_special_tokens=False).ids[0])
    matcher.allowed()
    assert matcher.error


def test_a_grammar_that_grows_too_complex_fails_at_one_token() -> None:
    """Fuel, not time, is the limit, so that every rank fails alike."""
    rules = [f'y{index}: "a" "{index}"*' for index in range(3000)]
    lark = "\n".join(["start: x*", "x: " + "|".join(f"y{index}" for index in range(3000)), *rules])
    failed = set()
    for _ in range(2):
        matcher, rng, count = Matcher(Constraint(grammar=LLMatcher.grammar_from_lark(lark)), VOCABULARY), random.Random(1), 0
        while not matcher.error and count < 50:
            matcher.take(rng.choice(sorted(allowed(matcher) - set(ENDS))))
            count += not matcher.allowed().all()
        failed.add((count, matcher.error))
    assert len(failed) == 1 and "items" in next(iter(failed))[1]


@pytest.mark.parametrize(("names", "is_kept"), [(270, True), (300, False)])
def test_the_items_of_a_position_are_bounded(names: int, is_kept: bool) -> None:
    """Their number decides what a step costs; a schema with too many fails once the object begins."""
    schema = {"type": "object", "properties": {f"p{at}": {} for at in range(names)}, "additionalProperties": False}
    matcher = Matcher(Constraint(grammar=LLMatcher.grammar_from_json_schema(schema)), VOCABULARY)
    matcher.take(TOKENIZER.token_to_id("{"))
    matcher.allowed()
    assert ("" if is_kept else "too many items") in matcher.error and bool(matcher.error) is not is_kept


def test_a_model_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    assert "tokenizer" in Matcher(Constraint(grammar=GRAMMAR), Vocabulary(tmp_path, SIZE, ENDS)).error


def test_forbidden_tokens_are_never_sampled_and_other_rows_keep_their_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((6, 50), generator=generator) * 3
    columns = {
        "temperature": torch.tensor([0.0, 1.0, 1.2, 0.0, 1.0, 0.7]), "top_k": torch.tensor([0, 0, 5, 0, 9, 0]),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 1.0, 1.0, 0.5]), "min_p": torch.zeros(6), "seed": torch.arange(6),
        "position": torch.arange(6) + 7,
    }  # fmt: skip
    may_come = torch.rand((5, 50), generator=generator) < 0.1
    may_come[:, 13] = True
    masks = np.packbits(np.pad(may_come.numpy(), ((0, 0), (0, 14))), axis=1, bitorder="little").view(np.int32)
    rows, places = torch.tensor([0, 2, 4]), torch.tensor([3, 0, 4])
    given = SamplingInputs(**columns, allowed=Allowed(rows, places, torch.from_numpy(masks)))
    free, bound = sample(logits, SamplingInputs(**columns)).tokens, sample(logits, given).tokens
    assert bound[[1, 3, 5]].tolist() == free[[1, 3, 5]].tolist()
    assert may_come[places, bound[rows]].all() and bound.tolist() != free.tolist()
    assert bound.tolist() == sample(logits, given, draw=draw_by_inversion).tokens.tolist()
    with pytest.raises(ValueError, match="allowed.masks must be"):
        sample(logits, given._replace(allowed=given.allowed._replace(masks=given.allowed.masks[:, :1])))


def test_a_grammar_fails_at_the_same_token_whatever_came_before() -> None:
    """A matcher's lexer learns as it goes, and what it knows costs no fuel: a copy of one that was used would go further."""
    vocabulary = Vocabulary(DEMO_MODEL, SIZE, ENDS)
    fresh = vocabulary.compiled(GRAMMAR)
    drawn(Matcher(Constraint(grammar=GRAMMAR), vocabulary), random.Random(1))
    assert vocabulary.compiled(GRAMMAR) is fresh and not fresh.is_stopped()
    assert allowed(Matcher(Constraint(grammar=GRAMMAR), vocabulary)) == allowed(Matcher(Constraint(grammar=GRAMMAR), VOCABULARY))
    for most in (COMPILED_MAX - 1, COMPILED_MAX):
        for count in range(most):
            vocabulary.compiled(LLMatcher.grammar_from_regex(f"a{{{count + 1}}}"))
        assert (vocabulary.compiled(GRAMMAR) is fresh) is (most < COMPILED_MAX)


BEGUN = Constraint(grammar=GRAMMAR, reasoning_begin=(7, 8), reasoning_end=THINK_END)


def test_the_first_tokens_decide_whether_an_answer_reasons() -> None:
    plain = Matcher(Constraint(grammar=GRAMMAR), VOCABULARY)
    undecided = Matcher(BEGUN, VOCABULARY)
    assert allowed(undecided) == allowed(plain) | {7} and not undecided.is_reasoning and undecided.forced() == []
    for token in drawn(Matcher(Constraint(grammar=GRAMMAR), VOCABULARY), random.Random(5)):
        undecided.take(token), plain.take(token)
        assert allowed(undecided) == allowed(plain) and not undecided.is_reasoning
    thinking = Matcher(BEGUN, VOCABULARY, (7,))
    assert allowed(thinking) == {8}, "the grammar knows no such token, and only the mark goes on"
    thinking.take(8)
    assert thinking.is_reasoning and allowed(thinking) == set(range(SIZE)) - set(ENDS)
    for token in THINK_END:
        thinking.take(token)
    assert allowed(thinking) == allowed(Matcher(Constraint(grammar=GRAMMAR), VOCABULARY))


def test_an_answer_that_opens_no_reasoning_has_no_budget() -> None:
    bounded = Constraint(reasoning_begin=(7, 8), reasoning_end=THINK_END, reasoning_max=3)
    assert Matcher(bounded, VOCABULARY, (7, 20, 20, 20)).allowed().all() and Matcher(bounded, VOCABULARY, (20, 7, 8, 20)).allowed().all()
    assert allowed(Matcher(bounded, VOCABULARY, (7, 8, 20))) == {THINK_END[0]}


def test_a_fold_allows_what_its_description_does_of_the_whole_answer() -> None:
    """Random constraints over toy tokens, at every place of random answers, which leave what is allowed now and then at last."""
    opened = 0
    for seed in range(3_000):
        rng, tokens, ends = Rng(seed), [*range(2, 10)], (1,)
        vocabulary = ToyVocabulary(12, ends)
        constraint = draw_constraint(rng, tokens)
        answer: list[int] = []
        matcher = Matcher(constraint, vocabulary)
        for _ in range(9):
            now = toy.allowed(constraint, answer, 12, ends)
            assert allowed(matcher) == now, (seed, answer)
            assert matcher.forced() == [] or matcher.forced() == toy.forced(constraint, answer, ends)
            if matcher.error or 1 in answer:
                break
            begin = [*constraint.reasoning_begin]
            goes_on = set(begin[len(answer) : len(answer) + 1]) & now if answer == begin[: len(answer)] and rng.happens(60) else set()
            answer.append(rng.choose(sorted(goes_on or now)))
            matcher.take(answer[-1])
            opened += bool(begin) and answer == begin
    assert opened > 100
