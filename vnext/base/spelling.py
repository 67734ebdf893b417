"""Spelling: the known name that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.82
"""The similarity of two names at which one is suggested for the other: --stream-interval must not suggest --digest-interval."""


def close_to(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str:
    """The name in `known` that `name` is a misspelling of, "" for none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")
