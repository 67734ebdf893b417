"""Renaming: errors of a chat in the names that the client of another API sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

from vnext.runtime.protocol.sampling_params import InvalidRequest

SCORING = (r", or 0 with prompt_logprobs, to score a prompt only", "")
"""What only OpenAI's older APIs have."""
Names = Sequence[tuple[str, str]]
"""(regular expression of a chat's name, the client's name), tried in order."""


@contextmanager
def in_names(names: Names) -> Iterator[None]:
    """Raise an InvalidRequest of the body with the client's names in its sentence and as its param."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names) from error


def renamed(error: InvalidRequest, names: Names) -> InvalidRequest:
    """The same error with the client's names. A param changes by the first name that fits all of its beginning."""
    changed = copy(error)
    for pattern, name in names:
        begins = r"(?<![\w.'])" if pattern[0].isalpha() else ""
        changed.message = re.sub(rf"{begins}{pattern}(?!\w)", name, changed.message)
    for pattern, name in names:
        if error.param and re.match(rf"{pattern}(?!\w)", error.param):
            changed.param = re.sub(rf"^{pattern}", name, error.param)
            break
    return changed
