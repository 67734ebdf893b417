"""Hostile input: whatever a client sends, it gets a grammar or one sentence. What would crash a process is tried in another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.structured import grammar as grammar_module
from vnext.text.structured.asked import Asked

TRY = """
from toy_tokenizers import byte_level
from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.text.structured.asked import asked_of
from vnext.text.structured.grammar import grammar_of
from test_hostile_grammars import HOSTILE
tokenizer = byte_level()
for name, (fields, _) in HOSTILE.items():
    try:
        said = f"a grammar of {len(grammar_of(asked_of(StructuredOutputsParams(**fields)), tokenizer))}"
    except InvalidRequest as error:
        said = error.message
    print(name, said, sep="|", flush=True)
"""


def deep(unit: dict, count: int) -> dict:
    """A schema within a schema, and so on. `unit` has one key."""
    [name] = unit
    for _ in range(count):
        unit = {name: [unit] if isinstance(next(iter(unit.values())), list) else unit}
    return unit


def chain(count: int, end: int, link: str = "properties") -> dict:
    """Definitions that lead to each other, the last one to number `end`."""

    def part(at: int) -> dict:
        to = {"$ref": f"#/$defs/{at + 1 if at < count - 1 else end}"}
        return {"anyOf": [{"type": "null"}, {link: {"a": to}}]}

    return {"$ref": "#/$defs/0", "$defs": {str(at): part(at) for at in range(count)} | {"end": {"type": "null"}}}


def rules(count: int, body: str, last: str = '"a"', start: str = "r0") -> str:
    return "\n".join([f"start: {start}", *(body.format(at, at + 1) for at in range(count)), f"{start[0]}{count}: {last}"])


LEVELS, RULES = "its references lead through more than", "it has more than 1000 rules and groups"
WORK = "it takes more work than a grammar may, simplify it"
ROW = "a position of it has more than 1100 items"
BRANCHES = "more than 150 alternatives of its rules name a rule"
ALTERNATIVES = "its rules have more than 500 alternatives"
HOSTILE: dict[str, tuple[dict, str]] = {
    "10,000 deep": ({"json": deep({"items": {}}, 10_000)}, "it is nested too deeply, make it flatter"),
    "60 deep": ({"json": deep({"items": {}}, 60)}, "it is nested more than 50 deep"),
    "50 deep": ({"json": deep({"items": {}}, 48)}, "a grammar"),
    "10,000 deep as text": ({"json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "it is no valid JSON"),
    "deep value": ({"json": {"const": deep({"a": []}, 100)}}, "its value is nested more than 50 deep"),
    "enum of 1 MB": ({"json": {"enum": [f"{at:07}{'x' * 13}" for at in range(50_000)]}}, "at most 262144 are supported"),
    "enum of 200 kB": ({"json": {"enum": [f"{at:07}{'x' * 13}" for at in range(8_000)]}}, "a grammar"),
    "long text": ({"json": {"const": "x" * 200_000}}, "a text has more than 8192 characters"),
    "many names": ({"json": {"required": [str(at) for at in range(20_000)]}}, "at most 1000 properties in an object"),
    "many objects": (
        {"json": {"prefixItems": [{"required": [str(at) for at in range(900)]}] * 20}}, "at most 1000 properties in an object and 5000 in",
    ),
    "1,000 required names": ({"json": {"properties": {str(at): {"type": "string"} for at in range(1_000)},
                                       "required": [str(at) for at in range(1_000)]}}, "a grammar"),
    "270 names": ({"json": {"properties": {str(at): {"type": "string"} for at in range(270)}}}, "a grammar"),
    "300 names": ({"json": {"properties": {str(at): {"type": "string"} for at in range(300)}}}, "at most 270 optional properties"),
    "long chain": ({"json": chain(1_500, 0)}, LEVELS),
    "long line": ({"json": chain(1_500, "end")}, LEVELS),
    "the longest chain": ({"json": chain(140, 0)}, "a grammar"),
    "the longest line": ({"json": chain(140, "end")}, "a grammar"),
    "no end": ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}}, "no answer"),
    "doubling": (
        {"json": {"$ref": "#/$defs/0", "$defs": {
            str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(25)} | {"25": {"type": "null"}}}}, "a grammar",
    ),
    "product": (
        {"json": {"allOf": [{"anyOf": [{"required": [f"{at} {by}"]} for by in range(4)]} for at in range(10)]}}, WORK,
    ),
    "catastrophic": ({"regex": "(a+)+(a|aa)*b{1,1000}(.|b)*a(a|.){500}c"}, "a grammar"),
    "catastrophic pattern": ({"json": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$", "minLength": 9}}, "a grammar"),
    "deep regex": ({"regex": "(" * 10_000 + "a" + ")" * 10_000}, "cannot be kept"),
    "and": ({"grammar": "start: A\nA: /(a|b)*a(a|b){200}/ & /(a|b)*b(a|b){201}/ & ~/(a|b)*a(a|b){203}/"}, WORK),
    "multiple": ({"json": {"type": "integer", "multipleOf": 1_000_003}}, "only a positive number of at most 10000"),
    "least integer": ({"json": {"enum": ["a", [-(2**63)]]}}, "a number beyond 2**53 is not kept within a list"),
    "least range": ({"json": {"type": "integer", "minimum": -1e308, "maximum": -1e300}}, "only numbers of -4611686018427387904"),
    "left recursion": ({"grammar": 'start: start "a" | start start | "b"'}, "a grammar"),
    "only itself": ({"grammar": "start: start"}, "no answer satisfies it"),
    "ambiguous": ({"grammar": 'start: a a a a\na: a a | "x" | ""'}, "a grammar"),
    "chain of rules": ({"grammar": rules(9_000, "r{}: r{}")}, RULES),
    "the longest chain of rules": ({"grammar": rules(990, "r{}: r{}")}, "a grammar"),
    "chain of terminals": ({"grammar": rules(9_000, "R{}: R{}", start="R0")}, RULES),
    "deep rules": ({"grammar": rules(250, "r{}: " + '("b"? ' * 20 + "r{}" + ")" * 20)}, RULES),
    "deep rules, as many as there may be": ({"grammar": rules(45, "r{}: " + '("b"? ' * 20 + "r{}" + ")" * 20)}, ROW),
    "deep terminals, as many as there may be": (
        {"grammar": rules(45, "R{}: " + '("b"? ' * 20 + "R{}" + ")" * 20, start="R0")}, WORK,
    ),
    "rules in what looks like a comment": ({"grammar": rules(9_000, 'r{}: "//" r{}')}, RULES),
    "doubling terminals": ({"grammar": rules(40, "R{0}: R{1} R{1}", start="R0")}, WORK),
    "deep groups": ({"grammar": "start: " + "(" * 10_000}, RULES),
    "deep groups in GBNF": ({"grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900}, "cannot be kept"),
    "chain of rules in GBNF": ({"grammar": rules(900, "r{} ::= r{}").replace("start:", "root ::=").replace("r900:", "r900 ::=")}, "a grammar"),
    "chain of terminals in GBNF": (
        {"grammar": "\n".join(['root ::= r990', 'r0 ::= "a"', *(f"r{at + 1} ::= r{at}" for at in reversed(range(990)))])}, "a grammar",
    ),
    "schema in a grammar": ({"grammar": "start: %json " + json.dumps(chain(1_000, 0))}, LEVELS),
    "no JSON in a grammar": ({"grammar": 'start: %json {"type": "integer", }'}, "a JSON schema follows it"),
    "half a character": ({"choice": ["a", "\ud800"]}, "half a character"),
    "many alternatives": ({"grammar": "start: " + " | ".join(f'"alternative {at}"' for at in range(9_000))}, ALTERNATIVES),
    "many alternatives below each other": ({"grammar": "start: item\nitem: item item\n" + "    | item item\n" * 9_000}, ALTERNATIVES),
    "many alternatives after each other": ({"grammar": "start: item\nitem: item " + '| item "a" ' * 9_000 + '| "b"'}, ALTERNATIVES),
    "many rules of several alternatives": (
        {"grammar": "start: r0\n" + "\n".join(f"r{at}: r{at + 1} | r{at + 1} | r{at + 1} | r900" for at in range(900)) + '\nr900: "a"'},
        ALTERNATIVES,
    ),
    "many alternatives in GBNF": ({"grammar": "root ::= " + " | ".join(f'"alternative {at}"' for at in range(9_000))}, ALTERNATIVES),
    "many alternatives of a terminal": (
        {"grammar": "start: WORD+\nWORD: " + "\n    | ".join(f'"alternative {at}"' for at in range(9_000))}, "a grammar",
    ),
    "as many alternatives as there may be": ({"grammar": "start: item*\nitem: " + " | ".join(f'"a{at}" X' for at in range(500)) + "\nX: /[0-9]+/"}, "a grammar"),
    "steps of seconds": ({"grammar": "start: item\nitem: " + "| ".join(["item item "] * 500) + '| "a"'}, BRANCHES),
    "steps of seconds in GBNF": ({"grammar": 'root ::= item\nitem ::= "a" | ' + "| ".join(['item item "b"? '] * 151)}, BRANCHES),
    "rules with a terminal's name": ({"grammar": 'root ::= ITEM\nITEM ::= "a" | ' + "| ".join(["ITEM ITEM "] * 151)}, BRANCHES),
    "as many branches as there may be": ({"grammar": 'start: item+\nx: "b" "c"\nitem: "a" | ' + "| ".join(["x x "] * 149)}, "a grammar"),
    "a position of too many items": ({"grammar": "start: " + " ".join(["x?"] * 900) + '\nx: "a" | "b" "c"'}, ROW),
    "many choices": ({"choice": [f"choice number {at}" for at in range(9_000)]}, "a grammar"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sentences() -> dict[str, str]:
    """What a process says to each, up to the one that it dies of."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", f"import sys; sys.path += {path!r}\n{TRY}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return dict(line.split("|", 1) for line in ran.stdout.splitlines())


@pytest.mark.parametrize("name", HOSTILE)
def test_it_gets_a_grammar_or_one_sentence(name: str, sentences: dict[str, str]) -> None:
    assert HOSTILE[name][1] in sentences[name] and len(sentences[name]) < 1_000


def test_the_search_for_a_place_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    compile_ = grammar_module.refusal_of
    monkeypatch.setattr(grammar_module, "refusal_of", lambda *given: tried.append(1) or compile_(*given))
    names = [f"name {at}" for at in range(900)]
    schema = {"properties": {name: {"type": "string"} for name in names}, "required": names, "type": "strin"}
    with pytest.raises(InvalidRequest, match="Invalid type: strin"):
        grammar_module.grammar_of(Asked(kind="json", value=schema, path="guided_json"), None)
    assert len(tried) < 10
