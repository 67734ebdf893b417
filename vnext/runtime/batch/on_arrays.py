"""On arrays: steps whose forward is one call of the kernels, for requests that ask for more than a token drawn from plain logits.

Log-probabilities, penalties, bias, bans, scores of prompts and embeddings, without torch; `rank/by_parts.py` gives the same bits in
torch. Owns the sums of prompts; parameters and cache are the runner's.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from vnext.models.layers.whole_step import WholeStep
from vnext.runtime.batch.prompt_results import PromptSums, Tail, compute, places_of
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs, reported, spoilt_rows
from vnext.sampling.host import sample


class OnArrays:
    """Steps of one model and cache."""

    def __init__(self, whole: WholeStep, tail: Tail | None = None) -> None:
        """`tail`: as PromptSums'."""
        self._whole, self._sums = whole, PromptSums(tail)

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Compute one step: write to the cache, sample a token for each sampled row."""
        prompts, forward = inputs.prompts, inputs.forward
        if prompts is None:
            return self._sampled(self._whole.hidden(forward), inputs)
        places = places_of(np.asarray(forward.sample_at), prompts)
        hidden = self._whole.hidden(forward._replace(sample_at=places.at))
        outputs = self._sampled(hidden[places.samples], inputs)
        computed = compute(prompts, hidden[places.prompts], self._whole.logits)
        return replace(outputs, prompts=self._sums.results(prompts, computed))

    def _sampled(self, hidden: np.ndarray, inputs: StepInputs) -> StepOutputs:
        if inputs.sampling is None:
            return NOTHING_SAMPLED
        logits = self._whole.logits(hidden)
        if inputs.guided is not None:
            logits = inputs.guided.combined(logits)
        sampled = sample(logits, inputs.sampling)
        return StepOutputs(sampled.tokens, reported(sampled, inputs.logprobs), spoilt=spoilt_rows(logits, sampled.tokens))
