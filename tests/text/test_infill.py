"""Infill: which models fill a gap, and the prompt that each takes."""

from __future__ import annotations

import pytest

from vnext.text.infill import infill_of

NAMES = {
    "<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<fim_prefix>": 4, "<fim_suffix>": 5, "<fim_middle>": 6,
    "<｜fim▁begin｜>": 7, "<｜fim▁hole｜>": 8, "<｜fim▁end｜>": 9, "[PREFIX]": 10, "[SUFFIX]": 11,
    "<|code_prefix|>": 12, "<|code_suffix|>": 13, "<|code_middle|>": 14,
}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((1, 2, 3), [0, 1, 70, 71, 2, 80, 3]),
        ((4, 5, 6), [0, 4, 70, 71, 5, 80, 6]),
        ((7, 8, 9), [0, 7, 70, 71, 8, 80, 9]),
        ((12, 13, 14), [0, 12, 70, 71, 13, 80, 14]),
        ((10, 11), [0, 11, 80, 10, 70, 71]),
    ],
)
def test_a_model_s_own_tokens_mark_the_gap(ids: tuple[int, ...], expected: list[int]) -> None:
    infill = infill_of({name: id_ for name, id_ in NAMES.items() if id_ in ids}.get)
    assert infill is not None and infill.joined([0], [70, 71], [80]) == expected


@pytest.mark.parametrize("ids", [(), (1, 2), (1, 3), (2, 3), (10,), (1, 5, 9)])
def test_half_of_the_tokens_is_none(ids: tuple[int, ...]) -> None:
    assert infill_of({name: id_ for name, id_ in NAMES.items() if id_ in ids}.get) is None
