"""Exact: a schema that holds integers which float64 does not, as rules of Lark in which they stand as they are written.

llguidance reads every number of a schema as float64, so it would take another id for the one that was meant. What leads to such a
number, objects, lists, references and alternatives, becomes rules; all beside it stays a schema. Knows no client and no option.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil, floor, inf
from typing import NamedTuple

from vnext.text.structured.json_schema import BOUNDS, LOWER, UPPER, Members, Schema, is_beyond, is_inexact

_KINDS = ("null", "boolean", "number", "string", "array", "object")
_KIND_OF = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
_OF_LISTS = frozenset(("type", "items", "minItems", "maxItems"))
_OF_NUMBERS = frozenset(("type", *BOUNDS))
_TEXT = r'/"([^"\\\x00-\x1f\x7f]|\\[nrbtf"\\])*"/'


class Inexact(ValueError):
    """Why a number cannot be kept."""


def is_exact(schema: Schema) -> bool:
    """Whether llguidance keeps all integers of a schema."""
    return isinstance(schema, bool) or not has_inexact(schema, {})


def has_inexact(schema: object, definitions: Mapping[str, Schema], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a schema, or one that its references lead to, names such an integer."""
    if isinstance(schema, list):
        return any(has_inexact(each, definitions, seen) for each in schema)
    if not isinstance(schema, Mapping):
        return False
    if (name := _reference(schema)) in definitions.keys() - seen and has_inexact(definitions[name], definitions, seen | {name}):
        return True
    values = [schema[key] for key in ("const", "enum") if key in schema]
    return is_inexact(values) or any(is_beyond(schema.get(name)) for name in BOUNDS) or any(
        has_inexact([*each.values()] if key in ("properties", "patternProperties", "$defs") else each, definitions, seen)
        for key, each in schema.items()
        if key not in ("const", "enum")
    )


def _reference(schema: Mapping[str, object]) -> str:
    return str(schema.get("$ref", "")).removeprefix("#/$defs/")


