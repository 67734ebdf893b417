"""/v1/completions as the openai package sees it."""

from __future__ import annotations

import openai
import pytest
from edge_server import EOS, TOKENIZER, EdgeServer

from vnext.runtime.protocol.messages import SubmitRequest


def submitted(server: EdgeServer, id_: str) -> list[SubmitRequest]:
    """What the engine core got for one call, in the order of the choices."""
    return [message for message in server.engine.of_kind(SubmitRequest) if message.name.startswith(id_)]


def test_a_completion(server: EdgeServer) -> None:
    answer = server.openai().completions.create(model="toy", prompt="say:hello 中😀", max_tokens=50, temperature=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("hello 中😀", "stop", 0, None)
    assert answer.object == "text_completion" and answer.model == "toy" and answer.id.startswith("cmpl-")
    prompt, reported = len(TOKENIZER.encode("say:hello 中😀")), len(TOKENIZER.encode("hello 中😀")) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, reported)
    assert answer.usage.total_tokens == prompt + reported
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_the_defaults(server: EdgeServer) -> None:
    status, answer, _ = server.post("/v1/completions", {"prompt": "no end"})
    assert status == 200 and answer["model"] == "toy"
    assert answer["choices"][0]["text"] == "x" * 16 and answer["choices"][0]["finish_reason"] == "length"
    sampling = submitted(server, answer["id"])[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 16)


