"""Tails: which form of the live requests' tails serves here, the compiled one where it was built, else the plain one.

Both give the same pseudonyms; a machine without a compiler loses time, nothing else. Use as `open_blocks.OpenBlocks(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vnext.base.compiled import load
from vnext.log import open_blocks_plain
from vnext.log.pseudonyms import SECRET_SIZE_BYTES

_open_blocks = load("vnext.log._open_blocks", {"SECRET_SIZE": SECRET_SIZE_BYTES})
OpenBlocks = open_blocks_plain.OpenBlocks
if not TYPE_CHECKING and _open_blocks is not None:  # the compiled form has the plain one's signatures
    OpenBlocks = _open_blocks.OpenBlocks
