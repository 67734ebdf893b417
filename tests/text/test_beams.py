"""Beam search against a search of everything: a toy model of three tokens, whose next token depends on the last one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest, TokenLogprobs
from vnext.runtime.protocol.sampling_params import BeamSearchParams
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Constraint
from vnext.text.beams import BeamSearch, TranscriptSearch

END, VOCABULARY = 2, 3
PROMPT = [0, 1, 1]
NEXT = {0: (0.5, 0.3, 0.2), 1: (0.15, 0.45, 0.4), 2: (0.5, 0.25, 0.25)}
"""Last token -> probabilities of the next one."""


def answer(request: SubmitRequest) -> RequestOutput:
    """What an engine reports for one token of a beam."""
    assert request.sampling.max_tokens == 1 and request.sampling.ignore_eos
    last = unpack_tokens(request.prompt).tolist()[-1]
    ranked = sorted(((token, math.log(p)) for token, p in enumerate(NEXT[last])), key=lambda pair: -pair[1])
    top = tuple(ranked[: request.sampling.logprobs])
    found = TokenLogprobs(logprob=top[0][1], rank=0, top=top)
    return RequestOutput(name=request.name, tokens=b"\0\0\0\0", finish="length", logprobs=(found,), cached_tokens=2)


def run(params: BeamSearchParams, ends: tuple[int, ...] = (END,)) -> tuple[list[RequestOutput], int]:
    """The best answers, and how many steps they took."""
    search, steps = BeamSearch("name", pack_tokens(PROMPT), params, ends), 0
    while requests := search.requests():
        steps += 1
        for request in reversed(requests):
            search.push(answer(request))
    return search.best(params.beam_width), steps


def all_answers(length_max: int) -> list[tuple[int, ...]]:
    """Every answer that ends, or has the largest length without having ended."""
    whole = [found for length in range(1, length_max + 1) for found in itertools.product(range(VOCABULARY), repeat=length)]
    return [found for found in whole if END not in found[:-1] and (found[-1] == END or len(found) == length_max)]


def score(found: tuple[int, ...], penalty: float) -> float:
    chain = [PROMPT[-1], *found]
    total = sum(math.log(NEXT[one][other]) for one, other in itertools.pairwise(chain))
    return total / (len(PROMPT) + len(found) - (found[-1] == END)) ** penalty


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_wide_search_finds_the_best_answers_of_all(penalty: float, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is wider than clients may ask for."""
    monkeypatch.setattr("vnext.runtime.protocol.sampling_params.BEAM_WIDTH_MAX", 2**length)
    params = BeamSearchParams(beam_width=2**length, max_tokens=length, length_penalty=penalty)
    best = sorted(all_answers(length), key=lambda found: score(found, penalty), reverse=True)[: 2**length]
    found = [tuple(unpack_tokens(output.tokens).tolist()) for output in run(params)[0]]
    assert [score(each, penalty) for each in found[: len(best)]] == pytest.approx([score(each, penalty) for each in best])


def test_an_answer_is_reported_as_an_engine_would() -> None:
    [output, *_], _ = run(BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0.0))
    tokens = unpack_tokens(output.tokens).tolist()
    assert (tokens, output.finish, output.stop_token, output.cached_tokens) == ([END], "stop", END, 2)
    assert [each.logprob for each in output.logprobs] == [pytest.approx(math.log(0.4))] and output.logprobs[0].rank == 1


def test_without_ends_every_answer_has_the_full_length() -> None:
    outputs, steps = run(BeamSearchParams(beam_width=2, max_tokens=4), ends=())
    assert steps == 4 and {output.finish for output in outputs} == {"length"}
    assert all(len(output.tokens) == 16 and output.stop_token == -1 for output in outputs)


def test_a_search_ends_as_soon_as_nothing_can_change() -> None:
    """And a long bound changes no answer."""
    short, steps = run(BeamSearchParams(beam_width=2, max_tokens=20, length_penalty=0.0))
    assert steps < 20 and short == run(BeamSearchParams(beam_width=2, max_tokens=200, length_penalty=0.0))[0]


