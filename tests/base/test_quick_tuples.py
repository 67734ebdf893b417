"""Tests of quick tuples: the classes are what `typing` makes of the same source."""

from __future__ import annotations

import typing
from typing import Any, NamedTuple, TypeVar

import pytest

from vnext.base.quick_tuples import _evaluated, quick_tuples

T = TypeVar("T")
SOURCE = '''
from typing import Generic, NamedTuple, TypeVar
T = TypeVar("T")

class Plain(NamedTuple):
    """A docstring."""

    number: int
    word: str | None = None

    @property
    def twice(self) -> int:
        return 2 * self.number

    @classmethod
    def of(cls, number: int) -> Plain:
        return cls(number)

    def __str__(self) -> str:
        return f"<{self.number}>"

class Empty(NamedTuple):
    pass

class Several(NamedTuple, Generic[T]):
    one: T

class Heir(Plain):
    def thrice(self) -> int:
        return 3 * self.number

Called = NamedTuple("Called", [("number", int)])
'''
OWN = {"__annotations__", "__orig_bases__", "__parameters__"}  # the last two have classes of the source in them
CLASSES = ("Plain", "Empty", "Several", "Heir", "Called")


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile("from __future__ import annotations\n" + source, "quick", "exec"), names)
    return names


def seen(made: type) -> dict[str, Any]:
    """What a program sees of a class."""
    plain = {name: value for name, value in vars(made).items() if isinstance(value, str | tuple | dict) and name not in OWN}
    hints = typing.get_type_hints(made, {"Plain": None, "T": T})
    bases = [each.__name__ for each in made.__mro__]
    return {"names": {*vars(made)} - OWN, "hints": hints, "bases": bases, "plain": plain}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_what_typing_makes(name: str) -> None:
    usual = run(SOURCE)
    with quick_tuples():
        quick = run(SOURCE)
    assert seen(quick[name]) == seen(usual[name])


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_made_by_the_same_code(name: str) -> None:
    usual = run(SOURCE)[name].__new__
    with quick_tuples():
        quick = run(SOURCE)[name].__new__
    names = ("__name__", "__qualname__", "__doc__", "__defaults__", "__kwdefaults__", "__module__", "__builtins__")
    assert [getattr(quick, each) for each in names] == [getattr(usual, each) for each in names]
    codes = ("co_code", "co_consts", "co_names", "co_varnames", "co_argcount", "co_name", "co_filename", "co_stacksize", "co_flags")
    assert [getattr(quick.__code__, each) for each in codes] == [getattr(usual.__code__, each) for each in codes]
    assert quick.__globals__ == usual.__globals__


def test_other_source_is_evaluated() -> None:
    assert _evaluated("number + 1", {"number": 2}) == 3
    other = _evaluated("lambda _cls, a: _tuple_new(_cls, (a, a))", {"_tuple_new": tuple.__new__})
    assert callable(other) and other(tuple, 4) == (4, 4)


def test_its_values() -> None:
    with quick_tuples():
        plain = run(SOURCE)["Plain"]
    assert (plain.of(2), plain.of(2).twice, str(plain(3, "a")), plain(number=4)._asdict()) == ((2, None), 4, "<3>", {"number": 4, "word": None})
    with pytest.raises(TypeError, match="number"):
        plain()


@pytest.mark.parametrize("wrong", ["class A(NamedTuple):\n    one: int = 0\n    two: int", "class A(NamedTuple):\n    _one: int"])
def test_what_typing_refuses_is_refused(wrong: str) -> None:
    with quick_tuples(), pytest.raises((TypeError, ValueError)):
        run(f"from typing import NamedTuple\n{wrong}")


def test_afterwards_all_is_as_before() -> None:
    usual = NamedTuple
    with pytest.raises(ZeroDivisionError), quick_tuples():
        assert typing.NamedTuple is not usual
        raise ZeroDivisionError
    assert typing.NamedTuple is usual
