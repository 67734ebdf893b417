"""Host cache: a rank's keys, values and recurrent states on the host, and the steps without torch that compute with them.

Owns what steps keep from one to the next. Arrays, not requests: which page is whose is the state's business.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from vnext.kernels.arrays import host_dtype
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.recurrent import copy_states, make_state_pools
from vnext.models.layers.tensors import tensors_of
from vnext.models.layers.whole_step import WholeStep
from vnext.models.loading.tail import Tail
from vnext.runtime.batch.prompt_results import PromptSums, compute, places_of
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs, reported, spoilt_rows
from vnext.sampling.host import sample
from vnext.sampling.inputs import is_plain
from vnext.state.recurrent import NO_COPIES
from vnext.state.state import Copies

ZERO = bytes(8)
"""A token 0, as steps have it."""


class HostCache:
    """Of one model, for the sizes of one state; another state gets another. Owns the sums of prompts. Mutable."""

    def __init__(
        self, kv: KvCache, whole: WholeStep | None = None, tail: Tail | None = None, states: StatePools | None = None
    ) -> None:
        """Has met no step. `whole`: computes steps with this cache; None where only torch does. `tail`: as PromptSums'. `states`:
        those of recurrent layers."""
        self.kv, self.states = kv, states
        self._whole, self._sums = whole, PromptSums(tail)
        self._known: ForwardBatch | None = None  # that of the last plain step, which steps of the same rows change in place

    @cached_property
    def tensors(self) -> KvCache:
        """The cache as torch has it: tensors of the same memory."""
        found: KvCache = tensors_of(self.kv)
        return found

    def run(self, inputs: StepInputs) -> StepOutputs | None:
        """Compute one step, without torch: write to the cache, sample a token for each sampled row. None where only torch can;
        by_parts.py gives the same bits.

        Steps that only draw tokens are one call of the kernels, which looks for no logits that are no numbers. So steps of other
        rows than the last one's do not go through it, nor do steps behind the token 0, which all others become where nothing is a
        number. There, and where a request asks for more (log-probabilities, penalties, scores of prompts), only the forward is one.
        """
        whole, forward, sampling, prompts = self._whole, inputs.forward, inputs.sampling, inputs.prompts
        if whole is None or forward.inputs:
            return None
        draws = sampling is not None and is_plain(sampling) and prompts is None and inputs.guided is None
        if sampling is not None and draws and len(inputs.logprobs) <= whole.samples_max:
            known, self._known = self._known, forward
            if forward is known and ZERO not in np.asarray(forward.token_ids).tobytes():
                return StepOutputs(whole.run(forward, sampling), ())
        if prompts is None:
            return sampled(whole, whole.hidden(forward), inputs)
        places = places_of(np.asarray(forward.sample_at), prompts)
        hidden = whole.hidden(forward._replace(sample_at=places.at))
        outputs = sampled(whole, hidden[places.samples], inputs)
        computed = compute(prompts, hidden[places.prompts], whole.logits)
        return replace(outputs, prompts=self._sums.results(prompts, computed))


def sampled(whole: WholeStep, hidden: np.ndarray, inputs: StepInputs) -> StepOutputs:
    """What a step draws from its normed states [S, hidden]."""
    if inputs.sampling is None:
        return NOTHING_SAMPLED
    logits = whole.logits(hidden)
    if inputs.guided is not None:
        logits = inputs.guided.combined(logits)
    drawn = sample(logits, inputs.sampling)
    return StepOutputs(drawn.tokens, reported(drawn, inputs.logprobs), spoilt=spoilt_rows(logits, drawn.tokens))


class Trail(NamedTuple):
    """The states that a step with drafts leaves on its way. `pages` int32 [T]: the trail of StateRows. `live` and `firsts`: the
    page of each request that samples, and where its first state on the way is."""

    pages: np.ndarray
    live: list[int]
    firsts: list[int]


class StatePools:
    """The states of recurrent layers, in pages (vnext/state/recurrent.py). Behind those of requests, a rank has its own for one
    step's states before each draft: once it knows which drafts are kept, the state behind them goes into the request's page."""

    def __init__(self, config: ModelConfig, page_count: int, draft_count: int, dtype: str, world_size: int) -> None:
        """Has met no step. `draft_count`: the most drafts of one."""
        self.pools = make_state_pools(config, page_count + draft_count, host_dtype(dtype), world_size)
        self._own = page_count
        self._given: ForwardBatch | None = None
        self._forward: ForwardBatch | None = None
        self._trail: Trail | None = None
        self._after = NO_COPIES

    def rows(self) -> list[np.ndarray]:
        """The memory of the pages: uint8 [page_count, bytes] of each part of each layer."""
        return [part.reshape(len(part), -1).view(np.uint8) for parts in self.pools for part in parts]

    def begin(self, inputs: StepInputs) -> StepInputs:
        """A step begins: its rows go on from their pages and leave their states there, once `keep` knows which drafts are kept.
        Returns it as the layers have it."""
        states, copies = inputs.forward.recurrent, inputs.copies
        assert states is not None and copies is not None, "the state has recurrent layers"
        if inputs.forward is not self._given:  # a batch that comes again stays the same object
            self._trail = trail_of(inputs.forward, self._own)
            states = states._replace(pools=self.pools, trail=self._trail and self._trail.pages)
            self._given, self._forward = inputs.forward, inputs.forward._replace(recurrent=states)
        assert self._forward is not None
        copy_states(self.pools, copies.before)
        return inputs._replace(forward=self._forward)

    def end(self, copies: Copies | None) -> None:
        """The step that began last is computed."""
        assert copies is not None, "the state has recurrent layers"
        self._after = copies.after
        if self._trail is None:
            self.keep(b"")

    def keep(self, counts: bytes) -> None:
        """The step keeps so many samples of each request that sampled; b"": all of them."""
        if self._trail is not None and counts:
            sizes = np.diff(self._trail.firsts) + 1
            ends = zip(counts, sizes.tolist(), self._trail.firsts, self._trail.live, strict=False)
            pairs = [(first + count - 1, live) for count, size, first, live in ends if count < size]
            copy_states(self.pools, np.array(pairs, dtype=np.int64).reshape(-1, 2))
        copy_states(self.pools, self._after)
        self._after = NO_COPIES


def trail_of(forward: ForwardBatch, first: int) -> Trail | None:
    """Pages from `first` on for the states behind all samples of a step but each row's last; None where each row samples once."""
    assert forward.recurrent is not None
    starts, at = np.asarray(forward.query_starts), np.asarray(forward.sample_at)
    rows, firsts = np.unique(np.searchsorted(starts, at, side="right") - 1, return_index=True)
    if len(rows) == len(at):
        return None
    pages = np.full(len(forward.token_ids), -1, dtype=np.int32)
    between = at[~np.isin(at + 1, starts)]
    pages[between] = np.arange(first, first + len(between))
    own = first + np.append(firsts, len(at)) - np.arange(len(rows) + 1)
    return Trail(pages, np.asarray(forward.recurrent.pages)[rows].tolist(), own.tolist())