def test_an_ended_answer_waits_for_a_longer_one_that_may_still_pass_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token ends the answer; the other way begins badly and then costs next to nothing."""
    monkeypatch.setitem(NEXT, 1, (0.3, 0.1, 0.6))
    monkeypatch.setitem(NEXT, 0, (0.99, 0.005, 0.005))
    [best], steps = run(BeamSearchParams(beam_width=1, max_tokens=20))
    assert unpack_tokens(best.tokens).tolist() == [0] * 20 and steps == 20


def test_an_aborted_request_ends_the_search() -> None:
    search = BeamSearch("name", pack_tokens(PROMPT), BeamSearchParams(beam_width=1, max_tokens=3), (END,))
    [request] = search.requests()
    search.push(RequestOutput(name=request.name, tokens=b"", finish="abort"))
    assert search.requests() == [] and [output.finish for output in search.best(1)] == ["abort"]


# ---- transcripts -----------------------------------------------------------------------------------------------------


def drawn_model(seed: int) -> Callable[[tuple[int, ...]], list[float]]:
    """Log-probabilities of seven tokens behind others; one may not come."""

    def after(tokens: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{seed} {tokens}")
        weights = [draw.random() ** 3 for _ in range(7)]
        weights[draw.randrange(7)] = 0.0
        return [math.log(each / sum(weights)) if each else -math.inf for each in weights]

    return after


def as_whisper_does(after: Callable[[tuple[int, ...]], list[float]], width: int, length: int, end: int = END) -> tuple[int, ...]:
    """The answer of Whisper's BeamSearchDecoder and MaximumLikelihoodRanker, read anew."""
    live, ended = {(): 0.0}, dict[tuple[int, ...], float]()
    for _ in range(length):
        scores = {(*tokens, token): total + each for tokens, total in live.items() for token, each in enumerate(after(tokens))}
        live, newly = {}, dict[tuple[int, ...], float]()
        for tokens in sorted(scores, key=scores.__getitem__, reverse=True):
            if math.isinf(scores[tokens]) or len(live) == width:
                break
            (newly if tokens[-1] == end else live)[tokens] = scores[tokens]
        for tokens in newly:
            if len(ended) < width:
                ended[tokens] = newly[tokens]
        if len(ended) == width:
            break
    found = ended if len(ended) == width else ended | live
    return max(found, key=lambda tokens: found[tokens] / max(1, len(tokens) - (tokens[-1] == end)))


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_transcript_is_the_one_that_whisper_finds(width: int) -> None:
    lengths = set()
    for seed in range(100):
        after, params = drawn_model(seed), BeamSearchParams(beam_width=width, max_tokens=9)
        search = TranscriptSearch("name", pack_tokens(PROMPT), params, (END,), "salt", Constraint(judged=True))
        while requests := search.requests():
            for request in requests:
                tokens = tuple(unpack_tokens(request.prompt).tolist())[len(PROMPT) :]
                assert request.sampling.constraint == Constraint(judged=True, begun=tokens) and request.cache_salt == "salt"
                ranked = sorted(enumerate(after(tokens)), key=lambda pair: -pair[1])[: request.sampling.logprobs]
                found = TokenLogprobs(logprob=ranked[0][1], rank=0, top=tuple(ranked))
                search.push(RequestOutput(name=request.name, tokens=b"\0\0\0\0", finish="length", logprobs=(found,)))
        [best] = search.best(1)
        tokens = tuple(unpack_tokens(best.tokens).tolist())
        assert tokens == as_whisper_does(after, width, 9), seed
        assert sum(each.logprob for each in best.logprobs) == pytest.approx(sum(after(tokens[:at])[token] for at, token in enumerate(tokens)))
        lengths.add(len(tokens))
    assert len(lengths) > 4
