"""Fields: decides by `field_table` about fields of a body that its struct does not name.

A field with an empty value (null, false, "", "none", "auto", an empty list or object), or its usual one, passes. A field that would
change an answer, but is not supported here, is refused with a sentence that states the remedy; so is a field that looks
misspelt. Any other field is meant for another program: it passes, with a log line at the level debug.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.http.field_table import REFUSED, asks_for_nothing, verdict

NESTED = ("stream_options", "messages")
LIKENESS_MIN, WORD_LIKENESS_MIN, JOINED_LIKENESS_MIN = 0.8, 0.7, 0.9
CANDIDATES_MAX = 5
UNKNOWN_MAX = 64  # names in one body: each takes some ten microseconds
VALUE_BYTES_MAX = 64  # every value that changes nothing is shorter

log = logging.getLogger("vnext.server")


def without_unknown(data: bytes | bytearray, kind: type[msgspec.Struct]) -> bytes:
    """The JSON object without the fields that are unknown to `kind` and the structs in it. Raises InvalidRequest for a
    refused field, DecodeError for invalid JSON."""
    judge = _Judge()
    known = judge.known(msgspec.Raw(data), kind, "")
    log.debug("passed over fields that mean nothing here: %s", judge)
    return bytes(known)


class _Judge:
    """One body's unknown fields. Mutable."""

    def __init__(self) -> None:
        self._passed: set[tuple[type[msgspec.Struct], str]] = set()

    def __str__(self) -> str:
        return ", ".join(sorted({ascii(name[:64]) for _, name in self._passed}))

    def known(self, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> msgspec.Raw:
        """The known fields of an object; the strict decoder refuses values that are no object."""
        if not bytes(raw).lstrip().startswith(b"{"):
            return raw
        kept = {}
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            if name not in kind.__struct_fields__:
                self._judge(kind, name, value, path)
            elif name in NESTED and (inner := _struct_in(kind, name)):
                kept[name] = self._inside(value, inner, f"{path}{name}")
            else:
                kept[name] = value
        return msgspec.Raw(msgspec.json.encode(kept))

    def _inside(self, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> msgspec.Raw:
        """A field's value: an object, or a list of them."""
        if not bytes(raw).lstrip().startswith(b"["):
            return self.known(raw, kind, f"{path}.")
        entries = msgspec.json.decode(raw, type=list[msgspec.Raw])
        known = [self.known(entry, kind, f"{path}[{place}].") for place, entry in enumerate(entries)]
        return msgspec.Raw(msgspec.json.encode(known))

    def _judge(self, kind: type[msgspec.Struct], name: str, raw: msgspec.Raw, path: str) -> None:
        if (kind, name) in self._passed:
            return
        if len(bytes(raw)) <= VALUE_BYTES_MAX and asks_for_nothing(name, msgspec.json.decode(raw)):
            return
        param, fields = f"{path}{name[:200]}", kind.__struct_fields__
        remedy = REFUSED.get(re.sub(r"\d+", "", param)) if path else verdict(name, fields)
        if remedy:
            raise InvalidRequest(f"{param} is not supported here: {remedy}.", param)
        if remedy is None and (meant := _meant(name, fields)):
            raise InvalidRequest(f"{param} is not a field of this request. Did you mean {meant}?", param)
        self._passed.add((kind, name))
        if len(self._passed) > UNKNOWN_MAX:
            raise InvalidRequest(f"The body has more than {UNKNOWN_MAX} fields that this server does not know: leave them out.")


def _meant(name: str, fields: Iterable[str]) -> str | None:
    """The field that `name` is a misspelling of, such as topP, max-tokens or temprature; None for none. A name with a word more,
    or another one, is another program's field: temperature_last, thread_id."""
    words = _words(name[:64])
    plain = {field.replace("_", ""): field for field in fields}
    close = difflib.get_close_matches("".join(words), plain, n=CANDIDATES_MAX, cutoff=LIKENESS_MIN)
    return next((plain[each] for each in close if _is_like(words, plain[each].split("_"))), None)


def _words(name: str) -> list[str]:
    """Its words in lower case, however they are told apart."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower().strip("_").split("_")


def _is_like(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether both have the same words but for letters, or one has them without gaps."""
    one, other = "".join(words), "".join(others)
    if one == other:
        return True
    if len(words) != len(others):
        return len(words) == 1 and difflib.SequenceMatcher(None, one, other).ratio() >= JOINED_LIKENESS_MIN
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= WORD_LIKENESS_MIN for pair in zip(words, others))


@cache
def _struct_in(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    """The struct that a field holds, alone or in a list."""
    of_field = next(field.type for field in msgspec.inspect.type_info(kind).fields if field.name == name)
    inner = [getattr(each, "item_type", each) for each in getattr(of_field, "types", (of_field,))]
    return next((each.cls for each in inner if isinstance(each, msgspec.inspect.StructType)), None)
