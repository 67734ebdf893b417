"""Depth: how many lists and objects lie within each other in the values that a schema describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vnext.text.structured.json_schema import Members, Schema


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
