"""What a request asks of its answer's form: the kinds of StructuredOutputsParams. grammar.py reads one, with llguidance."""

from __future__ import annotations

from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for: one of KINDS, or "calls" (a dialect's grammar), and its value, how JSON is written, and the path
    of the field, for errors."""

    kind: str
    value: Any
    path: str
    options: StructuredOutputsParams = StructuredOutputsParams()


def asked_of(params: StructuredOutputsParams, path: str = "structured_outputs") -> Asked:
    """What `params` ask for. Raises InvalidRequest unless they name exactly one kind."""
    kinds = [kind for kind in KINDS if getattr(params, kind) not in (None, False)]
    if len(kinds) != 1:
        given = f"has {' and '.join(kinds)}" if kinds else "has none of its kinds"
        raise InvalidRequest(f"{path} {given}: set exactly one of {', '.join(KINDS)}.", path)
    return Asked(kind=kinds[0], value=getattr(params, kinds[0]), path=f"{path}.{kinds[0]}", options=params)
