"""Tests of LLM: answers keep the order of the prompts and do not depend on batching; errors come before any request is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path

import msgspec
import pytest
from engine_here import engines_here

from vnext import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import SettingsError
from vnext.text.template import ChatTemplate
from vnext.text.tokenizer import banned_sequences

# Nothing here depends on what the model knows: answers do not end by themselves, and special tokens are shown.
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, skip_special_tokens=False)
PROMPTS = ["What is", "The module", "Return a", "import"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(executor="inproc", threads=1, seed=11, log_dir=tmp_path_factory.mktemp("logs")) as engine:
        yield engine


def texts(answers) -> list[str]:
    return [answer.outputs[0].text for answer in answers]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [answer.prompt for answer in answers] == PROMPTS
    assert texts(answers) == [texts(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


def test_text_and_its_tokens_are_the_same_prompt(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("The module")
    (given,) = llm.generate(tokens, GREEDY, use_tqdm=False)
    (asked,) = llm.generate(["The module"], GREEDY, use_tqdm=False)
    assert given.prompt is None
    assert given.prompt_token_ids == asked.prompt_token_ids == tokens
    assert given.outputs == asked.outputs
    for prompt in ({"prompt": "The module"}, {"prompt_token_ids": tokens}):
        assert llm.generate(prompt, sampling_params=GREEDY, use_tqdm=False)[0].outputs == asked.outputs


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=1) for count in (1, 3, 5, 7)]
    answers = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [1, 3, 5, 7]
    assert {answer.outputs[0].finish_reason for answer in answers} == {"length"}


def test_a_pin_outlives_a_flood_and_says_what_gave_way() -> None:
    """The whole of a prompt stays in the cache within the pins' share of the blocks, and nothing of one that asks for nothing."""
    kept, prompts = SamplingParams(max_tokens=1, prompt_cache_retention="5m"), [[at] * 64 for at in (5, 6, 7, 8, 9, 10)]
    with engines_here(), LLM(executor="inproc", threads=1, log="off", num_blocks_override=16, max_model_len=128) as llm:

        def asked(prompt: list[int], params: SamplingParams) -> tuple[int | None, ...]:
            (found,) = llm.generate([prompt], params, use_tqdm=False)
            return found.num_retained_tokens, found.num_unretained_tokens, found.num_cached_tokens

        assert asked(prompts[0], kept) == (64, 0, 0)
        assert [asked(each, GREEDY) for each in prompts[1:]] == [(None, None, 0)] * 5
        assert asked(prompts[0], GREEDY) == (None, None, 48), "a block less than the prompt has"
        assert asked(prompts[1], msgspec.structs.replace(kept, prompt_cache_retention="24h"))[:2] == (64, 0)
        assert asked(prompts[2], kept)[:2] == (0, 64), "the share is full of one that lasts longer"
        with pytest.raises(InvalidRequest, match="it must be 'in_memory', '5m', '1h' or '24h'"):
            asked(prompts[0], SamplingParams(prompt_cache_retention="for ever"))


@pytest.mark.parametrize("value", [-0.0, 1e-300, 1e-46, 1e-40, 1 - 1e-12])
def test_a_value_at_the_edge_of_its_type_leaves_every_digest_equal(value: float, tmp_path: Path) -> None:
    """A rank that differed from the engine core would end the engine: at each step both hash what the batch holds."""
    names = ["min_p", "presence_penalty", "frequency_penalty"]
    names += (["top_p"] if value > 0 else []) + (["repetition_penalty"] if value > 0.01 else [])
    asked = [{"temperature": value}, {"logit_bias": {5: value}}, *({"temperature": 1.0, name: value} for name in names)]
    with engines_here(), LLM(executor="inproc", threads=1, digest_interval=1, log_dir=tmp_path) as llm:
        for each in asked:
            assert llm.generate("The module", msgspec.structs.replace(GREEDY, **each), use_tqdm=False)[0].outputs[0].token_ids


def test_several_answers_to_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=12, temperature=1.5, ignore_eos=True)
    (first,), (second,) = (llm.generate("The", params, use_tqdm=False) for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in first.outputs}) == 4, "answers to one seed share no noise"
    assert first.outputs == second.outputs


def test_unseeded_answers_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    assert len(set(texts(llm.generate(["The"] * 4, params, use_tqdm=False)))) == 4


