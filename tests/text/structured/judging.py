"""Judging: whether a text is JSON that a schema admits, by the package `jsonschema` and with exact numbers."""

from __future__ import annotations

import decimal
import json
from typing import Any

import jsonschema

_EXACT = decimal.Context(prec=1_000)
# The shapes of dates and times are kept; that year 0 is none, and which offsets there are, are rules beyond them.
_FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))


class Judge:
    """Judges texts by one schema. Raises jsonschema.SchemaError for what is no schema."""

    def __init__(self, schema: Any) -> None:
        jsonschema.Draft202012Validator.check_schema(schema)
        self._validator = jsonschema.Draft202012Validator(_loaded(json.dumps(schema)), format_checker=_FORMATS)

    def error(self, text: str) -> str:
        """Why the schema does not admit the text; "" if it does."""
        with decimal.localcontext(_EXACT):
            try:
                found = next(self._validator.iter_errors(_loaded(text)), None)
            except json.JSONDecodeError as error:
                return str(error)
        return "" if found is None else found.message


def _loaded(text: str) -> Any:
    return json.loads(text, parse_float=_number)


def _number(text: str) -> decimal.Decimal | float:
    """Exact; a float where the exponent is beyond exact numbers."""
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:
        return float(text)
