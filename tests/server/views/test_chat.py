"""/v1/chat/completions as the openai package sees it."""

from __future__ import annotations

import openai
import pytest
from edge_server import TOKENIZER, EdgeServer
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.protocol.sampling_params import SamplingDefaults
from vnext.state.events import unpack_tokens


def user(text: object) -> dict:
    return {"role": "user", "content": text}


def prompt_of(server: EdgeServer, id_: str) -> str:
    found = [message for message in server.engine.of_kind(SubmitRequest) if message.name.startswith(id_)]
    return TOKENIZER.decode(unpack_tokens(found[0].prompt).tolist(), skip_special_tokens=False)


def test_a_conversation(server: EdgeServer) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        user("hi"),
        {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None},
        user([{"type": "text", "text": "now"}, {"type": "text", "text": "say:<b>ok</b>"}]),
    ]
    answer = server.openai().chat.completions.create(model="toy", messages=messages, extra_body={"min_tokens": 0})
    shown = prompt_of(server, answer.id)
    assert shown.startswith("<|bos|><|system|>be kind<|eos|>") and shown.endswith("<|assistant|>")
    assert "<|user|>now\nsay:<b>ok</b><|eos|>" in shown
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content.startswith("<b>ok</b>")
    assert answer.object == "chat.completion" and answer.usage.prompt_tokens == len(TOKENIZER.encode(shown))


def test_an_answer_may_use_the_whole_model_length(server: EdgeServer) -> None:
    answer = server.openai().chat.completions.create(model="toy", messages=[user("no end")])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(server: EdgeServer, field: str) -> None:
    answer = server.openai().chat.completions.create(model="toy", messages=[user("no end")], n=2, **{field: 3})
    assert [choice.message.content for choice in answer.choices] == ["xxx", "xxx"]
    with pytest.raises(openai.BadRequestError, match="600 in the completion") as caught:
        server.openai().chat.completions.create(model="toy", messages=[user("no end")], **{field: 600})
    assert caught.value.param == field


def test_logprobs(server: EdgeServer) -> None:
    answer = server.openai().chat.completions.create(
        model="toy", messages=[user("x")], logprobs=True, top_logprobs=2, max_tokens=2
    )
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("x", -0.5, [0x78]) and second.token == "x"
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -2.0]
    bare = server.openai().chat.completions.create(model="toy", messages=[user("x")], logprobs=True, max_tokens=1)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    assert server.openai().chat.completions.create(
        model="toy", messages=[user("x")], max_tokens=1
    ).choices[0].logprobs is None


def test_streaming(server: EdgeServer) -> None:
    chunks = list(
        server.openai().chat.completions.create(
            model="toy",
            messages=[user("say:hello wörld")],
            stream=True,
            n=2,
            logprobs=True,
            max_tokens=6,
            stream_options={"include_usage": True},
        )
    )
    *spoken, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    for index in range(2):
        mine = [chunk.choices[0] for chunk in spoken if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == "" and mine[0].finish_reason is None
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == "hello wör"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]
        scored = [entry.token for choice in mine if choice.logprobs for entry in choice.logprobs.content]
        assert scored == ["hell", "o", " w", "\ufffd", "\ufffd", "r"]
    assert last.choices == [] and last.usage.completion_tokens == 12


def test_streaming_without_usage_and_with_a_stop_string(server: EdgeServer) -> None:
    chunks = list(
        server.openai().chat.completions.create(model="toy", messages=[user("say:one two")], stream=True, stop=[" t"])
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one"
    assert chunks[-1].choices[0].finish_reason == "stop" and all(chunk.usage is None for chunk in chunks)
    assert f"{chunks[0].id}-0" in server.engine.wait_aborts("stop")


def test_templates_get_their_variables() -> None:
    template = "{{ messages[0].content }}/{{ style }}/{{ reasoning_effort }}/{{ add_generation_prompt }}"
    with EdgeServer(byte_level(template)) as server:
        answer = server.openai().chat.completions.create(
            model="toy",
            messages=[user("a")],
            reasoning_effort="low",
            max_tokens=1,
            extra_body={"chat_template_kwargs": {"style": "plain"}, "add_generation_prompt": False},
        )
        assert prompt_of(server, answer.id) == "a/plain/low/False"


def test_an_answer_continues_the_last_message(server: EdgeServer) -> None:
    messages = [user("hi"), {"role": "assistant", "content": " say:one two "}]
    whole = {"continue_final_message": True}
    answer = server.openai().chat.completions.create(model="toy", messages=messages, extra_body=whole)
    assert prompt_of(server, answer.id).endswith("<|assistant|> say:one two ")
    for body, words in (({**whole, "add_generation_prompt": True}, "leave one out"), (whole, "words to be continued")):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            server.openai().chat.completions.create(model="toy", messages=[user(" ")], extra_body=body)
        assert caught.value.param == "continue_final_message"


def test_a_model_without_a_template() -> None:
    with EdgeServer(byte_level(None)) as server:
        with pytest.raises(openai.BadRequestError, match="has no chat template: use /v1/completions"):
            server.openai().chat.completions.create(model="toy", messages=[user("a")])
        assert server.openai().completions.create(model="toy", prompt="say:a").choices[0].text == "a"


def test_what_the_template_refuses(server: EdgeServer) -> None:
    with pytest.raises(openai.BadRequestError, match="an assistant cannot begin") as caught:
        server.openai().chat.completions.create(model="toy", messages=[{"role": "assistant", "content": "me first"}])
    assert caught.value.param == "messages"


def test_the_model_s_own_defaults_serve_who_does_not_say_otherwise() -> None:
    usual = SamplingDefaults(temperature=0.25, top_k=9, top_p=0.75, repetition_penalty=1.5, max_tokens=7)
    with EdgeServer(sampling_defaults=usual) as server:
        chat = server.openai().chat.completions.create
        silent, spoken = (
            chat(model="toy", messages=[user("x")]),
            chat(model="toy", messages=[user("x")], max_tokens=9, top_p=1),
        )
        long = chat(model="toy", messages=[user("x" * 480)])
        plain = server.openai().completions.create(model="toy", prompt="x")
        found = {request.name[:-2]: request.sampling for request in server.engine.of_kind(SubmitRequest)}
    for answer, expected in ((silent, (0.75, 7)), (spoken, (1.0, 9)), (plain, (0.75, 16))):
        sampling = found[answer.id]
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.25, 9, 1.5)
        assert (sampling.top_p, sampling.max_tokens) == expected
    assert 1 <= found[long.id].max_tokens < 30, "a usual length gives way to the model's"


def test_what_openai_takes_of_a_history() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with EdgeServer(byte_level(source)) as server:
        parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": parts},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": None},
            {"role": "user", "content": "say:x"},
        ]
        status, answer, _ = server.post("/v1/chat/completions", {"messages": messages, "logprobs": False, "top_logprobs": 0})
        assert status == 200 and answer["choices"][0]["logprobs"] is None, answer
        prompt = TOKENIZER.decode(unpack_tokens(server.engine.of_kind(SubmitRequest)[-1].prompt).tolist())
        called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        result = "[user]<tool_response>\n\n</tool_response>"
        assert prompt == f"[user]u[assistant][assistant]a\nb[assistant]no[assistant]{called}{result}[user]say:x"
        for wrong, param in (
            ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
            ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
            ({"messages": messages, "top_logprobs": 1}, "top_logprobs"),
        ):
            status, answer, _ = server.post("/v1/chat/completions", wrong)
            assert (status, answer["error"]["param"]) == (400, param), answer
