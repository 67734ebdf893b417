"""Tails: which form of the live requests' tails serves here, the compiled one where it was built, else the plain one.

Both give the same pseudonyms; a machine without a compiler loses time, nothing else. Use as `tails.Tails(...)`.
"""

from __future__ import annotations

from vnext.state import tails_plain

try:
    from vnext.state import _tails
except ImportError:  # not built: no compiler when vnext was installed
    _tails = None

Tails = tails_plain.Tails if _tails is None else _tails.Tails


def implementation() -> str:
    """For `vnext doctor`."""
    return "plain" if _tails is None else "compiled"
