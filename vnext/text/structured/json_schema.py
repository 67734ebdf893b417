"""JSON schema: reads a client's schema into one that llguidance keeps exactly, or says which keyword it cannot keep.

The result holds only keywords that constrain; every schema that a reference reaches stands under the root's "$defs". Ranks
compile it by recursion and on small stacks, so nesting, names and texts are bounded here.
Source of the keywords: JSON Schema, draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeGuard, TypeVar
from urllib.parse import unquote

from vnext.runtime.protocol.sampling_params import InvalidRequest

DEPTH_MAX = 50
LEVELS_MAX = 1_000
"""Levels of JSON on the longest path through a schema and its references. llguidance overflows a stack of 8 MiB beyond 2,000."""
NAMES_MAX, NAMES_IN_OBJECT_MAX = 5_000, 1_000
OPTIONAL_MAX = 270
"""Optional names of an object: each is four items of llguidance at one position (`GRAMMAR_ROW_MAX`)."""
VALUE_CHARACTERS_MAX = 8_192
MULTIPLE_MAX = 10_000
INTEGER_MIN = -(2**62)
"""llguidance crashes on integers that are at most about -2**63."""
BOUND_MAX = 2**62
"""llguidance reads larger lower bounds as about 2**63."""
INTEGER_BITS_MAX, BOUND_BITS_MAX = 4_096, 128
STEP = Decimal("1e-9")
LENGTH_MAX = 2**31
CIRCLES_MAX = 50
"""Definitions in a row, each of which only ends because the one before it does, that are looked for."""

_ONE = ("additionalProperties", "additionalItems", "items")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_PLAIN = frozenset(
    "type enum const required minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern "
    "format minItems maxItems minProperties maxProperties".split()
)
_UNKEPT = frozenset(
    "not if then else contains minContains maxContains propertyNames dependentRequired dependentSchemas dependencies uniqueItems "
    "unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef x-guidance".split()
)
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
_UNKEPT_FORMATS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex".split()
)
_IDLE_OF_NAMES = frozenset("type title description $comment".split())
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f]")  # what JSON writes as \u only

Members = dict[str, Any]
Schema = Members | bool
Kept = TypeVar("Kept")
Refuse = Callable[[str, str], InvalidRequest]
"""From a place in the schema, and a reason, to the error."""


class SchemaReader:
    """One client's schema. `refuse` words the errors. `parts` are the schemas read so far, inner ones first and those
    of the root last, each with its place in the client's schema."""

    def __init__(
        self, root: Any, refuse: Refuse, *, closed: bool = False, drops: bool = False, exact: bool = False
    ) -> None:
        """`closed`: objects with `properties` admit no others, unless the schema says so itself. `drops`: what cannot be kept is
        left out instead of being refused, and `dropped` says why. `exact`: integers that float64 does not hold are kept."""
        self._root = root
        self._refuse = refuse
        self._closed, self._drops, self._exact = closed, drops, exact
        self.dropped: list[str] = []
        self._numbers: dict[str, int] = {}
        self._names_count = 0
        self.parts: list[tuple[str, Schema]] = []
        self.definitions: dict[str, Schema] = {}

    def read(self) -> Schema:
        """The schema to keep. Raises InvalidRequest, naming the keyword and its place."""
        schema = self._schema(self._root, "", 0)
        of_root, self.parts = self.parts, []
        for pointer in (found := list(self._numbers)):
            self.definitions[str(self._numbers[pointer])] = self._schema(self._target(pointer), _dotted(pointer), 0)
            found += list(self._numbers)[len(found) :]
        self.definitions |= dict.fromkeys(_endless(self.definitions), False)
        self.parts += of_root
        if _levels(schema, self.definitions) > LEVELS_MAX:
            raise self._refuse("", f"its references lead through more than {LEVELS_MAX} nested schemas, make it flatter")
        return self.whole(schema)

    def whole(self, part: Schema) -> Schema:
        """A part that stands by itself, with the definitions."""
        return {**part, "$defs": self.definitions} if self.definitions and isinstance(part, dict) else part

    def _schema(self, schema: Any, path: str, depth: int) -> Schema:
        try:
            kept = self._read_schema(schema, path, depth)
        except InvalidRequest as error:
            if depth > DEPTH_MAX:
                raise  # drop the keyword that leads here
            kept = self._without({"type": schema["type"]} if isinstance(schema, Mapping) and "type" in schema else {}, error)
        self.parts.append((path, kept))
        return kept

    def _read_schema(self, schema: Any, path: str, depth: int) -> Schema:
        if depth > DEPTH_MAX:
            raise self._refuse("", f"it is nested more than {DEPTH_MAX} deep, make it flatter")
        if not isinstance(schema, Mapping | bool):
            raise self._refuse(path, "a schema is an object or a boolean")
        if isinstance(schema, bool):
            return schema
        if _admits_nothing(schema):
            return False
        kept = dict(self._keywords(schema, path, depth))
        for name, check in (("required", self._check_required), ("minProperties", self._check_least)):
            try:
                check(kept, path)
            except InvalidRequest as error:
                kept = self._without({key: value for key, value in kept.items() if key != name}, error)
        self._check_names(kept, path)
        return kept if any(is_beyond(kept.get(name)) for name in BOUNDS) else _with_sound_bounds(kept)

    def _without(self, kept: Kept, error: InvalidRequest) -> Kept:
        """What is kept where an error's cause is dropped. Raises the error where nothing is."""
        if not self._drops:
            raise error
        self.dropped.append(error.message)
        return kept

    def _keywords(self, schema: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Any]]:
        for name, value in schema.items():
            try:
                kept = [] if _is_idle(name, value, schema) else [*self._keyword(name, value, path, depth)]
            except InvalidRequest as error:
                kept = self._without([], error)
            yield from kept
        if self._closed and "properties" in schema and "additionalProperties" not in schema:
            yield "additionalProperties", False

    def _keyword(self, name: str, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        place = _join(path, name)
        if name in _NAMED:
            yield name, {key: self._schema(each, _join(place, key), depth + 1) for key, each in self._object(value, place)}
        elif name in _SEVERAL or (name == "items" and isinstance(value, list)):
            yield name, [self._schema(each, f"{place}[{at}]", depth + 1) for at, each in self._list(value, place)]
        elif name in _ONE:
            yield name, self._schema(value, place, depth + 1)
        elif name == "$ref":
            yield name, f"#/$defs/{self._reference(value, place)}"
        elif name in _PLAIN:
            yield from self._plain(name, value, place)
        elif name in _UNKEPT:
            raise self._refuse(path, f"the keyword {name!r} is not supported, leave it out")
        elif name == "$id" and path:
            raise self._refuse(path, "'$id' is only supported at the top, leave it out")

    def _plain(self, name: str, value: Any, place: str) -> Iterator[tuple[str, Any]]:
        if name == "enum" and not isinstance(value, list | tuple):
            raise self._refuse(place, "it is a list of values")
        if name == "type" and not all(isinstance(each, str) for each in (value if isinstance(value, list | tuple) else [value])):
            raise self._refuse(place, "it is the name of a type, or a list of them")
        if name in ("const", "enum"):
            self._value(value, place, 0)
        elif name in BOUNDS and is_beyond(value):
            if not self._exact or value.bit_length() > BOUND_BITS_MAX:
                raise self._refuse(place, "it cannot be kept exactly, since it is beyond 2**53: name a nearer bound")
        elif name in ("maximum", "exclusiveMaximum") and isinstance(value, int | float):
            self._number(value, place)
        elif name in ("minimum", "exclusiveMinimum") and _is_number(value) and value > BOUND_MAX:
            raise self._refuse(place, f"only lower bounds of at most {BOUND_MAX} are supported, name a smaller one")
        elif name == "format" and str(value) in _UNKEPT_FORMATS:
            raise self._refuse(place, f"the format {value!r} is not supported, use a pattern")
        elif name == "format" and str(value) not in _FORMATS:
            return  # a name that JSON Schema does not define constrains nothing
        elif name in ("minLength", "maxLength") and _is_number(value) and value > LENGTH_MAX:
            if name == "minLength":
                raise self._refuse(place, f"no answer is longer than {LENGTH_MAX} characters, name a smaller number")
            return  # and none is too long
        elif name == "multipleOf" and not _small_multiple(value):
            raise self._refuse(place, f"only a positive number of at most {MULTIPLE_MAX}, without its point, is supported")
        elif isinstance(value, str) and len(value) > VALUE_CHARACTERS_MAX:
            raise self._refuse(place, f"its text has more than {VALUE_CHARACTERS_MAX} characters, shorten it")
        yield name, value

    def _check_required(self, kept: dict[str, Any], path: str) -> None:
        required = kept.get("required", [])
        if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
            raise self._refuse(_join(path, "required"), "it is a list of names")

    def _check_least(self, kept: dict[str, Any], path: str) -> None:
        """Bound a number of properties that repeated names could reach."""
        open_ended = kept.get("additionalProperties", True) is not False or "patternProperties" in kept
        least = kept.get("minProperties", 0)
        if open_ended and isinstance(least, int | float) and least > len({*kept.get("required", ())}) + 1:
            raise self._refuse(
                path,
                "'minProperties' is only supported up to one more than 'required' where names are open, name the properties",
            )

    def _check_names(self, kept: dict[str, Any], path: str) -> None:
        """Bounds on names, which cost more than linear time."""
        required = {*kept.get("required", ())}
        names = {*required, *kept.get("properties", {}), *kept.get("patternProperties", {})}
        for name in names:
            self._value(name, path, 0)
        self._names_count += len(names)
        if len(names) > NAMES_IN_OBJECT_MAX or self._names_count > NAMES_MAX:
            raise self._refuse(
                path, f"at most {NAMES_IN_OBJECT_MAX} properties in an object and {NAMES_MAX} in all are supported, name fewer"
            )
        if len(names) - len(required) > OPTIONAL_MAX:
            raise self._refuse(
                path, f"at most {OPTIONAL_MAX} optional properties in an object are supported, require some or name fewer"
            )

    def _value(self, value: Any, place: str, depth: int) -> None:
        """Check a constant: how deep it is, and its texts."""
        if depth > DEPTH_MAX:
            raise self._refuse(place, f"its value is nested more than {DEPTH_MAX} deep, make it flatter")
        if isinstance(value, str):
            if len(value) > VALUE_CHARACTERS_MAX:
                raise self._refuse(place, f"a text has more than {VALUE_CHARACTERS_MAX} characters, shorten it")
            if _CONTROL.search(value):
                raise self._refuse(place, "a text holds a control character, leave it out")
        elif isinstance(value, Mapping):
            for key, each in value.items():
                self._value(key, place, depth + 1)
                self._value(each, place, depth + 1)
        elif isinstance(value, list | tuple):
            for each in value:
                self._value(each, place, depth + 1)
        elif isinstance(value, int):
            if not self._exact:
                self._number(value, place)
            if is_inexact(value) and not (self._exact and value.bit_length() < INTEGER_BITS_MAX):
                raise self._refuse(place, "a number in it cannot be kept exactly, since it is beyond 2**53: make it a string")

    def _number(self, value: float, place: str) -> None:
        if value < INTEGER_MIN:
            raise self._refuse(place, f"only numbers of {INTEGER_MIN} and more are supported, name a larger one")

    def _object(self, value: Any, place: str) -> Iterable[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            raise self._refuse(place, "it is an object of schemas")
        return value.items()

    def _list(self, value: Any, place: str) -> Iterable[tuple[int, Any]]:
        if not isinstance(value, list | tuple):
            raise self._refuse(place, "it is a list of schemas")
        return enumerate(value)

    def _reference(self, value: Any, place: str) -> int:
        """The number of the definition that a reference leads to."""
        if not isinstance(value, str) or not re.match(r"#(/|$)", value):
            raise self._refuse(place, "only a reference into the schema itself (#/...) is supported")
        self._target(value)
        return self._numbers.setdefault(value, len(self._numbers))

    def _target(self, pointer: str) -> Any:
        """What a JSON pointer (RFC 6901) in a URI fragment leads to."""
        target: Any = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise self._refuse(_dotted(pointer), f"the reference {pointer[:100]!r} leads nowhere")
        return target


def _admits_nothing(schema: Mapping[str, Any]) -> bool:
    """Whether it forbids every value, as zod's `never` does."""
    return "not" in schema and schema["not"] in (True, {})


def _is_idle(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword that is not supported constrains nothing as it stands."""
    match name:
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "not":
            return value is False or (isinstance(value, Mapping) and _admits_nothing(value))
        case "propertyNames":
            return value in (True, {}) or (isinstance(value, Mapping) and {*value} <= _IDLE_OF_NAMES and _wants_text(value))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value == {} or (isinstance(value, Mapping) and all(each in ([], {}, True) for each in value.values()))
        case "unevaluatedItems" | "unevaluatedProperties":
            return value in (True, {})
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or (name == "minContains" and value == 0 and "maxContains" not in schema)
        case "if":
            return all(schema.get(each, True) in (True, {}) for each in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or value in (True, {})
    return False


def _wants_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _with_sound_bounds(kept: dict[str, Any]) -> dict[str, Any]:
    """The bounds of numbers, so that llguidance lets no number through that breaks them. It takes a whole exclusive
    bound for an inclusive one where the other bound, here or in a schema that is joined with this one, has the same whole part, so
    these become inclusive ones STEP away or, beside a nearer bound, less. It reads them as float64: see `is_beyond`."""
    found = dict(kept)
    for names, others, sign in ((LOWER, UPPER, 1), (UPPER, LOWER, -1)):
        inclusive, exclusive = names
        bound = found.get(exclusive)
        if kept.get("type") == "integer" or not _is_number(bound) or bound != int(bound):
            continue
        inner = _beside(bound, [found[name] for name in others if _is_number(found.get(name))], sign)
        del found[exclusive]
        known = found.get(inclusive)
        found[inclusive] = sign * max(sign * inner, sign * known) if _is_number(known) else inner
    return found


LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = LOWER + UPPER


def _is_number(value: object) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)))


def is_beyond(bound: object) -> bool:
    """Whether a bound is an integer that llguidance may take for another one."""
    return isinstance(bound, int) and abs(bound) > 2**53


def _beside(bound: float, others: list[float], sign: int) -> float:
    """A number just inside of a bound, and of the others."""
    step, whole = STEP, Decimal(str(bound))
    for other in others:
        room = sign * (Decimal(str(other)) - whole)
        if room > 0:
            step = min(step, room.scaleb(-3))
    inner = float(whole + sign * step)
    return inner if inner != bound else math.nextafter(bound, sign * math.inf)


def dumps(schema: Schema) -> str:
    """The schema's JSON text. Raises ValueError for numbers that JSON cannot write."""
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _levels(root: Schema, definitions: Mapping[str, Schema]) -> int:
    """An upper bound on the nested schemas of a path through references. Definitions that refer to each other in a circle
    count as one path."""
    heights = {name: _height(schema) for name, schema in definitions.items()}
    following = {name: definitions.keys() & _references(schema) for name, schema in definitions.items()}
    sorter, reach = TopologicalSorter(following), dict[str, int]()
    try:
        sorter.prepare()
    except CycleError:
        pass  # what does not lead into a circle is still sorted
    while ready := sorter.get_ready():
        for name in ready:
            reach[name] = heights[name] + max((reach[after] for after in following[name]), default=0)
        sorter.done(*ready)
    circle = sum(heights[name] for name in definitions.keys() - reach.keys())
    return _height(root) + circle + max(reach.values(), default=0)


def _endless(definitions: Mapping[str, Schema]) -> set[str]:
    """Those that admit no finite value, because each of their values contains another one."""
    ends = set[str]()
    for _ in range(CIRCLES_MAX):
        found = {name for name in definitions.keys() - ends if _ends(definitions[name], ends)}
        if not found:
            return definitions.keys() - ends
        ends |= found
    return set()


def _ends(schema: object, known: Collection[str]) -> bool:
    """Whether it admits a finite value, as far as the definitions among `known` do."""
    if not isinstance(schema, dict):
        return True
    inner = [*schema.get("allOf", ())]
    if schema.get("type") == "object":
        inner += [schema.get("properties", {}).get(name) for name in schema.get("required", ())]
    elif schema.get("type") == "array" and schema.get("minItems") and "prefixItems" not in schema:
        inner.append(schema.get("items"))
    reference = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    either = [schema[name] for name in ("anyOf", "oneOf") if schema.get(name)]
    return (not reference or reference in known) and all(_ends(each, known) for each in inner) and all(
        any(_ends(each, known) for each in one) for one in either
    )


def _inner(schema: object) -> Iterable[object]:
    return schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()


def _height(schema: object) -> int:
    return 1 + max(map(_height, _inner(schema)), default=0)


def _references(schema: Any) -> Iterator[str]:
    for each in _inner(schema):
        yield from _references(each)
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        yield reference.removeprefix("#/$defs/")


def is_inexact(value: object) -> bool:
    """Whether a constant is an integer that llguidance takes for another one, or holds one."""
    if isinstance(value, Mapping):
        return any(map(is_inexact, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_inexact, value))
    return isinstance(value, int) and (not INTEGER_MIN <= value <= BOUND_MAX or int(float(value)) != value)


def _small_multiple(value: object) -> bool:
    """Whether the digits of a multiple make a small number: their automaton has a state for each remainder."""
    try:
        digits = Decimal(str(value)).normalize().as_tuple()
    except InvalidOperation:
        return False
    number = int("".join(map(str, digits.digits)))
    exponent = digits.exponent if isinstance(digits.exponent, int) else 10
    return not digits.sign and 0 < number and -10 < exponent < 5 and number * 10 ** max(exponent, 0) <= MULTIPLE_MAX


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dotted(pointer: str) -> str:
    return pointer.removeprefix("#/").replace("/", ".").removeprefix("#")
