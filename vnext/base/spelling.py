"""Words of sentences for people: the known name that a user may have meant, and what an error says."""

from __future__ import annotations

import os
from collections.abc import Iterable

CUTOFF = 0.82
"""The similarity of two names at which one is suggested for the other: --stream-interval must not suggest --digest-interval."""
BEGUN_MIN = 6
"""Letters of a name left unfinished."""


def close_to(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str:
    """The name in `known` that `name` is a misspelling of, or alone begins with several letters of it, or alone ends in the words
    of this option; "" for none."""
    import difflib

    known = list(known)
    begun = [each for each in known if each.startswith(name)] if len(name) >= BEGUN_MIN else []
    ended = [each for each in known if each.endswith(name[1:])] if name.startswith("--") else []
    alone = next((found[0] for found in (begun, ended) if len(found) == 1), "")
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), alone)


def reason(error: BaseException, *, with_file: bool = False) -> str:
    """What an error says, for the inside of a sentence: of an OSError the system's words without their number, and without the
    file unless asked, for most sentences name it themselves."""
    words = getattr(error, "strerror", None)
    if not isinstance(error, OSError) or not isinstance(words, str):
        return str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {words}" if with_file and isinstance(error.filename, str | bytes) else words