class ExactRules:
    """The rules of one schema. The one named `prefix` is the whole; each name begins with it, so they may stand beside others."""

    def __init__(self, prefix: str, schema: Schema, json_rule: Callable[[Schema], str], space: str) -> None:
        """`json_rule` writes a schema without such integers, `space` is the terminal of white space. Raises Inexact."""
        self._prefix, self._json_rule, self._space = prefix, json_rule, f"{prefix}_space"
        self._comma = f'{self._space} "," {self._space}'
        self._of_definitions: dict[str, str] = {}
        self.rules = [f"{self._space}: {space}"]
        whole = dict(schema) if isinstance(schema, dict) else {}
        self._definitions: dict[str, Schema] = whole.pop("$defs", {})
        self.rules.append(f"{prefix}: {self._of(whole)}")

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        self.rules.append(f"{self._prefix}_{len(self.rules)}: {body}")
        return self.rules[-1].partition(":")[0]

    def _json(self, schema: Schema) -> str:
        return self._rule(self._json_rule({**schema, "$defs": self._definitions} if isinstance(schema, dict) else schema))

    def _of(self, schema: Schema) -> str:
        """The name of the rule of a schema."""
        if isinstance(schema, bool) or not has_inexact(schema, self._definitions):
            return self._json(schema)
        names = schema.keys()
        if names == {"$ref"}:
            return self._definition(_reference(schema))
        if names in ({"const"}, {"const", "type"}, {"enum"}, {"enum", "type"}):
            return self._values(schema["enum"] if "enum" in schema else [schema["const"]], schema.get("type", [*_KINDS]))
        if names == {"anyOf"}:
            return self._rule(" | ".join(map(self._of, schema["anyOf"])))
        if names == {"oneOf"} and all(isinstance(each, dict) and each.keys() == {"const"} for each in schema["oneOf"]):
            return self._of({"enum": [each["const"] for each in schema["oneOf"]]})
        if names <= _OF_OBJECTS:
            return self._kinds("object", schema, self._object)
        if names <= _OF_LISTS:
            return self._kinds("array", schema, self._list)
        if names <= _OF_NUMBERS:
            kind = "integer" if _is_whole(schema) else "number"
            listed = [each for each in _listed(schema) if kind == each or each not in ("integer", "number")]
            return self._kinds(kind, {**schema, "type": listed}, self._number)
        others = ", ".join(sorted(names - {"const", "enum", "type", *BOUNDS})) or "each other"
        raise Inexact(f"'const', 'enum' and bounds beyond 2**53 are only kept beside 'type', not beside {others}: make it a string")

    def _definition(self, name: str) -> str:
        if name not in self._of_definitions:
            self._of_definitions[name] = found = f"{self._prefix}_of_{len(self._of_definitions)}"
            self.rules.append(f"{found}: {self._of(self._definitions[name])}")
        return self._of_definitions[name]

    def _values(self, values: list[object], kinds: object) -> str:
        admitted = {*(kinds if isinstance(kinds, list) else [kinds])}
        admitted |= {"number"} if "integer" in admitted else set()
        values = [each for each in values if _KIND_OF[type(each)] in admitted]
        exact = [_quoted(each) for each in values if isinstance(each, int) and is_inexact(each)]
        others: list[object] = [each for each in values if not (isinstance(each, int) and is_inexact(each))]
        if is_inexact(others):
            raise Inexact("a number beyond 2**53 is not kept within a list or an object of 'const' or 'enum': make it a string")
        return self._either(exact, {"enum": others, "type": kinds} if others else None)

    def _either(self, bodies: Iterable[str], other: Schema | None) -> str:
        every = [*bodies, *([self._json(other)] if other else [])]
        if not every:
            raise Inexact("no answer satisfies it")
        return self._rule(" | ".join(every))

    def _kinds(self, kind: str, schema: Members, rule: Callable[[Members], Iterable[str]]) -> str:
        """The rule of one kind, and of the others that a schema admits, which it does not bound."""
        kinds = _listed(schema)
        others = [each for each in kinds if each != kind]
        return self._either(rule(schema) if kind in kinds else (), {"type": others} if others else None)

    def _number(self, schema: Members) -> Iterator[str]:
        try:
            pattern = pattern_of(schema, _is_whole(schema))
        except ValueError as error:
            raise Inexact(str(error)) from error
        if pattern:
            yield f"/{pattern}/"

    def _object(self, schema: Members) -> Iterator[str]:
        """Its members in the order of the schema, and any further ones behind them."""
        required, named = schema.get("required", []), schema.get("properties", {})
        further = schema.get("additionalProperties", True)
        every = {**named, **{name: further for name in required if name not in named}}
        more = self._further(every, further)
        later = self._rule(f"({self._comma} {more})*" if more else '""')
        first = self._rule(f"{more} {later}") if more else ""
        for name, each in reversed(every.items()):
            member, needed = self._member(_quoted(_json_text(name)), each), name in required
            first = self._rule(f"{member} {later}" + (f" | {first}" if first and not needed else ""))
            later = self._rule(f"{self._comma} {member} {later}" + ("" if needed else f" | {later}"))
        inner = f"{first} {self._space}" if first else ""
        yield f'"{{" {self._space} ({inner}){"" if required else "?"} "}}"' if inner else f'"{{" {self._space} "}}"'

    def _further(self, taken: Iterable[str], schema: Schema) -> str:
        """The rule of a member with another name than those; "" where there may be none."""
        if schema is False:
            return ""
        not_taken = " | ".join(_quoted(_json_text(name)) for name in taken)
        name = f"{self._prefix}_{len(self.rules)}_name".upper()
        self.rules.append(f"{name}: {_TEXT} & ~({not_taken})" if not_taken else f"{name}: {_TEXT}")
        return self._member(name, schema)

    def _member(self, name: str, schema: Schema) -> str:
        return self._rule(f'{name} {self._space} ":" {self._space} {self._of(schema)}')

    def _list(self, schema: Members) -> Iterator[str]:
        least, most = (schema.get(name) for name in ("minItems", "maxItems"))
        low = max(least, 0) if isinstance(least, int) else 0
        item = self._of(schema.get("items", True))
        if not isinstance(most, int) or most >= max(low, 1):
            high = str(most - 1) if isinstance(most, int) else ""
            more = "" if high == "0" else f"({self._comma} {item}){{{max(low - 1, 0)},{high}}}"
            items = f"{item} {more} {self._space}"
            yield f'"[" {self._space} ({items}){"" if low else "?"} "]"'
        elif low == 0:
            yield f'"[" {self._space} "]"'


def _is_whole(schema: Members) -> bool:
    """Whether a schema admits whole numbers only."""
    return "integer" in (kinds := _listed(schema)) and "number" not in kinds


def _listed(schema: Members) -> list[str]:
    """The kinds that a schema admits."""
    listed = schema.get("type", [*_KINDS])
    return listed if isinstance(listed, list) else [listed]