def test_stop_string_ends_and_is_cut_off(llm: LLM) -> None:
    (whole,) = llm.generate("What is", GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    (cut,) = llm.generate("What is", msgspec.structs.replace(GREEDY, stop=stop), use_tqdm=False)
    output = cut.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text.partition(stop)[0]


def test_logprobs(llm: LLM) -> None:
    (answer,) = llm.generate("What is", msgspec.structs.replace(GREEDY, max_tokens=3, logprobs=2), use_tqdm=False)
    output = answer.outputs[0]
    assert [len(entry) for entry in output.logprobs] == [2, 2, 2]
    best = [entry[token] for entry, token in zip(output.logprobs, output.token_ids)]
    assert [entry.rank for entry in best] == [1, 1, 1], "greedy takes the likeliest"
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in best))
    assert "".join(entry.decoded_token for entry in best) == output.text


def test_no_logprobs_unless_asked(llm: LLM) -> None:
    (answer,) = llm.generate("What is", GREEDY, use_tqdm=False)
    assert answer.outputs[0].logprobs is None
    assert answer.outputs[0].cumulative_logprob is None


def test_beam_search_finds_likelier_answers(llm: LLM) -> None:
    """One beam is the greedy answer; each answer has the log-probabilities that the engine reports for its tokens."""
    greedy = llm.generate(PROMPTS, msgspec.structs.replace(GREEDY, logprobs=0), use_tqdm=False)
    one = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    assert [found.outputs[0].token_ids for found in one] == [found.outputs[0].token_ids for found in greedy]
    several = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=6, max_tokens=8, ignore_eos=True))
    gains = [found.outputs[0].cumulative_logprob - plain.outputs[0].cumulative_logprob for found, plain in zip(several, greedy)]
    assert min(gains) >= 0 and max(gains) > 0
    for found in several:
        sums = [output.cumulative_logprob for output in found.outputs]
        assert sums == sorted(sums, reverse=True) and len({tuple(output.token_ids) for output in found.outputs}) == 6
        for output in found.outputs:
            scored = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs)]
            assert sum(scored) == pytest.approx(output.cumulative_logprob)


def test_chat_is_generate_on_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is Python?"}]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    both = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    streamed = "".join(llm.stream_chat(conversation, GREEDY))
    assert [streamed] * 3 == [one.outputs[0].text, *texts(both)]


def test_a_template_sees_tools_and_variables(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ tools[0].name }} {{ style }}", {})
    monkeypatch.setitem(vars(llm._maker), "template", template)
    conversation, given = [{"role": "user", "content": "say"}], {"style": "plainly"}
    (answer,) = llm.chat(conversation, GREEDY, use_tqdm=False, tools=[{"name": "it"}], chat_template_kwargs=given)
    assert llm.tokenizer.decode(answer.prompt_token_ids) == "say it plainly"


def test_a_stream_may_be_left(llm: LLM) -> None:
    pieces = llm.stream_chat([{"role": "user", "content": "What is Python?"}], SamplingParams(max_tokens=500))
    next(pieces)
    pieces.close()
    assert texts(llm.generate("What is", GREEDY, use_tqdm=False))[0]


def test_a_repeated_prompt_comes_from_the_cache(llm: LLM) -> None:
    tokens = [7, 8, 9] * 16
    llm.generate(tokens, GREEDY, use_tqdm=False)
    assert llm.generate(tokens, GREEDY, use_tqdm=False)[0].num_cached_tokens >= 32


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, methodcaller("__reduce_ex__", 4)], ids=["copy", "deepcopy", "pickle"])
def test_an_engine_is_not_copied(llm: LLM, made: Callable[[object], object]) -> None:
    for each in (llm, AsyncLLM.__new__(AsyncLLM)):
        with pytest.raises(TypeError, match=f"^{type(each).__name__} holds an engine that runs, which is neither pickled nor copied: make"):
            made(each)


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[]], GREEDY, "no tokens"),
        ([[10**6]], GREEDY, "token ids lie between 0 and"),
        (["a", "b"], [GREEDY], "2 prompts and 1 sampling_params"),
        (["a"], SamplingParams(stop_token_ids=[10**6]), "stop_token_ids names token 1000000"),
        ([{"prompt": "a", "multi_modal_data": 1}], GREEDY, 'A prompt with multi_modal_data is {"prompt": a text'),
        ([{"prompt": "a", "multi_modal_data": {"image": b""}}], GREEDY, "This model reads no images"),
        ([[5] * 4000], GREEDY, "4000 in the prompt"),
    ],
)
def test_a_bad_request_is_refused_before_it_is_sent(llm: LLM, prompts, params, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompts, params, use_tqdm=False)


