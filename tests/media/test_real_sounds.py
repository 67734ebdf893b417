"""Whisper base with its real weights writes what espeak-ng says. Skipped where they were not fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from perf.whisper import MODEL, SENTENCES, by_vnext, error_rate, spoken

pytestmark = [
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason=f"no {MODEL}: `python -m perf.whisper --fetch` fetches 150 MB"),
    pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is missing: apt-get install espeak-ng"),
]


@pytest.mark.parametrize("timed", [False, True])
def test_sentences_are_understood(timed: bool, tmp_path: Path) -> None:
    texts = by_vnext(spoken(SENTENCES[:5], tmp_path), 1, timed).texts
    assert error_rate(SENTENCES[:5], texts) <= 20, texts
    assert error_rate(SENTENCES[5:10], texts) > 90
