"""Log forms: which form of the log's work on bytes serves here: the compiled one where it was built, else the plain.

Both give the same; a machine without a compiler loses time, nothing else. Use as `log_forms.kernels.narrow(...)`.
"""

from __future__ import annotations

from types import ModuleType

from vnext.state import log_plain, log_skim

try:
    from vnext.state import _log
except ImportError:  # not built: no compiler when vnext was installed
    _log = None

kernels: ModuleType = log_plain if _log is None else _log
skim = log_skim.skim if _log is None else _log.skim


def implementation() -> str:
    """For `vnext doctor`."""
    return "plain" if _log is None else "compiled"
