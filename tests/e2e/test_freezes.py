"""A process that is stopped for a while is silent, and silence is no end."""

from __future__ import annotations

import pytest
from serving import ROOT


def test_streams_outlive_an_engine_core_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the freezes of scripts/freeze.py, which has the others, and longer ones."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from freeze import STREAMS, TOKENS, freeze

    frozen = freeze("engine core", 7.5)
    assert frozen.wrong == "" and frozen.tokens == STREAMS * TOKENS
    assert 4 < frozen.unhealthy_after_s
