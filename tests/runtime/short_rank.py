"""A rank's process that lacks memory now and then, for tests: `python -m short_rank` in place of the rank's main.

Before a step, behind it, or between two of its collectives; only the rank that SHORT_RANK names, in every fifth step, SHORT_COUNT
times.
"""

from __future__ import annotations

import os
import sys

from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.rank import runner
from vnext.runtime.rank.main import main
from vnext.runtime.transport.collectives.shared_group import SharedGroup

RANK, COUNT = (int(os.environ[name]) for name in ("SHORT_RANK", "SHORT_COUNT"))
EVERY = 5
SAID = "Unable to allocate 3 GiB"
run, enter = runner.ModelRunner.run, SharedGroup._enter
count = operations = 0
armed = False


def short(self: runner.ModelRunner, inputs: StepInputs) -> object:
    global count, armed, operations
    if self.parallel.rank != RANK:
        return run(self, inputs)
    count += 1
    kind, armed, operations = count // EVERY % 3 if count % EVERY == 0 and count <= EVERY * COUNT else -1, False, 0
    if kind == 0:
        raise MemoryError(SAID)
    armed = kind == 1
    outputs = run(self, inputs)
    if kind == 2:
        raise MemoryError(SAID)
    return outputs


def entering(self: SharedGroup, *arguments: int) -> None:
    global operations, armed
    operations += 1
    if armed and operations == 3:
        armed = False
        raise MemoryError(SAID)
    enter(self, *arguments)


runner.ModelRunner.run, SharedGroup._enter = short, entering

if __name__ == "__main__":
    sys.exit(main())
