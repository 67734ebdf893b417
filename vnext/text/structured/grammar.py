"""Grammar: from StructuredOutputsParams to the text of a grammar that llguidance has accepted.

Owns the way JSON is written, and the bounds on size and work: lengths, nesting and llguidance's fuel, no clock.
Compiling lets other threads run. Raises InvalidRequest with one sentence that names the field, the place and the cause.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.state.params import GRAMMAR_ROW_MAX, Constraint
from vnext.text.structured.asked import Asked
from vnext.text.structured.exact import ExactRules, Inexact, is_exact
from vnext.text.structured.json_schema import Members, Schema, SchemaReader, dumps
from vnext.text.tokenizer import Tokenizer

BYTES_MAX, CALLS_BYTES_MAX = 2**18, 2**22
"""Of a text that a client writes, and of a dialect's grammar, which holds the descriptions of all tools."""
LARK_LEVELS_MAX = 1_000
"""Of rules and groups: llguidance reads them by recursion and overflows 8 MiB of stack beyond 2,000."""
LARK_ALTERNATIVES_MAX = 500
"""Of all rules: reading costs their square. A terminal's alternatives are cheap."""
LARK_BRANCHES_MAX = 150
"""Alternatives that name a rule: where they name themselves, a step of the engine costs their cube, 0.4 s for so many."""
LIMITS = LLParserLimits(
    max_items_in_row=GRAMMAR_ROW_MAX, initial_lexer_fuel=400_000, precompute_large_lexemes=False, verbose_errors=False
)
STEPS_TRIED = 4
PLACES_TRIED_MAX, PLACES_CHARACTERS_MAX = 100, 200_000
REASON_CHARACTERS_MAX = 300
COMPILING_S_MAX, STEP_S_MAX = 0.5, 0.1
SLOW = f"it takes more than {COMPILING_S_MAX:g} s of computing, or {STEP_S_MAX:g} s for one token, simplify it"

_WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,%d}"  # a blank, or a line end and its indentation; free space makes small models ramble
_INDENTATION_MAX, _INDENTATION_STEP = 32, 4
_WHITESPACE_ONLY = re.compile(r"(?:[ \t\n\r\[\]()|*+?]|\\[ntrs]|\{\d*,?\d*\})*")
_LARK_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
_LARK_TERMINAL = re.compile(r"^[ \t]*[A-Z][A-Z0-9_]*(?:\.-?\d+)?[ \t]*:(?:.|\n[ \t]*\|)*", re.MULTILINE)
_LARK_HEAD = re.compile(r"^[^:|\n]*:", re.MULTILINE)
_LARK_NAME = re.compile(r"(?<![A-Z0-9_])[a-z_]")
_LONG_NUMBER = re.compile(r"\d{16}")  # beyond 2**53
_JSON_IN_LARK = re.compile(r"%json\s*")


def grammar_of(asked: Asked, tokenizer: Tokenizer) -> str:
    """The grammar's text, as LLMatcher takes it. Raises InvalidRequest."""
    refuse = partial(refused, asked.path)
    _check_value(asked.value, refuse, CALLS_BYTES_MAX if asked.kind == "calls" else BYTES_MAX)
    _check_whitespace(asked.options)
    return _MAKERS[asked.kind](asked.value, asked.options, refuse, tokenizer)


def constraint_of(asked: Asked, tokenizer: Tokenizer) -> Constraint:
    """The constraint of a request without reasoning. Raises InvalidRequest."""
    return Constraint(grammar=grammar_of(asked, tokenizer))


def _check_value(value: Any, refuse: Refuse, size_max: int) -> None:
    """Bound its size. Raises InvalidRequest also for what no JSON text can hold."""
    try:
        size = len(value.encode()) if isinstance(value, str) else len(msgspec.json.encode(value))
    except UnicodeError as error:
        raise refuse("", "a text in it holds half a character (a lone surrogate), leave it out") from error
    except RecursionError as error:
        raise refuse("", "it is nested too deeply, make it flatter") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise refuse("", f"it cannot be written as JSON ({error})") from error
    if size > size_max:
        raise refuse("", f"it has {size} bytes and at most {size_max} are supported, shorten it")


def refused(path: str, place: str, reason: str) -> InvalidRequest:
    """One sentence; a long or broken reason is cut."""
    reason = reason[:REASON_CHARACTERS_MAX].encode(errors="replace").decode().rstrip(" .")
    at = f" at {place[:200].encode(errors='replace').decode()}" if place else ""
    return InvalidRequest(f"{path} cannot be kept{at}: {reason}.", path)


