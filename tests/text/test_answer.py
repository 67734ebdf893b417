"""Answers: stop tokens and stop strings end them, merged outputs change nothing, every token is counted."""

from __future__ import annotations

from hypothesis import given, strategies as st
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import RequestOutput, TokenLogprobs
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.state.events import pack_tokens
from vnext.text.answer import Answer

TOKENIZER = byte_level()
EOS = 1
LOGPROBS = TokenLogprobs(logprob=-1.0, rank=0, top=())


def output(tokens: list[int], finish: str = "", stop_token: int = -1, scored: bool = False) -> RequestOutput:
    logprobs = (LOGPROBS,) * len(tokens) if scored else ()
    return RequestOutput(
        name="a", tokens=pack_tokens(tokens), finish=finish, stop_token=stop_token, cached_tokens=2, logprobs=logprobs
    )


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_stop_token_is_counted_and_not_shown() -> None:
    for show, text in ((False, "hi"), (True, "hi<|eos|>")):
        params = SamplingParams(include_stop_str_in_output=show, skip_special_tokens=False)
        answer = Answer(TOKENIZER, [], params)
        delta = answer.push(output([*encode("hi"), EOS], "stop", EOS, scored=True))
        assert (delta.text, delta.finish, delta.stop_reason) == (text, "stop", None)
        assert delta.token_count == len(delta.logprobs) == 3 and len(delta.tokens) == 2 + show
        assert answer.cached_token_count == 2


def test_a_stop_token_that_was_asked_for_is_the_reason() -> None:
    (end,) = encode("i")
    for asked, reason in (([end], end), ([end + 1], None)):
        delta = Answer(TOKENIZER, [], SamplingParams(stop_token_ids=asked)).push(output(encode("hi"), "stop", end))
        assert (delta.text, delta.finish, delta.stop_reason) == ("h", "stop", reason)


def test_a_stop_string_drops_what_came_after_it() -> None:
    answer = Answer(TOKENIZER, [], SamplingParams(stop="lo"))
    delta = answer.push(output(encode("hello world"), scored=True))
    assert (delta.text, delta.finish, delta.stop_reason) == ("hel", "stop", "lo")
    assert delta.token_count == len(delta.tokens) == len(delta.logprobs) == len(encode("hello"))


def test_no_stop_string_within_min_tokens() -> None:
    answer = Answer(TOKENIZER, [], SamplingParams(stop="b", min_tokens=3))
    delta = answer.push(output(encode("abbab"), "length"))
    assert (delta.text, delta.finish) == ("abba", "stop")


def test_a_stop_string_that_the_end_completes() -> None:
    answer = Answer(TOKENIZER, [], SamplingParams(stop="\ufffd"))
    delta = answer.push(output(encode("a😀")[:-1], "length"))
    assert (delta.text, delta.finish, delta.stop_reason) == ("a", "stop", "\ufffd")


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = Answer(TOKENIZER, [], SamplingParams(stop="lots"))
    assert answer.push(output(encode("a lot"))).text == "a "
    assert answer.push(output([], "abort")).text == "lot"


@given(text=st.text("ab中😀", max_size=12), stop=st.text("ab中", min_size=1, max_size=2), cuts=st.sets(st.integers(1, 40)))
def test_merging_changes_nothing(text: str, stop: str, cuts: set[int]) -> None:
    tokens = encode(text)
    borders = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    answer = Answer(TOKENIZER, [], SamplingParams(stop=stop))
    out, finish = "", ""
    for start, end in zip(borders, borders[1:]):
        if not finish:
            delta = answer.push(output(tokens[start:end], "length" if end == len(tokens) else ""))
            out, finish = out + delta.text, delta.finish
    at_once = Answer(TOKENIZER, [], SamplingParams(stop=stop)).push(output(tokens, "length"))
    assert (out, finish, answer.token_count) == (at_once.text, at_once.finish, at_once.token_count)
    assert out == text.split(stop)[0]
