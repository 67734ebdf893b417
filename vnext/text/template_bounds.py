"""Template bounds: Jinja's sandbox with limits on what one expression of a template may make.

Owns the sizes. A template's loops are ended by the clock (`template`); one call in C cannot be, so what it would make is judged
before: products, sums, paddings, replacements, joins. The error is the client's, in one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SIZE_MAX = 2**25
"""Characters or elements, as many as the largest body has bytes: 10 to 100 ms of computing."""
BITS_MAX = 2**16
WIDTH_MAX = 10_000
"""For numbers that a template gives to functions, filters and formats: widths, indents, counts."""
CONCAT = "vnext_concat"
_WIDE = re.compile(r"\d{5}|\*")
_MEASURED = ("replace", "join", "expandtabs")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no expression makes a value beyond the sizes above. Raises TemplateError where one would."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        """`filters`: besides Jinja's own, or in their place."""
        super().__init__(**options)
        self.filters = {name: _bounded(name, function) for name, function in (self.filters | filters).items()}
        self.globals[CONCAT] = _concat
        del self.globals["lipsum"]  # makes texts of any length

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check(_made_by(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as the base class)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int):
            args = _listed(args)
            _check_call(name, (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def bound_concatenations(tree: nodes.Template) -> None:
    """Have each `a ~ b` of a template judged too."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, _judged(value))
            elif isinstance(value, list):
                value[:] = [_judged(each) if isinstance(each, nodes.Concat) else each for each in value]


def within(pieces: Iterable[str]) -> str:
    """The text of a template's pieces. Raises TemplateError where it is too long."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > SIZE_MAX:
            _check(size)
        kept.append(piece)
    return "".join(kept)


def _judged(concat: nodes.Concat) -> nodes.Call:
    return nodes.Call(nodes.Name(CONCAT, "load", lineno=concat.lineno), concat.nodes, [], None, None, lineno=concat.lineno)


def _concat(*values: Any) -> str:
    return within(map(str, values))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which may need the context or the environment before its value."""
    offset = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        args = args[:offset] + _listed(args[offset:])
        _check_call(name, args[offset:], kwargs)
        return function(*args, **kwargs)

    return checked


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Iterators as lists, because measuring them takes them."""
    return tuple(list(each) if isinstance(each, Iterator) else each for each in args)


def _check_call(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Judge a method or a filter by the value it is of, and what it is given."""
    value, given = (values[0] if values else ""), (*values[1:], *options.values())
    if any(isinstance(each, int) and abs(each) > WIDTH_MAX for each in given):
        raise jinja2.TemplateError(f"it gives {name} a number beyond {WIDTH_MAX}")
    if name in ("format", "format_map") and isinstance(value, str) and _WIDE.search(value):
        raise jinja2.TemplateError("it asks for a format of too great a width")
    if name in _MEASURED and isinstance(value, Sized):
        longest = max((len(str(each)) for each in given), default=0) if name != "join" else 0
        _check(_joined(value, given) if name == "join" else len(value) + (len(value) + 1) * longest if longest > 1 else 0)


def _joined(value: Any, given: tuple[Any, ...]) -> int:
    """What the method (of the separator) or the filter (of the list) makes."""
    items, separator = (given[0] if given else (), value) if isinstance(value, str) else (value, given[0] if given else "")
    if not isinstance(items, Collection) or not isinstance(separator, str):
        return 0
    return sum(len(each) for each in items if isinstance(each, str)) + len(items) * len(separator)


def _made_by(operator: str, left: Any, right: Any) -> int:
    """The size of a result: characters, elements, or as many as a number of too many bits would count for."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return SIZE_MAX + 1 if bits > BITS_MAX else 0
    if operator == "*":
        sized, times = (left, right) if isinstance(left, Sized) else (right, left)
        return len(sized) * times if isinstance(sized, Sized) and isinstance(times, int) else 0
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        return SIZE_MAX + 1
    return len(left) + len(right) if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized) else 0


def _check(size: int) -> None:
    if size > SIZE_MAX:
        raise jinja2.TemplateError(f"it makes a text or a list of more than {SIZE_MAX} parts, or a number as large")