def _quoted(value: object) -> str:
    """A string of Lark that is the JSON text of a number, or a text as it is."""
    return json.dumps(value if isinstance(value, str) else _json_text(value), ensure_ascii=False)


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---- numbers between two bounds ----------------------------------------------------------------------------------
# Regular expressions, exact however many digits the bounds have, which float64 would round. Numbers are written as JSON without
# exponents.

_FRACTION, _NO_FRACTION, _SOME_FRACTION = r"(\.[0-9]+)?", r"(\.0+)?", r"\.[0-9]*[1-9][0-9]*"


class Bound(NamedTuple):
    """Where a range ends; `is_open`: the bound itself lies outside. Without one, `at` is infinite."""

    at: float
    is_open: bool


def pattern_of(schema: Members, is_whole: bool) -> str:
    """The numbers that a schema's bounds admit, only whole ones if `is_whole`; "" where there are none. Raises ValueError where one
    bound of other numbers is not whole."""
    lower, upper = (_bound(schema, names, sign) for names, sign in ((LOWER, 1), (UPPER, -1)))
    if is_whole:
        low, high = ceil_of(lower), floor_of(upper)
        lower, upper = Bound(low, False), Bound(high, False)
    elif any(abs(each.at) != inf and each.at != int(each.at) for each in (lower, upper)):
        raise ValueError("a bound beyond 2**53 is not kept beside one with a fraction: make both whole numbers")
    parts = []
    if lower.at < 0:
        below = _magnitudes(_inner(Bound(-upper.at, upper.is_open)), Bound(-lower.at, lower.is_open), is_whole)
        parts += [f"-({below})"] if below else []
    if upper.at >= 0:
        parts += [_magnitudes(_inner(lower), upper, is_whole)]
    return "|".join(filter(None, parts))


def ceil_of(bound: Bound) -> float:
    return bound.at if bound.at == -inf else floor(bound.at) + 1 if bound.is_open else ceil(bound.at)


def floor_of(bound: Bound) -> float:
    return bound.at if bound.at == inf else ceil(bound.at) - 1 if bound.is_open else floor(bound.at)


def _bound(schema: Members, names: tuple[str, str], sign: int) -> Bound:
    """The nearer of an inclusive and an exclusive bound; `sign`: 1 for lower ones."""
    given = {name: schema[name] for name in names if name in schema}
    found = [Bound(int(at) if at == int(at) else at, name == names[1]) for name, at in given.items()]
    return max(found, key=lambda each: (sign * each.at, each.is_open), default=Bound(-sign * inf, True))


def _inner(lower: Bound) -> Bound:
    """The lower bound of magnitudes."""
    return lower if lower.at >= 0 else Bound(0, False)


def _magnitudes(lower: Bound, upper: Bound, is_whole: bool) -> str:
    """Numbers without a sign between bounds of at least 0."""
    if is_whole:
        return _between(int(lower.at), upper.at)
    low = int(lower.at)
    parts = []
    if lower.is_open and low < upper.at:
        parts.append(f"{low}{_SOME_FRACTION}")
        low += 1
    if within := _between(low, upper.at - 1 if upper.at != inf else inf):
        parts.append(f"({within}){_FRACTION}")
    if upper.at != inf and not upper.is_open and upper.at >= low:
        parts.append(f"{upper.at}{_NO_FRACTION}")
    return "|".join(parts)


def _between(low: int, high: float) -> str:
    """Whole numbers from `low`, at least 0, to `high`, "" where there are none."""
    if low > high:
        return ""
    first = len(str(low))
    if high == inf:
        return f"{_digits(str(low), '9' * first)}|[1-9][0-9]{{{first},}}"
    last, parts = len(str(high)), []
    for count in range(first, last + 1):
        begin = str(low) if count == first else "1" + "0" * (count - 1)
        parts.append(_digits(begin, str(high) if count == last else "9" * count))
    return "|".join(parts)


def _digits(low: str, high: str) -> str:
    """Texts of as many digits as both, from one to the other."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f"{low[0]}({_digits(low[1:], high[1:])})"
    rest = len(low) - 1
    parts, first, last = [], int(low[0]), int(high[0])
    if set(low[1:]) - {"0"}:
        parts.append(f"{first}({_digits(low[1:], '9' * rest)})")
        first += 1
    if set(high[1:]) - {"9"}:
        parts.append(f"{last}({_digits('0' * rest, high[1:])})")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)
