"""Forced calls: what a grammar lets a model write is a call of an offered tool, with arguments that its schema accepts."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest
from cutting import parts_of, shown
from tokenizers import Tokenizer

import vnext
from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.server.answers.chat_request import CALL_OPTIONS
from vnext.text.dialects.grammar import either
from vnext.text.dialects.table import NAMES
from vnext.text.parts import CallBegun
from vnext.text.structured.asked import Asked
from vnext.text.structured.grammar import grammar_of
from vnext.text.tokenizer import Tokenizer as ModelTokenizer

FILE = Path(vnext.__file__).parent / "demo_model" / "tokenizer.json"
MODEL = ModelTokenizer.load(FILE.parent)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
NESTED = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        "exact": {"type": "boolean"},
    },
    "required": ["unit", "places"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
WORDS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "kind": {"type": "string", "enum": ["a", "b c"]}},
    "required": ["kind"],
}
CHOICE = {
    "anyOf": [
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": False},
    ]
}
SCHEMAS = {"weather": CITY, "measure": NESTED, "note": WORDS, "choose": CHOICE, "now": None}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


@cache
def tokenizers() -> tuple[Tokenizer, llguidance.LLTokenizer]:
    return Tokenizer.from_file(str(FILE)), llguidance.LLTokenizer(FILE.read_text(), eos_token=0)


@cache
def endings() -> np.ndarray:
    """bool[token]: whether its text begins with a mark that ends something."""
    tokenizer, vocabulary = tokenizers()
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(vocabulary.vocab_size)]
    return np.array([text[:1] in '"]}<)\n' for text in texts])


def sample(grammar: str, rng: random.Random) -> str | None:
    """A random answer under a grammar; None where it is long. After some tokens it ends as soon as it may, and prefers marks."""
    tokenizer, vocabulary = tokenizers()
    matcher, tokens = llguidance.LLMatcher(vocabulary, grammar), []
    assert not matcher.is_error(), matcher.get_error()
    close = tokenizer.encode("</parameter>" if "</parameter>" in grammar else "</arg_value>").ids
    while not matcher.is_stopped() and len(tokens) < 1_000:
        if len(tokens) > 80 and matcher.validate_tokens(close) == len(close):  # a free text ends by its mark alone
            assert matcher.consume_tokens(close)
            tokens += close
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        assert len(allowed) and not matcher.is_error(), matcher.get_error()
        if matcher.is_accepting() and allowed[0] == 0 and rng.random() < 0.5:
            break
        allowed = allowed[allowed != 0]
        ending = allowed[endings()[allowed]]
        token = int(rng.choice(ending if len(ending) and rng.random() < min(len(tokens) / 60, 0.9) else allowed))
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode(tokens, skip_special_tokens=False) if len(tokens) < 1_000 else None


@pytest.mark.parametrize("name", sorted({dialect.name for dialect in NAMES.values()}))
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_grammar_allows_is_a_call(name: str, parallel: bool) -> None:
    dialect, rng, seen = NAMES[name], random.Random(4), set()
    grammar = dialect.call_grammar(TOOLS, parallel)
    for _ in range(12):
        text = sample(grammar, rng)
        if text is None:
            continue
        calls = shown(parts_of(dialect, [text], TOOLS))
        assert calls and (parallel or len(calls) == 1), text
        for call in calls:
            assert isinstance(call, tuple) and None not in call, (text, calls)
            jsonschema.validate(json.loads(call[1]), SCHEMAS[call[0]] or {"type": "object", "maxProperties": 0})
            seen.add(call[0])
    assert len(seen) > 2


def test_a_mark_that_is_a_special_token_is_forced_as_that_token() -> None:
    lark = NAMES["hermes"].call_grammar(TOOLS[-1:], False, {"<tool_call>": 1, "</tool_call>": 2})
    assert lark.startswith("start:  call") and '<[1]> "\\n{' in lark and '"}\\n" <[2]>' in lark


def test_a_name_may_hold_any_character() -> None:
    tools = [{"type": "function", "function": {"name": 'a"b\\c', "parameters": None}}]
    text = sample(NAMES["hermes"].call_grammar(tools, False), random.Random(1))
    [(name, arguments)] = shown(parts_of(NAMES["hermes"], [text or ""], tools))
    assert name == 'a"b\\c' and json.loads(arguments) == {}


@pytest.mark.parametrize("name", sorted({dialect.name for dialect in NAMES.values()}))
def test_a_thousand_tools_are_one_grammar(name: str) -> None:
    """The bounds on what a client may write count neither its tools nor their descriptions; equal schemas are read once."""
    described = CITY | {"description": "Long. " * 300}
    tools = [{"type": "function", "function": {"name": f"function_{at}", "parameters": described}} for at in range(1_000)]
    lark = NAMES[name].call_grammar(tools, True)
    asked = Asked(kind="calls", value=lark, path="tools", options=StructuredOutputsParams(whitespace_pattern=" ?"))
    grammar = grammar_of(asked, MODEL)
    assert grammar.count("%json") < 20 < 1_000 <= lark.count("%json") or not lark.count("%json")
    assert sample(grammar, random.Random(1))
    with pytest.raises(InvalidRequest, match="more than|at most"):
        grammar_of(Asked(kind="grammar", value=lark, path="grammar"), MODEL)


def test_different_schemas_stay_apart() -> None:
    schemas = [{"type": "object", "properties": {"a": {"const": at}}, "required": ["a"]} for at in range(3)]
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": each}} for at, each in enumerate(schemas)]
    asked = Asked(kind="calls", value=NAMES["json"].call_grammar(tools, False), path="tools")
    grammar = grammar_of(asked, MODEL)
    for seed in range(9):
        [(called, arguments)] = shown(parts_of(NAMES["json"], [sample(grammar, random.Random(seed)) or ""], tools))
        assert json.loads(arguments) == {"a": int(called[1:])}


WITH_MARKS = sorted({each.name for each in NAMES.values() if each.chosen_grammar(TOOLS)})


def test_which_dialects_tell_a_call_from_words() -> None:
    rest = {each.name for each in NAMES.values()} - {*WITH_MARKS}
    assert rest == {"gemma", "json", "llama3_json", "openai", "pythonic"}


@pytest.mark.parametrize("name", WITH_MARKS)
@pytest.mark.parametrize("special", [False, True])
def test_a_chosen_call_keeps_to_its_schema(name: str, special: bool) -> None:
    """Words come first and after it. A call of an unknown tool is refused at its first wrong character."""
    tokenizer, vocabulary = tokenizers()
    dialect, rng = NAMES[name], random.Random(5)
    marks = {"<tool_call>": 1} if special else {}
    if special and "<tool_call>" not in dialect.opens:
        pytest.skip("its mark is none of the demo model's tokens")
    grammar = dialect.chosen_grammar(TOOLS, marks)
    assert grammar and not llguidance.LLMatcher(vocabulary, grammar).is_error()
    for _ in range(6):
        call = sample(dialect.call_grammar(TOOLS, False, marks), rng)
        if call is None:
            continue
        fine = llguidance.LLMatcher(vocabulary, grammar)
        for part in ("It is < 3 [so] {far}. ", call, "", call, " And on."):
            pieces = [token for token in tokenizer.encode(part, add_special_tokens=False).ids]
            assert fine.validate_tokens(pieces) == len(pieces), (part, call)
            assert fine.consume_tokens(pieces)
        assert fine.is_accepting()
        name_ = next(each for each in SCHEMAS if each in call)
        wrong = tokenizer.encode(call.replace(name_, "nothing", 1), add_special_tokens=False).ids
        assert llguidance.LLMatcher(vocabulary, grammar).validate_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("name", sorted({dialect.name for dialect in NAMES.values()}))
def test_an_answer_may_be_calls_or_keep_a_schema(name: str) -> None:
    """Both can be written to their ends in each dialect, also where both begin with a brace."""
    dialect = next(each for each in NAMES.values() if each.name == name)
    lark = dialect.call_grammar(TOOLS, True, MODEL.special_ids)
    calls = grammar_of(Asked(kind="calls", value=lark, path="tools", options=CALL_OPTIONS), MODEL)
    schema = {"type": "object", "properties": {"name": {"type": "integer"}, "say": {"enum": ["yes", "no"]}}, "required": ["name", "say"]}
    words = grammar_of(Asked(kind="json", value=schema, path="response_format"), MODEL)
    union = either(calls, words)
    _, vocabulary = tokenizers()
    called, rng = 0, random.Random(3)
    for _ in range(12):
        text = sample(union, rng)
        is_word = text is not None and '"say"' in text and jsonschema.validate(json.loads(text), schema) is None
        assert text is None or is_word or any(isinstance(part, CallBegun) for part in parts_of(dialect, [text], TOOLS)), text
        called += not is_word
    answer = vocabulary.tokenize_str('{"name": 3, "say": "yes"}')
    matcher = llguidance.LLMatcher(vocabulary, union)
    assert matcher.try_consume_tokens(answer) == len(answer) and matcher.is_accepting() and called
