"""White space: where a grammar leaves room for it, a model that writes as much as it may gets no further than one indented line."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from test_grammar import TOKENIZER, grammar

from vnext.server.answers.chat_request import CALL_OPTIONS
from vnext.text.dialects.table import NAMES
from vnext.text.structured.asked import Asked
from vnext.text.structured.grammar import LIMITS, grammar_of, vocabulary

SPACE = b" \n\t\r"
FLAG = {"type": "boolean"}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


FLAT = closed(a=FLAG, b={"type": "array", "items": FLAG, "maxItems": 2})
SCHEMAS = {  # and the depth of their values
    "flat": (FLAT, 2),
    "a list": ({"type": "array", "prefixItems": [FLAG, {"type": "null"}], "items": FLAG, "minItems": 3, "maxItems": 4}, 1),
    "a map": ({"type": "object", "patternProperties": {"^[ab]$": FLAG}, "additionalProperties": False}, 1),
    "numbers": (closed(n={"type": "number"}, i={"type": "integer", "minimum": 3}, e={"enum": [1, 2.5]}), 1),
    "beyond 2**53": (closed(a={"const": 2**60 + 1}, b={"type": "array", "items": {"const": 2**60 + 1}, "maxItems": 2}), 2),
    "a reference": (closed(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": closed(b=FLAG)}}, 2),
    "either": ({"anyOf": [FLAT, {"type": "array", "items": FLAG}]}, 2),
    "values": ({"enum": [{"a": [1, {"b": True}]}, [1, [2, None]]]}, 3),
    "a value": ({"const": [[], 1]}, 2),
    "values within": (closed(a={"enum": [{"b": 1}, 2]}), 2),
}


def longest_space(text: str, seed: int, most: int = 60) -> int:
    """Of an answer under a grammar, which is random but for its space: there is nearly always all that may be, up to `most`."""
    rng, matcher, length, longest = random.Random(seed), LLMatcher(vocabulary(), text, limits=LIMITS, log_level=0), 0, 0
    for _ in range(400):
        if matcher.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:256]
        allowed = np.flatnonzero(bits).tolist()
        space, words = [each for each in allowed if each in SPACE], [each for each in allowed if each not in SPACE]
        writes_space = space and length < most and (length > 0 or not words or rng.random() < 0.8)
        ends = [each for each in words if each in b'"}]),:>'] if rng.random() < 0.5 else []
        if not (space if writes_space else words):
            break
        matcher.consume_token(rng.choice(space if writes_space else ends or words))
        length = length + 1 if writes_space else 0
        longest = max(longest, length)
    assert not matcher.is_error(), matcher.get_error()
    return longest


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_gap_holds_one_line_end_and_the_indentation_of_the_deepest_value(name: str) -> None:
    schema, depth = SCHEMAS[name]
    texts = [grammar(json=schema)]
    if name != "beyond 2**53":
        texts.append(grammar(grammar=f'start: "<" %json {json.dumps(schema)} ">"'))
    for text in texts:
        assert max(longest_space(text, seed) for seed in range(8)) == len("\r\n") + 4 * depth


@pytest.mark.parametrize("dialect", {dialect.name: dialect for dialect in NAMES.values()}.values(), ids=lambda each: each.name)
def test_a_call_has_at_most_one_blank_at_a_time(dialect: Any) -> None:
    for name in ("flat", "a map", "beyond 2**53", "a reference", "values within"):
        tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS[name][0]}}]
        asked = Asked(kind="calls", value=dialect.call_grammar(tools, True, {}), path="tools", options=CALL_OPTIONS)
        assert max(longest_space(grammar_of(asked, TOKENIZER), seed) for seed in range(4)) <= 1, name
