"""Tables on a narrow terminal, and in a pipe, which has no width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from vnext.replay.console.commands import PIPE_WIDTH, terminal
from vnext.replay.console.render import records

FIELDS = ("client", "requests", "tokens", "share", "waited s", "held up s", "first ms", "99 %", "largest")
ROW: dict[str, Any] = dict(zip(FIELDS, ("3acaffe4", "1", "346", "100.0%", "0.0", "0.0", "45", "45", "0")))


def printed(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    records(console, "clients", FIELDS, [ROW])
    return [line for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 200])
def test_no_word_of_a_table_is_broken(width: int) -> None:
    _, head, rule, row = printed(width)
    assert all(field in head for field in FIELDS) and all(cell in row for cell in ROW.values())
    assert max(map(len, (head, rule, row))) <= width


def test_a_table_stands_close_only_where_it_must() -> None:
    assert len(printed(200)[2].strip()) > 80 > len(printed(80)[2].strip())


def test_a_pipe_is_wide_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal().width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "70")
    assert terminal().width == 70
