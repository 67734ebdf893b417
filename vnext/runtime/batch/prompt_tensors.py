"""`prompt_results.py` in tensors, on any device: places and what is computed at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vnext.runtime.batch import prompt_results
from vnext.runtime.batch.prompts import PromptInputs
from vnext.sampling.inputs import REPORTED_TOGETHER
from vnext.sampling.sampling import report

Send = Callable[[torch.Tensor], torch.Tensor]


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """The Send of the CPU."""
    return tensor


class Places(NamedTuple):
    """prompt_results.Places on a device."""

    at: torch.Tensor
    samples: torch.Tensor
    prompts: torch.Tensor


def places_of(sample_at: np.ndarray, prompts: PromptInputs, send: Send = keep) -> Places:
    """For samples at `sample_at` int64 [S]. `send` brings host tensors to the device."""
    return Places(*(send(torch.from_numpy(each)) for each in prompt_results.places_of(sample_at, prompts)))


def compute(
    prompts: PromptInputs, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], send: Send = keep
) -> list[torch.Tensor]:
    """As prompt_results.compute. Waits for no device."""
    targets = send(torch.from_numpy(prompts.targets))
    parts = zip(hidden[: len(targets)].split(REPORTED_TOGETHER), targets.split(REPORTED_TOGETHER), strict=True)
    scored = [report(logits_of(rows), tokens, prompts.alternatives) for rows, tokens in parts if len(tokens)]
    return [*map(torch.cat, list(zip(*scored))[1:]), hidden[len(targets) :].float()]
