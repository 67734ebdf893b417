"""What programs pass: one sentence that names the argument for each wrong type, and dictionaries, arrays, iterators where they are clear."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_here import engines_here

from vnext import LLM, AsyncLLM, BeamSearchParams, InvalidRequest, LoRARequest, SamplingParams, StructuredOutputsParams
from vnext.api.program_input import MARKS, Sound, Video, as_conversations
from vnext.server.context.conversation import content_of, images_of
from vnext.server.context.openai_types import ChatMessage
from vnext.text.template import ChatTemplate

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "What is Python?"}
CHOICE = {"choice": ["yes", "no"]}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with engines_here(), LLM(executor="inproc", threads=1, seed=11, log="off", log_dir=tmp_path_factory.mktemp("logs")) as engine:
        yield engine


def ask(prompts: Any, params: Any = GREEDY, **more: Any) -> Callable[[LLM], Any]:
    return lambda llm: llm.generate(prompts, params, False, **more)


def chat(messages: Any, **more: Any) -> Callable[[LLM], Any]:
    return lambda llm: llm.chat(messages, GREEDY, False, **more)


def one(call: str, *arguments: Any, **more: Any) -> Callable[[LLM], Any]:
    return lambda llm: getattr(llm, call)(*arguments, **more)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ask(5), "prompts is an int: give a text, token ids"),
        (ask(None), "prompts is None: give a text"),
        (ask(b"text"), "prompts is a bytes: give a text"),
        (ask([None]), r"prompts\[0\] is None: give a text"),
        (ask(["a", 5]), r"prompts\[1\] is an int: give a text"),
        (ask([1, "a"]), r"prompts\[1\] is a str: token ids are whole numbers"),
        (ask([[7], [1.5]]), r"prompts\[1\]\[0\] is a float: token ids are whole numbers"),
        (ask(["a", ""]), r"^prompts\[1\] has no tokens: a request needs at least one.$"),
        (ask(""), "^The prompt has no tokens"),
        (one("embed", ["a", "b", ""]), r"^prompts\[2\] has no tokens"),
        (one("score", ["a", "b"], ["a", ""]), r"^answers\[1\] has no tokens"),
        (ask([True]), r"prompts\[0\] is a bool: token ids are whole numbers"),
        (ask({"prompt": 5}), "prompt is an int: give a text"),
        (ask({"prompt_token_ids": ["a"]}), r"prompt_token_ids\[0\] is a str: token ids"),
        (ask({"prompt": "a", "more": 1}), "has the keys 'prompt', 'more'"),
        (ask("a", "greedy"), "sampling_params is a str: give SamplingParams"),
        (ask("a", 5), "sampling_params is an int: give SamplingParams"),
        (ask("a", [5]), r"sampling_params\[0\] is an int: give SamplingParams"),
        (ask("a", BeamSearchParams(beam_width=2)), "sampling_params is a BeamSearchParams: give SamplingParams"),
        (ask("a", {"temprature": 0}), "sampling_params has 'temprature', which .* did you mean temperature?"),
        (ask("a", {"temperature": "hot"}), "temperature has a wrong type"),
        (ask(["a", "b"], [{}]), "2 prompts and 1 sampling_params"),
        (ask("a", {"structured_outputs": "yes"}), "structured_outputs has a wrong type"),
        (ask("a", {"structured_outputs": {"type": "object"}}), "structured_outputs has 'type', .* its fields are json, regex"),
        (ask("a", {"structured_outputs": {"choice": "yes"}}), "choice has a wrong type"),
        (ask("a", lora_request="sql"), "lora_request is a str: give LoRARequest"),
        (ask("a", lora_request=[5]), r"lora_request\[0\] is an int: give LoRARequest"),
        (ask("a", lora_request={"name": "sql"}), "lora_request has 'name', which LoRARequest does not know"),
        (ask("a", lora_request={"lora_path": "x"}), "lora_request cannot be LoRARequest: missing required argument 'lora_name'"),
        (chat("hello"), "messages is a text: give a list .* or use generate"),
        (chat(5), "messages is an int: give a list"),
        (chat(None), "messages is None: give a list"),
        (chat(["hello"]), r"messages\[0\] is a str: give"),
        (chat([[USER], ["hello"]]), r"messages\[1\]\[0\] is a str: give"),
        (chat([{"content": "hello"}]), r"messages\[0\] has no role: give"),
        (chat([USER, {"role": 5, "content": "hello"}]), r"messages\[1\] has an int as its role"),
        (chat([{"role": "user", "content": 5}]), r"messages\[0\].content is an int"),
        (chat([{"role": "user", "content": [{"type": "image_url"}]}]), r"messages\[0\].content\[0\].image_url is missing: it is"),
        (chat([USER, {"role": "user", "content": ["words"]}]), r"messages\[1\].content\[0\] is a str: give"),
        (chat([USER], tools="search"), "tools is a str: give a list of dictionaries"),
        (chat([USER], tools=["search"]), r"tools\[0\] is a str: give a dictionary"),
        (chat([USER], chat_template_kwargs=["x"]), "chat_template_kwargs is a list: give a dictionary"),
        (lambda llm: next(llm.stream_chat("hello")), "messages is a text"),
        (lambda llm: next(llm.stream_chat([[USER], [USER]])), "messages has 2 conversations: give one"),
        (one("embed", 5), "prompts is an int"),
        (one("embed", "a", dimensions="all"), "dimensions is a str: it must be a whole number"),
        (one("embed", "a", pooling=5), "pooling is 5"),
        (one("score", 5, "a"), "prompts is an int"),
        (one("score", "a", None), "answers is None"),
        (one("score", "a", [[None]]), r"answers\[0\]\[0\] is None: token ids"),
        (one("beam_search", "a", None), "params is None: give BeamSearchParams"),
        (one("beam_search", "a", GREEDY), "params is a SamplingParams: give BeamSearchParams"),
        (one("beam_search", "a", {}), "params cannot be BeamSearchParams: missing required argument 'beam_width'"),
        (one("beam_search", "a", {"beam_width": "x"}), "beam_width has a wrong type"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_one_sentence(llm: LLM, call: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        call(llm)
    assert isinstance(refused.value, ValueError) and "\n" not in str(refused.value)


def test_what_is_clear_is_taken(llm: LLM) -> None:
    """The same answers as from the usual types."""
    expected = llm.generate(["The module", "import"], GREEDY, False)
    ids = [each.prompt_token_ids for each in expected]
    as_dict = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    for prompts in (iter(["The module", "import"]), ("The module", "import"), [np.array(each) for each in ids], ids,
                    [{"prompt": "The module"}, {"prompt_token_ids": np.array(ids[1])}]):  # fmt: skip
        found = llm.generate(prompts, as_dict, False)
        assert [each.outputs for each in found] == [each.outputs for each in expected]
        assert all(type(token) is int for each in found for token in each.prompt_token_ids)
    assert llm.generate(np.array(ids[0]), [as_dict], False)[0].outputs == expected[0].outputs
    (whole,) = llm.chat([USER], GREEDY, False)
    for messages in (USER, (USER,), [[USER]], iter([USER])):
        assert llm.chat(messages, as_dict, False)[0].outputs == whole.outputs
    assert llm.beam_search("a", {"beam_width": 2})[0].outputs == llm.beam_search("a", BeamSearchParams(beam_width=2))[0].outputs


@pytest.mark.parametrize("params", [SamplingParams(structured_outputs=CHOICE), {"structured_outputs": CHOICE},
                                    {"structured_outputs": StructuredOutputsParams(**CHOICE)}])  # fmt: skip
def test_a_shape_as_a_dictionary(llm: LLM, params: Any) -> None:
    answers = llm.generate(["Is it? ", "Really? "], params, False)
    assert {answer.outputs[0].text for answer in answers} <= {"yes", "no"}


def test_an_adapter_as_a_dictionary(llm: LLM) -> None:
    """It gets as far as the struct does."""
    for adapter in ({"lora_name": "sql", "lora_path": "x"}, LoRARequest("sql", 1, "x")):
        with pytest.raises(InvalidRequest, match="This engine serves no adapters"):
            llm.generate("a", GREEDY, False, adapter)


def test_async_calls_take_one_prompt(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(executor="inproc", threads=1, log="off", log_dir=tmp_path) as engine:
            for stream, words in (
                (engine.generate(["a", "b"]), r"prompt\[0\] is a str: token ids"),
                (engine.generate(5), "prompt is an int: give a text"),
                (engine.generate("a", "greedy"), "sampling_params is a str"),
                (engine.chat("hello"), "messages is a text"),
                (engine.chat([[USER], [USER]]), "messages has 2 conversations"),
            ):
                with pytest.raises(InvalidRequest, match=words):
                    await anext(stream)
            last = [each async for each in engine.generate(np.array([7, 8]), {"max_tokens": 2, "ignore_eos": True})][-1]
            assert last.prompt_token_ids == [7, 8] and len(last.outputs[0].token_ids) == 2

    with engines_here():
        asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature is -1: it must lie between 0 and"),
        ({"temperature": "hot"}, "temperature has a wrong type: expected `float`, got `str`"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 2}, "top_p is 2"),
        ({"n": 0}, "n is 0"),
        ({"n": 2.0}, "n has a wrong type"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 20}, "min_tokens is 20: .* which is 16"),
        ({"stop": [""]}, "stop holds a string of 0 characters"),
        ({"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 is 101"),
        ({"bad_words": " "}, "bad_words has a wrong type"),
        ({"prompt_cache_retention": "for ever"}, "prompt_cache_retention is 'for ever'"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs has 'choices', .* did you mean choice?"),
        ({"structured_outputs": {"json": 5}}, "json has a wrong type"),
        ({"structured_outputs": StructuredOutputsParams(json=5)}, "json has a wrong type"),
        ({"structured_outputs": "yes"}, "structured_outputs has a wrong type"),
    ],
)  # fmt: skip
def test_parameters_are_checked_as_they_are_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**fields)
    with pytest.raises(InvalidRequest, match=words):
        msgspec.structs.replace(SamplingParams(), **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"beam_width": 0}, "beam_width is 0"), ({"beam_width": "x"}, "beam_width has a wrong type"),
     ({"beam_width": 2, "length_penalty": 99}, "length_penalty is 99")],
)  # fmt: skip
def test_beams_are_checked_as_they_are_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        BeamSearchParams(**fields)


def test_parameters_survive_a_copy() -> None:
    params = SamplingParams(temperature=0.5, structured_outputs=CHOICE, stop="x")
    assert params.structured_outputs == StructuredOutputsParams(**CHOICE)
    assert copy.deepcopy(params) == copy.copy(params) == params
    assert SamplingParams(**msgspec.structs.asdict(params)) == params


TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "roles", "written"),
    [
        (TURNS, "system user", "[user]a\n\nb"),
        (TURNS, "user user assistant user", "[user]a\n\nb[assistant]c[user]d"),
        (TURNS, "user developer", "[user]b\n\na"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "developer user", "[system]a[user]b"),
    ],
)
def test_a_conversation_s_roles_are_arranged_as_at_the_http_door(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, source: str, roles: str, written: str
) -> None:
    monkeypatch.setitem(vars(llm._maker), "template", ChatTemplate(source, {}))
    messages = [{"role": role, "content": [{"type": "text", "text": "abcd"[at]}]} for at, role in enumerate(roles.split())]
    assert llm.get_tokenizer().apply_chat_template(messages, tokenize=False) == written
    assert messages[0]["content"][0]["text"] == "a", "what a program passes stays as it is"


def test_parts_become_the_text_that_the_server_makes() -> None:
    text, image = {"type": "text", "text": "words"}, {"type": "image_url", "image_url": {"url": "data:,"}}
    video = {"type": "video_url", "video_url": {"url": "data:,"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    for parts in itertools.product((text, image, video, sound), repeat=4):
        [found] = as_conversations([{"role": "user", "content": list(parts)}])
        message = msgspec.convert({"role": "user", "content": list(parts)}, ChatMessage)
        assert found.messages[0]["content"] == content_of(message, "", MARKS)
        given = [(name, {Video: "video", Sound: "audio"}.get(type(image), "image")) for name, image in found.images]
        assert given == [(name, kind) for _, name, kind in images_of([message])]


@pytest.mark.parametrize(
    ("kind", "field", "words"),
    [
        (SamplingParams, "max_token", "SamplingParams has no field max_token: did you mean max_tokens?"),
        (SamplingParams, "stops", "SamplingParams has no field stops: did you mean stop?"),
        (BeamSearchParams, "beam_widths", "BeamSearchParams has no field beam_widths: did you mean beam_width?"),
        (StructuredOutputsParams, "jso", "StructuredOutputsParams has no field jso: did you mean json?"),
        (LoRARequest, "path", "LoRARequest has no field path: its fields are lora_name, lora_int_id, lora_path."),
    ],
)
def test_an_unknown_field_names_the_one_that_is_meant(kind: type[msgspec.Struct], field: str, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{field: 1})
    assert str(caught.value) == words
    with pytest.raises(TypeError, match="[Mm]issing required argument"):
        BeamSearchParams(max_tokens=3)
