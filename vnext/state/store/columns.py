"""Columns: selects the implementation of the rows' arithmetic, compiled if it was built, otherwise numpy.

Both return the same values; without a compiler, only speed is lost. Use as `columns.impl.expected(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vnext.base.compiled import load
from vnext.state.store import columns_numpy, fields

CONSTANTS = {name: getattr(fields, name) for name in map(str.upper, fields.FIELD_NAMES)} | {
    name: getattr(fields, name)
    for name in ("FIELD_COUNT", "IGNORE_EOS", "OWN_STOPS", "DRAFTS_SHIFT", "DIGEST_WORDS", "INPUT_BEGINS")
}
"""The constants of columns.h, which must equal those of fields.py; every module that includes it is checked."""

DRAFTS = {
    name: getattr(fields, name)
    for name in ("TENTATIVE", "RATE", "DRAFTING_FIELD_COUNT", "RATE_ONE", "RATE_MEMORY", "TRIAL_INTERVAL", "FEW_ROWS")
}
"""The constants of drafts.h."""

_columns = load("vnext.state.store._columns", CONSTANTS | DRAFTS | {"WORK_LINES": columns_numpy.TURN_WORK_LINES})
impl = columns_numpy
if not TYPE_CHECKING and _columns is not None:  # the compiled form has the signatures of the plain form
    impl = _columns


def implementation() -> str:
    """The name of the implementation, for `vnext doctor`."""
    return "numpy" if impl is columns_numpy else "compiled"
