"""Log forms: which form of the log's work on bytes serves here: the compiled one where it was built, else the plain.

Both give the same; a machine without a compiler loses time, nothing else. Use as `log_bytes.impl.narrow(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vnext.base.compiled import load
from vnext.log import log_plain, skimming

_PLAIN = {**vars(log_plain), **vars(skimming)}
_SHARED = ("RECORD_HEAD", "FRAME_HEAD", "WIDTH_MIN", "WIDTH_MAX", "ARRIVED", "ABORTED", "PLANNED", "COMMITTED")
_log = load("vnext.log._log", {name: _PLAIN[name] for name in _SHARED})
impl = log_plain
skim, skim_steady = skimming.skim, skimming.skim_steady
if not TYPE_CHECKING and _log is not None:  # the compiled form has the plain one's signatures
    impl, skim, skim_steady = _log, _log.skim, _log.skim_steady
