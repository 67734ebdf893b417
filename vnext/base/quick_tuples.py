"""Quick tuples: classes of named tuples without a check of each field's annotation, which `typing` compiles for it, and without the
source that `collections` compiles for each: names are put into the code of another one of as many fields. Processes that vnext
starts import within `quick_tuples`, programs that use vnext as ever.
"""

from __future__ import annotations

import collections
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

_usual = typing.NamedTuple
_USUAL_BASE = _usual.__mro_entries__((_usual,))[0]  # type: ignore[attr-defined]
_TAKEN = ("__module__", "__annotations__")
_SOURCE = "lambda _cls, {0}: _tuple_new(_cls, ({0}))"  # of what makes a tuple, as `collections` writes it


@cache
def _code(count: int) -> types.CodeType:
    made = _usually(_SOURCE.format("".join(f"_{at}," for at in range(count))), {})
    return cast(types.FunctionType, made).__code__


def _usually(source: str, names: dict[str, object]) -> object:
    return eval(compile(source, "<string>", "eval", dont_inherit=True), names)


def _evaluated(source: str, names: dict[str, object]) -> object:
    """What `eval` makes of such source, and of any other."""
    fields = source.removeprefix("lambda _cls, ").partition(":")[0]
    if source != _SOURCE.format(fields):
        return _usually(source, names)
    arguments = [each.strip() for each in fields.split(",") if each]
    return types.FunctionType(_code(len(arguments)).replace(co_varnames=("_cls", *arguments)), names)


_named = types.FunctionType(collections.namedtuple.__code__, vars(collections) | {"eval": _evaluated})
"""`namedtuple`, which evaluates so."""


class _Maker(type):
    """The metaclass of one class, whose subclasses are made as what `typing` would make of them."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> type:
        fields = cast(dict[str, object], namespace.get("__annotations__", {}))
        optional = [field for field in fields if field in namespace]
        if not fields or [*fields][len(fields) - len(optional) :] != optional:  # for `typing` to refuse, or of a later Python
            return types.new_class(name, (_USUAL_BASE,), exec_body=lambda own: own.update(namespace))
        defaults, module = [namespace[field] for field in optional], cast(str, namespace["__module__"])
        made = _named(name, fields, rename=False, defaults=defaults, module=module)
        made.__annotations__ = made.__new__.__annotations__ = fields
        for key, value in namespace.items():
            if key not in _TAKEN and key not in fields:
                setattr(made, key, value)
        return cast(type, made)


def _quick(name: str, fields: list[tuple[str, type]]) -> object:
    made = _usual(name, fields)
    made.__module__ = sys._getframe(1).f_globals["__name__"]
    return made


def _bases(bases: tuple[object, ...]) -> tuple[type, ...]:
    return (_BASE,) if len(bases) == 1 else (_USUAL_BASE,)


_BASE = type.__new__(_Maker, "NamedTuple", (), {})
_quick.__mro_entries__ = _bases  # type: ignore[attr-defined]


@contextmanager
def quick_tuples() -> Iterator[None]:
    """Modules that are imported in the block make their named tuples so."""
    vars(typing)["NamedTuple"] = _quick
    try:
        yield
    finally:
        vars(typing)["NamedTuple"] = _usual