def test_sampling_reaches_the_engine(server: EdgeServer) -> None:
    answer = server.openai().completions.create(
        model="other-name",
        prompt="go",
        n=3,
        seed=11,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1.5},
        user="somebody",
        extra_body={
            "top_k": 4, "min_p": 0.1, "stop_token_ids": [9], "min_tokens": 2,
            "priority": -2, "cache_salt": "s",
        },
    )
    assert answer.model == "other-name" and [choice.index for choice in answer.choices] == [0, 1, 2]
    requests = submitted(server, answer.id)
    sampling = requests[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (11, 0.5, 0.9, 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (0.1, 0.2, 0.1)
    assert sampling.logit_bias == ((5, 1.5),) and sampling.stop_token_ids == (9,) and sampling.min_tokens == 2
    assert requests[0].priority == -2 and requests[0].cache_salt == "s"
    assert len({request.sampling.seed for request in requests}) == 3


def test_the_engine_core_draws_the_seed_of_an_unseeded_call(server: EdgeServer) -> None:
    unseeded = server.openai().completions.create(model="toy", prompt="go", n=2)
    seeded = server.openai().completions.create(model="toy", prompt="go", n=2, seed=0)
    assert [request.has_seed for request in submitted(server, unseeded.id)] == [False, False]
    assert [request.has_seed for request in submitted(server, seeded.id)] == [True, True]


@pytest.mark.parametrize(
    "prompt",
    [
        ["say:a", "say:b"],
        [TOKENIZER.encode("say:a"), TOKENIZER.encode("say:b")],
    ],
)
def test_several_prompts(server: EdgeServer, prompt: list) -> None:
    answer = server.openai().completions.create(model="toy", prompt=prompt, n=2, echo=True, seed=3)
    texts = [(choice.index, choice.text) for choice in answer.choices]
    assert texts == [(0, "say:aa"), (1, "say:aa"), (2, "say:bb"), (3, "say:bb")]
    assert len({request.sampling.seed for request in submitted(server, answer.id)}) == 4
    one = len(TOKENIZER.encode("say:a"))
    assert answer.usage.prompt_tokens == 2 * one and answer.usage.completion_tokens == 4 * 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


def test_one_list_of_tokens(server: EdgeServer) -> None:
    answer = server.openai().completions.create(model="toy", prompt=TOKENIZER.encode("say:a"))
    assert [choice.text for choice in answer.choices] == ["a"]


def test_stop_strings_end_the_request(server: EdgeServer) -> None:
    answer = server.openai().completions.create(model="toy", prompt="say:hello world", stop=["o w", "zz"])
    assert answer.choices[0].text == "hell" and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "o w"
    assert answer.usage.completion_tokens == len(TOKENIZER.encode("hello w"))
    assert f"{answer.id}-0" in server.engine.wait_aborts("stop")
    kept = server.openai().completions.create(
        model="toy", prompt="say:hello world", stop="o w", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "hello w"


def test_logprobs(server: EdgeServer) -> None:
    logprobs = server.openai().completions.create(model="toy", prompt="say:hé", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["h", "\ufffd", "\ufffd"] and logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.top_logprobs[0]["h"] == -0.5 and len(logprobs.top_logprobs[0]) == 2
    only_sampled = server.openai().completions.create(model="toy", prompt="say:h", logprobs=0).choices[0].logprobs
    assert only_sampled.top_logprobs == [{"h": -0.5}]


def test_streaming(server: EdgeServer) -> None:
    prompt = "say:hello 中😀!"
    stream = server.openai().completions.create(
        model="toy", prompt=prompt, n=2, stream=True, echo=True, max_tokens=60, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    *spoken, last = chunks
    for index in range(2):
        mine = [chunk.choices[0] for chunk in spoken if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == prompt + "hello 中😀!"
        assert [choice.finish_reason for choice in mine][-1] == "stop"
        assert not any("\ufffd" in choice.text for choice in mine)
        assert len(mine) > 3
    assert all(chunk.usage is None for chunk in spoken)
    whole = server.openai().completions.create(model="toy", prompt=prompt, n=2, max_tokens=60).usage
    assert last.choices == [] and last.usage == whole


def test_streamed_logprobs_and_stop_strings(server: EdgeServer) -> None:
    stream = server.openai().completions.create(
        model="toy", prompt="say:hello world", stream=True, stop="o w", logprobs=1
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == "hell" and choices[-1].finish_reason == "stop"
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert "".join(tokens) == "hello w"
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets == [0, 4, 5]  # of each token, however many of them come in one chunk


def test_end_of_text_can_be_ignored(server: EdgeServer) -> None:
    answer = server.openai().completions.create(
        model="toy", prompt="say:ab", extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert answer.choices[0].text == "ab<|eos|>" and answer.choices[0].finish_reason == "length"
    own = server.openai().completions.create(
        model="toy", prompt="say:ab", extra_body={"stop_token_ids": [TOKENIZER.encode("b")[0]]}
    )
    assert own.choices[0].text == "a" and own.choices[0].stop_reason == TOKENIZER.encode("b")[0] != EOS


@pytest.mark.parametrize(("stream", "prompt"), [(False, ["say:a", "refuse me"]), (True, "refuse me")])
def test_a_refusal_of_the_engine_is_a_bad_request(server: EdgeServer, stream: bool, prompt: str | list[str]) -> None:
    with pytest.raises(openai.BadRequestError, match="no room for 5 tokens: ask for 4"):
        server.openai().completions.create(model="toy", prompt=prompt, stream=stream)


def test_an_unknown_model(server: EdgeServer) -> None:
    with pytest.raises(openai.NotFoundError, match="ask for toy, other-name") as caught:
        server.openai().completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_an_answer_without_a_length_ends_where_the_context_does(server: EdgeServer) -> None:
    """16 tokens are usual; nobody asked for them."""
    length = server.context.bounds.model_length
    for prompt, count in ([5] * (length - 1), 1), ([5] * (length - 20), 16), ([5] * (length - 4), 4):
        status, answer, _ = server.post("/v1/completions", {"prompt": prompt, "ignore_eos": True})
        assert (status, answer["usage"]["completion_tokens"]) == (200, count), answer
    status, answer, _ = server.post("/v1/completions", {"prompt": [5] * (length - 4), "max_tokens": 16})
    assert (status, answer["error"]["param"]) == (400, "max_tokens"), "what is asked for is given or refused"
    assert server.post("/v1/completions", {"prompt": [5] * length})[1]["error"]["param"] == "prompt"
    cut = {"prompt": [5] * (2 * length), "truncate_prompt_tokens": -1}
    assert server.post("/v1/completions", cut)[1]["usage"] == {
        "prompt_tokens": length - 16, "completion_tokens": 16, "total_tokens": length, "prompt_tokens_details": {"cached_tokens": 3}
    }  # fmt: skip


def test_a_stop_for_each_character_of_a_story(server: EdgeServer) -> None:
    names = [f"\nPerson {place}:" for place in range(200)]
    body = {"prompt": "say:Hello\nPerson 199: no", "max_tokens": 40, "stop": names}
    choice = server.post("/v1/completions", body)[1]["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Hello", "\nPerson 199:")
    for stops, words in (["x"] * 257, "stop has 257 entries"), (["x" * 1024] * 17, "stop has 17408 characters: at most 16384"):
        status, answer, _ = server.post("/v1/completions", {"prompt": "a", "stop": stops})
        assert (status, answer["error"]["param"]) == (400, "stop") and words in answer["error"]["message"]
