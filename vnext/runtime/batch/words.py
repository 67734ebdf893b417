"""Words of a batch: a step's arrays, hashed kind by kind as `fed.due` hashes the state.

Owns no array. Only a step whose digest is due is hashed; others cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vnext.models.layers.batch import ForwardBatch
from vnext.runtime.batch import fed
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.sampling.inputs import Counted, Penalties, SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.params import CHOOSING, DEFAULTS, PENALTIES
from vnext.state.store import extents

NO_WORD = fed.word()
NOTHING_SAMPLED = (NO_WORD,) * (len(fed.NAMES) - fed.NAMES.index("places of samples"))


def fed_words(inputs: StepInputs, config: SchedulerConfig, digests: Mapping[int, str] | None = None) -> tuple[int, ...]:
    """One word for each of `fed.NAMES`, from arrays of the host. `digests` are those of the adapters that this rank's slots
    hold; a batch with adapters needs them. Cost: proportional to the step's tokens and blocks."""
    forward = inputs.forward
    adapters = {digests[slot]: tokens.astype(np.int64) for slot, tokens in forward.adapters} if digests else {}
    counts = np.diff(forward.query_starts).astype(np.int64)
    contexts = forward.context_lengths.astype(np.int64)
    return (
        fed.word(forward.token_ids),
        fed.word(forward.positions, *(() if forward.turning is None else (forward.turning,))),
        fed.word(forward.slots, *(group.slots for group in forward.groups)),
        fed.word(*_seen_blocks(forward, config, contexts - counts, contexts)),
        fed.word(counts),
        fed.word(contexts),
        fed.adapters_word(adapters),
        fed.word(forward.sample_at),
        *(NOTHING_SAMPLED if inputs.sampling is None else _sampling_words(inputs.sampling, inputs.logprobs)),
    )


def _seen_blocks(forward: ForwardBatch, config: SchedulerConfig, starts: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """The entries of each group's table that the queries see; other entries are never read."""
    tables = [forward.block_table, *(group.block_table for group in forward.groups)]
    seen = fed.blocks_seen(config, starts, ends)
    rows = np.arange(len(starts))
    return [table[np.repeat(rows, count), extents.spans(*part)] for table, part in zip(tables, seen) for count in part[1:]]


def _sampling_words(sampling: SamplingInputs, asked: np.ndarray) -> tuple[int, ...]:
    """The words that follow "places of samples"."""
    columns = [getattr(sampling, name) for name in ("position", *CHOOSING, "seed")]
    rates = [_rates(sampling.penalties, at, len(asked)) for at in range(len(PENALTIES))]
    bias, banned, penalties, allowed = sampling.bias, sampling.banned, sampling.penalties, sampling.allowed
    return (
        *map(fed.word, (*columns, asked, *rates)),
        NO_WORD if bias is None else fed.word(bias.rows, bias.tokens, bias.values),
        NO_WORD if banned is None else fed.word(banned.rows, banned.tokens),
        NO_WORD if penalties is None else fed.word(_counted(penalties)),
        NO_WORD if allowed is None else fed.word(allowed.rows, allowed.masks_of_rows(), *allowed.timed()),
    )


def _counted(penalties: Penalties | Counted) -> np.ndarray:
    """Each penalised row's counts as one word (uint64[P]), as `fed.due` computes it from its tokens. Only tokens with a count
    are weighed, whatever the vocabulary."""
    if isinstance(penalties, Counted):
        counted: np.ndarray = penalties.counted.view(np.uint64)
        return counted
    sums = []
    for counts, is_prompt in zip(penalties.output_counts, penalties.prompt_mask):
        sampled, prompt = np.flatnonzero(counts), np.flatnonzero(is_prompt)
        sums.append(fed.counted(fed.weights_of(sampled) * counts[sampled].astype(np.uint64), fed.weights_of(prompt)))
    return np.array(sums, dtype=np.uint64)


def _rates(penalties: Penalties | Counted | None, at: int, count: int) -> np.ndarray:
    """The penalty PENALTIES[at] of all sampled rows (float32[S])."""
    rates = np.full(count, DEFAULTS[PENALTIES[at]], dtype=np.float32)
    if penalties is not None:
        rates[penalties.rows] = penalties.rates[at]
    return rates
