"""Load progress: how far the first rank is with the weights, for people and for API servers that are asked meanwhile."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vnext.runtime.processes.run_dir import LOADED

if TYPE_CHECKING:
    from tqdm import tqdm

PROGRESS_AFTER_S = 1.0  # most checkpoints load too fast for a progress bar


class LoadProgress:
    """Call it with the bytes that are loaded, and all. A bar on stderr for checkpoints that take a while, and a note beside
    `stack_file`, "" for none. Mutable."""

    def __init__(self, stack_file: str) -> None:
        self._bar: tqdm[None] | None = None
        self._note = Path(stack_file).with_name(LOADED) if stack_file else None
        self._noted = -1
        self._began_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._note is not None and (hundredths := 100 * done_bytes // max(1, total_bytes)) > self._noted:
            self._noted = hundredths
            self._note.write_text(str(hundredths))
        if self._bar is None:
            if time.monotonic() - self._began_s < PROGRESS_AFTER_S:
                return
            from tqdm import tqdm  # most checkpoints load without

            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="loading weights", file=sys.stderr, disable=None)
        self._bar.update(done_bytes - self._bar.n)
        if done_bytes >= total_bytes:
            self._bar.close()
