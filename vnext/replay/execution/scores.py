"""What scores the answers of a log with its model: their log-probabilities, as an engine computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from vnext.replay.execution.execution import ModelChoice, is_ready, machine_of, sentences
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.reading.drawn import Answered

Scored = tuple[list[list[float] | None], list[str]]


def scores_of(log: Path, chosen: ModelChoice) -> Callable[[Sequence[Answered]], Scored]:
    """A function from answers to the log-probabilities of each, None where weights that drew it are not here, and a sentence for
    each of these. Loads the model, and each version of its weights once. Raises UnusableLog."""
    walk = Walk(log, Selection())
    with sentences():
        machine = machine_of(walk, chosen)
    from vnext.replay.rerun.alone import Alone

    alone = Alone(machine, walk.first.config)

    def score(answers: Sequence[Answered]) -> Scored:
        spans = [(place, span) for place, each in enumerate(answers) for span in each.spans(each.request.prompt_length)]
        found: list[list[float] | None] = [[] for _ in answers]
        with sentences():
            for place, span in sorted(spans, key=lambda each: each[1].weights.version if each[1].weights else 0):
                if (scores := found[place]) is None or not is_ready(machine, span.weights):
                    found[place] = None
                    continue
                tokens = np.array(answers[place].tokens[: span.end], dtype=np.int32)
                scores += alone.logprobs(answers[place].request, tokens, span.begin)
        return found, list(machine.versions.lacking.values())

    return score
