"""Allowed tokens and banned sequences: what the fold forbids, against a reading of the whole answer at each step."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from transformers import GenerationConfig
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, WhisperTimeStampLogitsProcessor

from vnext.runtime.engine.clients import constraint_refusal
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.sampling.constraint import Matcher, Vocabulary
from vnext.sampling.inputs import Allowed
from vnext.sampling.logits import keep_allowed, prefer_times
from vnext.sim.toy import ToyVocabulary
from vnext.state.config import SchedulerConfig
from vnext.state.params import Constraint, Sampling
from vnext.text.tokenizer import Tokenizer, banned_sequences

TOKENIZER = Tokenizer.load(DEMO_MODEL)
SIZE = TOKENIZER.vocab_size
ENDS = (0, 4)
VOCABULARY = Vocabulary(DEMO_MODEL, SIZE, ENDS)


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def expected(constraint: Constraint, answer: list[int]) -> set[int]:
    """What vLLM's definition says, read from the whole answer."""
    found = set(constraint.allowed or range(SIZE))
    for *before, last in constraint.banned:
        if len(before) <= len(answer) and answer[len(answer) - len(before) :] == before:
            found.discard(last)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_fold_forbids_what_the_whole_answer_forbids(seed: int) -> None:
    rng = random.Random(seed)
    few = range(10, 14)
    banned = tuple(tuple(rng.choices(few, k=rng.randint(1, 4))) for _ in range(3))
    constraint = Constraint(allowed=(*few, 20) if seed % 2 else (), banned=banned)
    steady, answer = Matcher(constraint, VOCABULARY), []
    for _ in range(60):
        assert allowed(steady) == allowed(Matcher(constraint, VOCABULARY, answer)) == expected(constraint, answer)
        answer.append(rng.choice(few))
        steady.take(answer[-1])


def test_lists_and_a_grammar_hold_together() -> None:
    first, second = TOKENIZER.encode("yes")[0], TOKENIZER.encode("no")[0]
    grammar = LLMatcher.grammar_from_regex("(yes|no)")
    plain = allowed(Matcher(Constraint(grammar=grammar), VOCABULARY))
    assert {first, second} <= plain
    assert allowed(Matcher(Constraint(grammar=grammar, allowed=(first, 30)), VOCABULARY)) == {first}
    assert allowed(Matcher(Constraint(grammar=grammar, banned=((first,),)), VOCABULARY)) == plain - {first}
    nothing = Matcher(Constraint(grammar=grammar, allowed=(30,)), VOCABULARY)
    assert allowed(nothing) == set(ENDS) and "no token is left" in nothing.error


def test_a_list_of_allowed_tokens_holds_while_the_model_reasons() -> None:
    matcher = Matcher(Constraint(reasoning_end=(9,), reasoning_max=1, allowed=(9, 30)), VOCABULARY)
    assert allowed(matcher) == {9, 30}
    matcher.take(30)
    assert allowed(matcher) == {9}


def test_times_are_those_of_transformers() -> None:
    """Masks and preferred times together are its processors' logits, behind every place of random answers."""
    end, first = 60, 70  # as in Whisper, texts end below the token that ends the answer
    config = GenerationConfig(eos_token_id=end, no_timestamps_token_id=first - 1, max_initial_timestamp_index=4)
    processors = SuppressTokensAtBeginLogitsProcessor((3, end), 1), WhisperTimeStampLogitsProcessor(config, 1)
    vocabulary, steering, preferred = ToyVocabulary(90, (end,)), tuple((token,) for token in range(end + 1, first)), 0
    constraint = Constraint(banned=steering, not_first=(3, end), times=(first, first + 4))
    for seed in range(200):
        rng = np.random.default_rng(seed)
        matcher, answer = Matcher(constraint, vocabulary), [0]
        for _ in range(16):
            logits = rng.normal(0, rng.choice([0.5, 3.0]), (1, 90)).astype(np.float32)
            logits[:, end + 1 : first] = -np.inf
            wanted = torch.from_numpy(logits.copy())
            for processor in processors:
                wanted = processor(torch.tensor([answer]), wanted)
            mask = vocabulary.mask_of(np.flatnonzero(matcher.allowed()).tolist()).view(np.int32)[None]
            given = Allowed(np.array([0]), np.array([0]), mask, firsts=np.array([first]))
            found = torch.from_numpy(logits)
            keep_allowed(found, given._replace(rows=torch.tensor([0]), places=torch.tensor([0]), masks=torch.from_numpy(mask)))
            preferred -= int((found[0, :first] > -torch.inf).any())
            prefer_times(found, given)
            preferred += int((found[0, :first] > -torch.inf).any())
            assert torch.equal(found, wanted), (seed, answer)
            answer.append(int(rng.choice(np.flatnonzero(found[0] > -torch.inf))))
            if answer[-1] == end:
                break
            matcher.take(answer[-1])
    assert preferred < -100


def test_what_an_answer_has_begun_with_may_stand_in_its_prompt() -> None:
    """For times, banned sequences and what none begins with alike."""
    constraint = Constraint(banned=((3, 4), (5,)), not_first=(6,), times=(70, 74))
    for answer in ((), (70,), (71, 3), (71, 3, 72), (71, 3, 72, 72, 8, 3)):
        whole = Matcher(constraint, ToyVocabulary(90, (60,)), answer)
        for size in range(len(answer) + 1):
            begun = msgspec.structs.replace(constraint, begun=answer[:size])
            assert allowed(Matcher(begun, ToyVocabulary(90, (60,)), answer[size:])) == allowed(whole)


def test_words_become_sequences_at_a_beginning_and_after_a_space() -> None:
    found = banned_sequences(["module", " module", "the import statement"], TOKENIZER)
    plain, spaced = (tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("module", " module"))
    assert plain in found and len(found) == len(set(found))
    assert (spaced in found) == (len(spaced) == len(plain) and spaced[0] != plain[0])
    assert tuple(TOKENIZER.encode("the import statement", add_special_tokens=False)) in found


def test_an_engine_core_refuses_what_no_answer_can_keep() -> None:
    config = SchedulerConfig(
        block_size=16, page_count=64, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512, vocab_size=100, eos_token_ids=(1,)
    )  # fmt: skip

    def refusal(constraint: Constraint, **changes: int) -> str | None:
        return constraint_refusal(config, Sampling(seed=0, max_tokens=5, **changes), constraint)

    assert refusal(Constraint(allowed=(1, 99), banned=((5, 6),))) is None
    assert "100 of allowed_token_ids" in refusal(Constraint(allowed=(100,)))
    assert "-1 of bad_words" in refusal(Constraint(banned=((3, -1),)))
    assert "100 of times" in refusal(Constraint(times=(60, 100))) and "-1 of not_first" in refusal(Constraint(not_first=(-1,)))
    assert "times must name" in refusal(Constraint(times=(60,))) and refusal(Constraint(times=(60, 99), not_first=(1,))) is None
    assert "without tokens" in refusal(Constraint(banned=((),)))
    assert "min_tokens forbids them" in refusal(Constraint(allowed=(1,)), min_tokens=2)
