"""Repeated keys of a YAML file: YAML forbids them, and its readers take the last one without a word."""

from __future__ import annotations

from typing import NamedTuple


class Repeated(NamedTuple):
    """A key that a mapping has twice, and the lines of both, from 1."""

    key: str
    lines: tuple[int, int]

    def where(self) -> str:
        first, second = self.lines
        return f"line {first}" if first == second else f"lines {first} and {second}"


def repeated_key(text: str | bytes) -> Repeated | None:
    """The first key in the order of the text that its mapping has already; None where all are there once. Raises yaml.YAMLError,
    RecursionError."""
    import yaml  # takes a tenth of a second, and only a start with a file needs it

    waiting, seen = [yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))], set()
    found = []
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # aliases name a node again, perhaps from within
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            waiting += node.value
            continue
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, value in node.value:
            waiting.append(value)
            if isinstance(key, yaml.ScalarNode) and (before := first.setdefault((key.tag, key.value), key)) is not key:
                found.append(Repeated(key.value, (before.start_mark.line + 1, key.start_mark.line + 1)))
    return min(found, key=lambda each: each.lines[1], default=None)
