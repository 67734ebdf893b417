"""Prompt results that are arrays: embeddings, and the experts of tokens.

Owns their arithmetic. Imported by the first request that asks for one: most programs and servers need no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vnext.runtime.protocol.messages import PromptResult
from vnext.runtime.protocol.sampling_params import InvalidRequest


def routed_experts(parts: Iterable[PromptResult], count: int) -> np.ndarray | None:
    """int16 [count, layers, experts of a token]: the experts of the request's first `count` tokens, prompt and answer; None where
    the engine reports none."""
    found: np.ndarray | None = None
    for part in parts:
        if part.experts:
            ids = np.frombuffer(part.experts, np.int16).reshape(-1, *part.experts_shape)[: max(0, count - part.first)]
            found = np.full((count, *part.experts_shape), -1, np.int16) if found is None else found
            found[part.first : part.first + len(ids)] = ids
    return found


def embedding(parts: Iterable[PromptResult], dimensions: int | None, normalize: bool) -> np.ndarray:
    """float32 [dimensions] of the part that holds it: the first `dimensions` of the hidden state (None: all of them), scaled
    to length 1 if `normalize`. Raises InvalidRequest for more dimensions than there are."""
    hidden = next(np.frombuffer(part.hidden, np.float32) for part in parts if part.hidden)
    if dimensions is not None and not 1 <= dimensions <= len(hidden):
        raise InvalidRequest(
            f"dimensions is {dimensions}: it must lie between 1 and the model's hidden size of {len(hidden)}.", "dimensions"
        )
    cut = hidden[:dimensions].astype(np.float64)
    length = np.sqrt(np.dot(cut, cut)) if normalize else 1.0
    return (cut / (length or 1.0)).astype(np.float32)