def _check_whitespace(options: StructuredOutputsParams) -> None:
    pattern, name = options.whitespace_pattern, "whitespace_pattern"
    if pattern is not None and options.disable_any_whitespace:
        raise InvalidRequest(f"{name} contradicts disable_any_whitespace: leave one out.", name)
    if pattern is not None and not (len(pattern) <= 100 and _WHITESPACE_ONLY.fullmatch(pattern)):
        raise InvalidRequest(f"{name} must be a short pattern of blanks, tabs and line ends only, such as '[ \\n]?'.", name)


def _of_json(value: Any, params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    reader, schema = _read_schema(value, params, refuse, exact=True)
    if error := refusal_of_schema(schema, params):
        raise refuse("" if error == SLOW else place_of(reader, params, error), error)
    return json_grammar(schema, params)


def _of_json_object(value: Any, params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    return _of_json({"type": "object"}, params, refuse, tokenizer)


def _of_regex(value: str, params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    return _checked(LLMatcher.grammar_from_regex(value), refuse)


def _of_choice(value: list[str], params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    if not value:
        raise refuse("", "it is an empty list, name at least one answer")
    return _checked(f"start: CHOICE\nCHOICE: {' | '.join(_quoted(each) for each in value)}", refuse)


def _of_grammar(value: str, params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    pieces = _schemas_apart(value, params, refuse)
    _check_lark("".join(pieces[::2]), refuse)
    lark = _as_lark("".join(pieces), refuse)
    if len(pieces) == 1:
        _check_lark(lark, refuse)  # of GBNF: its rules may have a terminal's name
    return _checked(lark, refuse, tokenizer)


def _of_calls(value: str, params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    """A dialect's own grammar: flat, and as long as the list of tools. Equal schemas become one rule."""
    pieces = _schemas_apart(value, params, refuse, exact=True)
    rules = {schema: f"schema_{at}" for at, schema in enumerate(dict.fromkeys(pieces[1::2]))}
    texts = [piece[: piece.rindex("%json")] + rules[schema] for piece, schema in zip(pieces[::2], pieces[1::2])]
    try:
        schemas = ["\n" + _rules(name, schema, params) for schema, name in rules.items()]
    except Inexact as error:
        raise refuse("", str(error)) from error
    return _checked("".join([*texts, pieces[-1], *schemas]), refuse, tokenizer)


def _check_lark(text: str, refuse: Refuse) -> None:
    """Bound a grammar without its schemas: how deep it may be, and how many ways it may offer at one position."""
    bare = _LARK_TEXTS.sub("", text.replace("::=", ":"))
    if sum(map(bare.count, ":([{")) > LARK_LEVELS_MAX:
        raise refuse("", f"it has more than {LARK_LEVELS_MAX} rules and groups, simplify it")
    alternatives = _LARK_HEAD.sub("", _LARK_TERMINAL.sub("", bare)).split("|")
    remedy = "make terminals (in capitals) of them, or a 'choice'"
    if len(alternatives) > LARK_ALTERNATIVES_MAX + 1:
        raise refuse("", f"its rules have more than {LARK_ALTERNATIVES_MAX} alternatives, {remedy}")
    if len(alternatives) > LARK_BRANCHES_MAX and sum(map(bool, map(_LARK_NAME.search, alternatives))) > LARK_BRANCHES_MAX:
        raise refuse("", f"more than {LARK_BRANCHES_MAX} alternatives of its rules name a rule, {remedy}")


def _as_lark(text: str, refuse: Refuse) -> str:
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # the library raises bare Exceptions, and IndexErrors for texts that are cut off
        raise refuse("", f"it is neither Lark with a rule 'start' nor GBNF with a rule 'root' ({error})") from error
    return lark


def _of_structural_tag(value: Any, params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer) -> str:
    """Lark for free text with tags in it, each of which begins with a trigger: a special token, or a text."""
    spec = _loaded(value, refuse)
    tags, triggers = (spec.get(name) if isinstance(spec, Mapping) else None for name in ("structures", "triggers"))
    if not (isinstance(tags, list) and tags and isinstance(triggers, list)):
        raise refuse("", "it is an object with 'structures', each of begin, schema and end, and 'triggers'")
    rules = [_tag_rule(tag, at, triggers, params, refuse, tokenizer) for at, tag in enumerate(tags)]
    names = " | ".join(f"tag_{at}" for at in range(len(tags)))
    lark = "\n".join(["%llguidance {}", f"start: ({names})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])
    return _checked(lark, refuse, tokenizer)


def _tag_rule(
    tag: Any, at: int, triggers: list[Any], params: StructuredOutputsParams, refuse: Refuse, tokenizer: Tokenizer
) -> str:
    place = f"structures[{at}]"
    begin, end = (tag.get(name) if isinstance(tag, Mapping) else None for name in ("begin", "end"))
    if not (isinstance(begin, str) and isinstance(end, str) and "schema" in tag):
        raise refuse(place, "it has begin, schema and end")
    trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
    if trigger is None:
        raise refuse(place, "none of the triggers is how it begins")
    _, schema = _read_schema(tag["schema"], params, lambda inner, why: refuse(f"{place}.schema{inner and '.'}{inner}", why))
    texts = [_quoted(text) if text else "" for text in (begin.removeprefix(trigger), end)]
    body = f"{texts[0]} %json {dumps(_with_options(schema, params))} {texts[1]}"
    if (special := tokenizer.special_id(trigger)) is not None:
        return f"tag_{at}: TEXT <[{special}]> {body}"
    return f"trigger_{at}[lazy]: TEXT {_quoted(trigger)}\ntag_{at}: trigger_{at} {body}"


def _read_schema(value: Any, params: StructuredOutputsParams, refuse: Refuse, exact: bool = False) -> tuple[SchemaReader, Schema]:
    reader = SchemaReader(_loaded(value, refuse), refuse, closed=params.disable_additional_properties, exact=exact)
    schema = reader.read()
    try:
        dumps(schema)
    except ValueError as error:
        raise refuse("", "it holds a number that JSON cannot write") from error
    return reader, schema


def _loaded(value: Any, refuse: Refuse) -> Any:
    """A schema that is sent as text."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise refuse("", f"it is no valid JSON ({error})") from error


def _with_options(schema: Schema, params: StructuredOutputsParams) -> Schema:
    """The schema with llguidance's own options in it. Only short escapes are allowed: a name written with \\u would pass for
    another name, and its value escape its schema."""
    whitespace: dict[str, object] = {"whitespace_pattern": _white_space(schema, params)}
    options: dict[str, object] = {"whitespace_flexible": False} if params.disable_any_whitespace else whitespace
    options |= {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": 'nrbtf"\\'}
    return (
        {**schema, "x-guidance": options} if isinstance(schema, dict) else _with_options({} if schema else {"enum": []}, params)
    )


def _white_space(schema: Schema, params: StructuredOutputsParams) -> str:
    """What may stand in a gap. A line is indented by at most a step for each level of the values that the schema describes."""
    usual = _WHITESPACE % min(_INDENTATION_MAX, _INDENTATION_STEP * depth_of(schema, _INDENTATION_MAX // _INDENTATION_STEP))
    return (params.whitespace_pattern or usual).replace(r"\s", r"[ \t\n\r]")


def json_grammar(schema: Schema, params: StructuredOutputsParams) -> str:
    """Raises Inexact for an integer that stands where it cannot be kept."""
    text = dumps(_with_options(schema, params))
    return LLMatcher.grammar_from_json_schema(text) if is_exact(schema) else _rules("start", text, params)


def refusal_of_schema(schema: Schema, params: StructuredOutputsParams) -> str:
    """Why a schema is refused, "" where it is not."""
    try:
        return refusal_of(json_grammar(schema, params))
    except Inexact as error:
        return str(error)


def _rules(name: str, schema: str, params: StructuredOutputsParams) -> str:
    """Rules of Lark for a schema's text, with its options; the first is named so. Raises Inexact."""
    if not _LONG_NUMBER.search(schema) or is_exact(read := json.loads(schema)):
        return f"{name}: %json {schema}"
    pattern = _white_space(read, params)
    params = msgspec.structs.replace(params, whitespace_pattern=pattern)  # of the whole, for its parts
    pattern = pattern.replace("\n", r"\n")
    space = '""' if params.disable_any_whitespace else f"/({pattern})?/"
    del read["x-guidance"]
    return "\n".join(ExactRules(name, read, lambda part: f"%json {dumps(_with_options(part, params))}", space).rules)


def _schemas_apart(lark: str, params: StructuredOutputsParams, refuse: Refuse, exact: bool = False) -> list[str]:
    """The grammar cut before and after each of its JSON schemas (%json {...}), which become the schemas to keep."""
    pieces, at = [], 0
    while found := _JSON_IN_LARK.search(lark, at):
        try:
            value, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError) as error:
            raise refuse("%json", f"a JSON schema follows it ({error})") from error
        pieces += [lark[at : found.end()], dumps(_with_options(_read_schema(value, params, refuse, exact)[1], params))]
        at = end
    return [*pieces, lark[at:]]


def _checked(grammar: str, refuse: Refuse, tokenizer: Tokenizer | None = None) -> str:
    """The grammar, if llguidance accepts it."""
    try:
        tokens = vocabulary(tokenizer)
    except ValueError as error:
        raise refuse("", "grammars cannot be used with this model's tokenizer") from error
    if why_not := refusal_of(grammar, tokens):
        raise refuse("", why_not)
    return grammar


def refusal_of(grammar: str, tokens: LLTokenizer | None = None) -> str:
    """Why a grammar is refused, "" where it is not. Tries its first steps, where a limit may be exceeded. Every rank compiles it
    again while the streams beside it wait, so it must be soon done."""
    began_s = time.thread_time()
    matcher = LLMatcher(tokens or vocabulary(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if error := matcher.get_error() or _walked(matcher.deep_copy(), tokens or vocabulary()):
        return error if error == SLOW else in_words(error)
    if time.thread_time() - began_s > COMPILING_S_MAX:
        return SLOW
    return "; ".join(matcher.get_grammar_warnings()) or ("" if matcher.is_accepting() or not matcher.is_stopped() else EMPTY)


def _walked(matcher: LLMatcher, tokens: LLTokenizer) -> str:
    """The error of the first steps along the last allowed token of each, which opens an object where one may come. A slow step
    ends it; after a slow mask alone, because taking a token would hold the interpreter about as long."""
    for _ in range(STEPS_TRIED):
        began_s = time.thread_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << tokens.eos_token)
        if time.thread_time() - began_s > STEP_S_MAX:
            return SLOW
        if matcher.is_stopped() or not allowed:
            break
        matcher.consume_token(allowed.bit_length() - 1)
        if time.thread_time() - began_s > STEP_S_MAX:
            return SLOW
    error: str = matcher.get_error()
    return error


def place_of(reader: SchemaReader, params: StructuredOutputsParams, error: str) -> str:
    """The innermost part of the schema that llguidance refuses for the same reason."""
    tries = min(PLACES_TRIED_MAX, PLACES_CHARACTERS_MAX // len(dumps(reader.whole(reader.parts[-1][1]))))
    for place, part in reader.parts[:tries]:
        if refusal_of_schema(reader.whole(part), params) == error:
            return place
    return ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer | None = None) -> LLTokenizer:
    """The tokens as grammars see them; without a tokenizer those of bytes, which suffice where no special token is named.
    Raises ValueError for a tokenizer that llguidance cannot read."""
    return LLTokenizer("byte" if tokenizer is None else tokenizer.to_json(), slices=[])


Refuse = Callable[[str, str], InvalidRequest]
_Maker = Callable[[Any, StructuredOutputsParams, Refuse, Tokenizer], str]
_MAKERS: Mapping[str, _Maker] = {
    "json": _of_json, "json_object": _of_json_object, "regex": _of_regex, "choice": _of_choice, "grammar": _of_grammar,
    "structural_tag": _of_structural_tag, "calls": _of_calls,
}  # fmt: skip


# ---- why a grammar is refused ------------------------------------------------------------------------------------
# Reasons: why a grammar is refused, in our words for llguidance's.
#
# Its messages quote the grammar over several lines, and name its own options and units. Those that describe a client's text, a
# pattern or a rule, pass.


EMPTY = "no answer satisfies it"
_WORK = "it takes more work than a grammar may, simplify it"
_WORDS: tuple[tuple[str, str], ...] = (  # a pattern in its message, and ours
    (r"NoExtension", EMPTY),
    (
        r"Current row has",
        f"a position of it has more than {GRAMMAR_ROW_MAX} items (some 270 optional properties, or rules that can be read in many "
        "ways), simplify it",
    ),
    (r"oneOf constraints are not supported", "'oneOf' is only supported where no answer fits two of its schemas, use 'anyOf'"),
    (r"Unsatisfiable schema: (\w+ \([^)]*\) is greater than \w+ \([^)]*\))", EMPTY + r": \1"),
    (r"Unsatisfiable schema: (required property '.*') is unsatisfiable", EMPTY + r": nothing fits the \1"),
    (r"Unsatisfiable schema: Regex is empty", EMPTY + ": its patterns, formats, lengths and values contradict each other"),
    (r"Unsatisfiable schema: incompatible types", EMPTY + ": its types contradict each other"),
    (r"[Uu]nsatisfiable", EMPTY),
    (
        r"min/maxProperties only supported",
        "'minProperties' and 'maxProperties' are only supported where all 'properties' are required",
    ),
    (
        r"patternProperty regexes",
        "patterns of 'patternProperties' that fit the same name are not supported, make them exclude each other",
    ),
    (r"circular references", "a reference that leads back to itself and has keywords beside it is not supported"),
    (r"Expected f64 for ('\w+'), got (.*)", r"\1 is \2, and must be a number"),
    (r"Expected positive integer for ('\w+'), got (.*)", r"\1 is \2, and must be a whole number of 0 or more"),
    (r"Expected string for ('\w+'), got (.*)", r"\1 is \2, and must be a text"),
    (r"Unimplemented keys: (.*)", r"the keywords \1 are not supported, leave them out"),
    (r"look-?arounds?\b", "look-around in a pattern is not supported, leave it out"),
    (r"too (large|big|many|complex)|[Ff]uel|TooComplex", _WORK),
)


def in_words(error: str) -> str:
    """Our sentence for a message of llguidance."""
    for pattern, words in _WORDS:
        if found := re.search(pattern, error):
            return found.expand(words)
    cause = re.search(r"error: (.*)", error)
    line = cause[1] if cause else re.sub(r"^(at )?\d+\(\d+\): ", "", error.partition("\n")[0])
    return line or "it is not valid"


# ---- depth -------------------------------------------------------------------------------------------------------


def depth_of(schema: Schema, most: int) -> int:
    """The depth, up to `most`; values that are free, and those of schemas that contain themselves, have that."""
    definitions = schema.get("$defs", {}) if isinstance(schema, Mapping) else {}
    return _Depths(definitions).of(schema, most)


class _Depths:
    """Depths of one schema's parts. Looks at each definition once for each depth that is left. Mutable."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._known: dict[tuple[str, int], int] = {}

    def of(self, schema: object, left: int) -> int:
        if not isinstance(schema, dict) or left <= 0:
            return left if schema else 0
        within, beside = [*_within(schema)], [*_beside(schema)]
        if _is_free(schema, bool(within or beside)):
            return left
        found = [self.of(each, left) for each in beside]
        found += [1 + self.of(each, left - 1) for each in within]
        found += [_levels(each, left) for each in (*schema.get("enum", ()), schema.get("const"))]
        if isinstance(name := schema.get("$ref"), str):
            found.append(self._definition(name.removeprefix("#/$defs/"), left))
        if "properties" in schema and schema.get("additionalProperties", True) is True:
            found.append(min(2, left))  # members that the schema does not describe: one level for them
        return max(found, default=0)

    def _definition(self, name: str, left: int) -> int:
        if (name, left) not in self._known:
            self._known[name, left] = 0  # while it is looked at: a reference to itself adds no level
            self._known[name, left] = self.of(self._definitions.get(name, True), left)
        return self._known[name, left]


def _levels(value: object, left: int) -> int:
    """The depth of one value."""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return 0 if within is None or left <= 0 else 1 + max((_levels(each, left - 1) for each in within), default=0)


def _within(schema: Members) -> Iterator[object]:
    """The schemas of members and items."""
    for name in ("properties", "patternProperties"):
        yield from schema.get(name, {}).values()
    yield from schema.get("prefixItems", ())
    for name in ("items", "additionalProperties"):
        if isinstance(each := schema.get(name), Mapping):
            yield each


def _beside(schema: Members) -> Iterator[object]:
    """The schemas of the same value."""
    for name in ("anyOf", "oneOf", "allOf"):
        yield from schema.get(name, ())


def _is_free(schema: Members, is_described: bool) -> bool:
    """Whether any list or object will do."""
    kinds = schema.get("type", ("object",))
    return not (is_described or {"$ref", "const", "enum"} & schema.keys()) and ("object" in kinds or "array" in kinds)
