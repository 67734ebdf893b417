"""The schema digest: one number that changes when the types in the log change.

Owns the description of the event types by name, tag, fields, types and defaults; words in docstrings do not count.
A log of another schema is not refused for it: records only grow at the end.
"""

from __future__ import annotations

import typing
from functools import cache

import msgspec
import xxhash

from vnext.state.events import AnyEvent


@cache
def schema_digest() -> int:
    """xxh3_64 of `describe()` (uint64); types do not change in a process."""
    return xxhash.xxh3_64_intdigest(describe().encode())


def describe() -> str:
    """One line for each struct that an event can hold, in order of first mention."""
    found: dict[type[msgspec.Struct], str] = {}
    for event_type in typing.get_args(AnyEvent):
        _collect(event_type, found)
    return "\n".join(found.values())


def _collect(struct_type: type[msgspec.Struct], found: dict[type[msgspec.Struct], str]) -> None:
    if struct_type in found:
        return
    fields = msgspec.structs.fields(struct_type)
    parts = ", ".join(f"{field.encode_name}: {_type_name(field.type)}{_default(field)}" for field in fields)
    found[struct_type] = f"{struct_type.__name__}[{struct_type.__struct_config__.tag}]({parts})"
    for field in fields:
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            _collect(field.type, found)


def _type_name(annotation: object) -> str:
    """A name that does not depend on the Python version's way of printing types."""
    arguments = typing.get_args(annotation)
    if arguments:
        origin = typing.get_origin(annotation)
        return f"{getattr(origin, '__name__', origin)}[{', '.join(map(_type_name, arguments))}]"
    return annotation.__name__ if hasattr(annotation, "__name__") else repr(annotation)


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "" if field.default is msgspec.NODEFAULT else f" = {field.default!r}"
