"""What a body asks of the answer's shape reaches the engine as a grammar, by each of its names; what contradicts is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from edge_server import EdgeServer
from llguidance import LLMatcher

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.protocol.sampling_params import StructuredOutputsParams
from vnext.server.context.structure import RECENT_BYTES_MAX, RECENT_MAX, Grammars
from vnext.server.context.text_work import TextWork
from vnext.text.structured.asked import Asked
from vnext.text.structured.grammar import LIMITS, vocabulary

PATHS = ("/v1/completions", "/v1/chat/completions")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAGS = {"structures": [{"begin": "<f>", "schema": POINT, "end": "</f>"}], "triggers": ["<f"]}
LARK = 'start: "a" start | "b"'


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return ({"prompt": "say:ok"} if "chat" not in path else {"messages": [{"role": "user", "content": "say:ok"}]}) | fields


def grammars(server: EdgeServer, path: str, **fields: Any) -> list[str]:
    """Those of the requests that reach the engine."""
    server.engine.received.clear()
    status, answer, _ = server.post(path, body_of(path, **fields))
    assert status == 200, answer
    return [each.sampling.constraint.grammar for each in server.engine.of_kind(SubmitRequest)]


def admits(grammar: str, text: str) -> bool:
    matcher = LLMatcher(vocabulary(), grammar, limits=LIMITS, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "1"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}},
            '{"x": 1}',
            "{}",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": POINT, "strict": False}}}, '{"x": 1}', "{}"),
        ({"response_format": {"type": "structural_tag"} | TAGS}, 'so <f>{"x": 1}</f>', "<f>1</f>"),
        ({"structured_outputs": {"json": POINT}}, '{"x": 1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(POINT), "disable_any_whitespace": True}}, '{"x":1}', '{"x": 1}'),
        ({"structured_outputs": {"regex": "[ab]+"}, "response_format": {"type": "text"}}, "abba", "c"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "a", "ab"),
        ({"structured_outputs": {"grammar": LARK}}, "aab", "a"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"structured_outputs": {"structural_tag": TAGS}}, "so", "<f>1</f>"),
        ({"guided_json": POINT, "guided_decoding_backend": "xgrammar"}, '{"x": 1}', "{}"),
        ({"guided_json": POINT, "guided_whitespace_pattern": "[ ]?"}, '{"x": 1}', '{"x":  1}'),
        ({"guided_json_object": True}, "{}", "[]"),
        ({"guided_regex": "[ab]+"}, "abba", "c"),
        ({"guided_choice": ["a", "b"]}, "a", "ab"),
        ({"guided_grammar": LARK}, "aab", "a"),
        ({"structural_tag": json.dumps(TAGS)}, "so", "<f>1</f>"),
    ],
)
def test_the_engine_gets_a_grammar(server: EdgeServer, path: str, fields: dict[str, Any], good: str, bad: str) -> None:
    [first, second] = grammars(server, path, n=2, **fields)
    assert first == second and admits(first, good) and not admits(first, bad)


@pytest.mark.parametrize("path", PATHS)
def test_free_text_has_no_constraint(server: EdgeServer, path: str) -> None:
    server.engine.received.clear()
    nothing = {
        "response_format": {"type": "text"},
        "structured_outputs": None,
        "guided_json": None,
        "guided_json_object": False,
    }
    assert server.post(path, body_of(path, **nothing))[0] == 200
    assert [each.sampling.constraint for each in server.engine.of_kind(SubmitRequest)] == [None]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
            "The request has response_format and guided_regex: an answer follows one of them, leave the others out.",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs has none of its kinds: set exactly one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "contains unknown field `jsn`"),
        ({"structured_outputs": {"json": {"not": {"type": "null"}}}}, "structured_outputs.json", "the keyword 'not' is not supported, leave it out."),
        ({"guided_json": {"not": {"type": "null"}}}, "guided_json", "guided_json cannot be kept: the keyword 'not' is not supported, leave it out."),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {"type": "null"}}}}}},
            "response_format.json_schema.schema", "response_format.json_schema.schema cannot be kept at items: the keyword 'not' is",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema.schema is missing"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "contains unknown field `schema`"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml': it must be text, json_object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "it is an object with 'structures'"),
        ({"guided_regex": "a", "use_beam_search": True}, "use_beam_search", "use_beam_search cannot be combined with guided_regex"),
        ({"guided_choice": [1]}, "guided_choice[0]", "guided_choice[0] is wrong"),
        ({"regex": "a"}, "regex", "regex is not supported here: send structured_outputs.regex."),
    ],
)  # fmt: skip
def test_it_is_refused_in_one_sentence(
    server: EdgeServer, path: str, fields: dict[str, Any], param: str, sentence: str
) -> None:
    status, answer, _ = server.post(path, body_of(path, **fields))
    assert status == 400 and sentence in answer["error"]["message"] and answer["error"]["param"] == param, answer


def test_others_are_answered_while_a_grammar_compiles(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> str:
        begun.set()
        assert go_on.wait(60)
        return "start: /a/"

    monkeypatch.setattr("vnext.server.context.structure.grammar_of", slow)
    answers: list[int] = []
    slow_client = threading.Thread(
        target=lambda: answers.append(server.post(PATHS[0], body_of(PATHS[0], guided_regex="never seen before"))[0])
    )
    slow_client.start()
    assert begun.wait(60)
    assert server.post(PATHS[0], body_of(PATHS[0], prompt="say:" + "x" * 300))[0] == 200 and answers == []
    go_on.set()
    slow_client.join(60)
    assert answers == [200]


def asked(value: str) -> Asked:
    return Asked(kind="regex", value=value, path="guided_regex")


def test_a_grammar_is_made_once_and_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        "vnext.server.context.structure.grammar_of",
        lambda asked, _: made.append((asked.value, threading.current_thread())) or f"grammar of {asked.value}",
    )

    async def ask() -> list[str]:
        work = TextWork(10_000)
        grammars = Grammars(None, work)
        found = [await grammars.grammar(asked(value), "client") for value in ("a", "b", "a")]
        for at in range(RECENT_MAX):
            await grammars.grammar(asked(f"other {at}"), "client")
        found.append(await grammars.grammar(asked("a"), "client"))
        assert grammars.size <= RECENT_BYTES_MAX and work.characters == 0
        work.close()
        return found

    assert asyncio.run(ask()) == ["grammar of a", "grammar of b", "grammar of a", "grammar of a"]
    assert [value for value, _ in made if len(value) == 1] == ["a", "b", "a"]
    assert threading.main_thread() not in {thread for _, thread in made}


def test_the_options_belong_to_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests with one schema and other options get grammars of their own."""

    async def ask() -> set[str]:
        work = TextWork(10_000)
        grammars = Grammars(None, work)
        options = (StructuredOutputsParams(), StructuredOutputsParams(disable_any_whitespace=True))
        found = {
            await grammars.grammar(Asked(kind="json_object", value=True, path="", options=each), "client") for each in options
        }
        work.close()
        return found

    assert len(asyncio.run(ask())) == 2
