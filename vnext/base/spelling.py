"""Words of sentences for people: the known name that a user may have meant, and what an error says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import msgspec

CUTOFF = 0.82
"""The similarity of two names at which one is suggested for the other: --stream-interval must not suggest --digest-interval."""
Made = TypeVar("Made", bound=msgspec.Struct)
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


class Suggesting(msgspec.StructMeta):
    """The class of structs that programs make by keywords: TypeError for an unknown one names the field that may be meant."""

    def __call__(cls: type[Made], *args: object, **fields: object) -> Made:  # type: ignore[misc]  # a class is one of a struct
        try:
            return super().__call__(*args, **fields)  # type: ignore[misc, no-any-return]
        except TypeError:
            known: tuple[str, ...] = cls.__struct_fields__
            if not (wrong := [name for name in fields if name not in known]):
                raise
            close = close_to(wrong[0], known)
            remedy = f"did you mean {close}?" if close else f"its fields are {', '.join(known)}."
            raise TypeError(f"{cls.__name__} has no field {wrong[0]}: {remedy}") from None


def reason(error: BaseException, *, with_file: bool = False) -> str:
    """What an error says, for the inside of a sentence: of an OSError the system's words without their number, and without the
    file unless asked, for most sentences name it themselves."""
    words = getattr(error, "strerror", None)
    if not isinstance(error, OSError) or not isinstance(words, str):
        return str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {words}" if with_file and isinstance(error.filename, str | bytes) else words
