"""Keys that a YAML file says twice."""

from __future__ import annotations

import pytest

from vnext.base.repeated import Repeated, repeated_key


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("a: 1\nb: {a: 2}\nc: [{a: 1}, {a: 2}]", None),
        ("1: a\n'1': b", None),  # a number and a text
        ("a: 1\nb: 2\na: 1", Repeated("a", (1, 3))),
        ("a: 1\n'a': 2", Repeated("a", (1, 2))),
        ("- {a: 1, a: 2}", Repeated("a", (1, 1))),
        ("x:\n  - y:\n      b: 1\n      b: 2\nx: 3", Repeated("b", (3, 4))),
        ("a: &here [*here]\nb: *here", None),  # a list in itself
        ("a: &here {c: *here}\nb: *here\nb: 1", Repeated("b", (2, 3))),
    ],
)
def test_the_first_key_that_its_mapping_has_already(text: str, found: Repeated | None) -> None:
    assert repeated_key(text) == repeated_key(text.encode()) == found


def test_its_place_in_words() -> None:
    assert (Repeated("a", (1, 3)).where(), Repeated("a", (2, 2)).where()) == ("lines 1 and 3", "line 2")
