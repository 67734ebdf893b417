"""What scores the answers of a log with its model: their log-probabilities, as an engine computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from vnext.replay.execution.execution import ModelChoice, machine_of, sentences
from vnext.replay.execution.recorded import Asked, Walk
from vnext.state.state import Request

Score = Callable[[Request, list[int]], list[float]]


def scores_of(log: Path, chosen: ModelChoice) -> Score:
    """A function from a request and its tokens, the prompt's first, to the log-probabilities of its answer. Loads the model. Raises
    UnusableLog."""
    walk = Walk(log, Asked())
    with sentences():
        machine = machine_of(walk, chosen)
    from vnext.replay.rerun.alone import Alone

    alone = Alone(machine, walk.first.config)
    return lambda request, tokens: alone.logprobs(request, np.array(tokens, dtype=np.int32), request.prompt_length)
