"""Columns: which form of the rows' arithmetic serves here, the compiled one where it was built, else numpy's.

Both give the same values; a machine without a compiler loses time, nothing else. Use as `columns.kernels.expected(...)`.
"""

from __future__ import annotations

from types import ModuleType

from vnext.state import columns_numpy

try:
    from vnext.state import _columns
except ImportError:  # not built: no compiler when vnext was installed
    _columns = None

kernels: ModuleType = columns_numpy if _columns is None else _columns


def implementation() -> str:
    """For `vnext doctor`."""
    return "numpy" if kernels is columns_numpy else "compiled"
