"""A rank's process that dies of one token and hangs at another, for tests: `python -m spoilt_rank` in place of the rank's main."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.rank import runner
from vnext.runtime.rank.main import main

POISON, HANG = 2718, 2719


def hang() -> None:
    """Compute for ever, once: the file that HANG_ONCE names says that one process has done so."""
    once = Path(os.environ["HANG_ONCE"])
    if once.exists():
        return
    once.touch()
    while True:
        pass


run = runner.ModelRunner.run


def spoilt(self: runner.ModelRunner, inputs: StepInputs) -> object:
    tokens = inputs.forward.token_ids.tolist()
    if POISON in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if HANG in tokens:
        hang()
    return run(self, inputs)


runner.ModelRunner.run = spoilt

if __name__ == "__main__":
    sys.exit(main())