def test_bad_settings_start_nothing() -> None:
    with pytest.raises(SettingsError, match="did you mean max_num_seqs"):
        LLM(max_num_seq=3)


def test_one_seed_gives_one_run(tmp_path: Path) -> None:
    """Unseeded requests root their keys in the engine's seed."""
    params = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)

    def run() -> list[str]:
        with engines_here(), LLM(executor="inproc", threads=1, seed=3, log="off", log_dir=tmp_path) as engine:
            return texts(engine.generate(PROMPTS, params, use_tqdm=False))

    assert run() == run()


def test_close_ends_the_engine_and_may_be_repeated(tmp_path: Path) -> None:
    llm = LLM(executor="inproc", threads=1, log="off", log_dir=tmp_path)
    process = llm._engine.engines[0].child.process
    llm.close()
    llm.close()
    assert process.poll() is not None


def test_lists_of_allowed_tokens_and_bad_words(llm: LLM) -> None:
    """The tokens of a word that the model would write do not come; with few tokens allowed, no other does."""
    plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    def holds(answers, word: str) -> bool:
        ids = [answer.outputs[0].token_ids for answer in answers]
        sequences = [list(each) for each in banned_sequences([word], llm.tokenizer)]
        return any(each[at : at + len(one)] == one for each in ids for one in sequences for at in range(len(each)))

    words = {word for text in texts(plain) for word in text.split() if holds(plain, word)}
    assert words
    changed = llm.generate(PROMPTS, msgspec.structs.replace(GREEDY, bad_words=[*words]), use_tqdm=False)
    assert not any(holds(changed, word) for word in words)
    few = msgspec.structs.replace(GREEDY, allowed_token_ids=[40, 41, 42])
    assert {token for each in llm.generate(PROMPTS, few, use_tqdm=False) for token in each.outputs[0].token_ids} <= {40, 41, 42}


def test_a_prompt_is_scored(llm: LLM) -> None:
    """max_tokens 0 gives the scores alone; a prompt that was in the cache, and a greedy answer's own tokens, score the same."""
    params = msgspec.structs.replace(GREEDY, max_tokens=12, logprobs=2)
    (answer,) = llm.generate([7, 8, 9] * 16, params, use_tqdm=False)
    tokens = answer.prompt_token_ids + answer.outputs[0].token_ids
    (only,) = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=2), use_tqdm=False)
    assert only.outputs[0].token_ids == [] and only.outputs[0].finish_reason == "length" and only.num_cached_tokens == 0
    assert only.prompt_logprobs[0] is None and len(only.prompt_logprobs) == len(tokens)
    for given, scored in zip(answer.outputs[0].logprobs, only.prompt_logprobs[len(answer.prompt_token_ids) :], strict=True):
        assert {token: entry.rank for token, entry in given.items()} == {token: entry.rank for token, entry in scored.items()}
        assert [each.logprob for each in scored.values()] == pytest.approx([each.logprob for each in given.values()], abs=1e-4)
    assert answer.prompt_logprobs is None


def test_prompts_are_embedded(llm: LLM) -> None:
    both = llm.embed(["The module", [5, 6]], dimensions=8)
    assert [len(each.outputs.embedding) for each in both] == [8, 8] and both[1].prompt_token_ids == [5, 6]
    assert sum(value**2 for value in both[0].outputs.embedding) == pytest.approx(1.0)
    mean, last = (llm.embed("The module", pooling=pooling, normalize=False)[0].outputs.embedding for pooling in ("mean", "last"))
    assert mean != last and last == llm.embed("The module", normalize=False)[0].outputs.embedding
    for wrong, words in (({"pooling": "median"}, "it must be one of last, mean, cls, max"), ({"dimensions": 0}, "between 1 and")):
        with pytest.raises(InvalidRequest, match=words):
            llm.embed("The module", **wrong)
    with pytest.raises(InvalidRequest, match="0 with prompt_logprobs"):
        llm.generate("The module", SamplingParams(max_tokens=0), use_tqdm=False)
