"""Runs recorded batches again: each step has the state's rows, tokens and blocks, on one cache like the engine's.

Owns that cache and the record of what it contains. A run that begins in the middle of a log knows no page. What a step
reads and nothing here has written is computed first, alone, from the request's own tokens. The reference implementation
(runtime/batch/rebuild.py) builds the batches from the state alone, so a fault in the engine's own batch shows as a
difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vnext.replay.rerun.alone import Alone
from vnext.replay.rerun.machine import Machine, refusing
from vnext.runtime.batch.halves import with_halves
from vnext.runtime.batch.rebuild import Drafts, Sampled, history_of, rebuild
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.tensors import tensors_of_sampling
from vnext.sampling.sampling import sample
from vnext.state.state import State, blocks_for
from vnext.state.windows import first_kept, row_table


class Batched:
    """`whole`: the run begins with the engine's start, so every page that is read was written here."""

    def __init__(self, machine: Machine, state: State, whole: bool) -> None:
        config = state.config
        self.machine = machine
        self.caches = machine.caches(config.page_count, config.block_size, config.state_pages)
        self.rebuilt_tokens = 0
        self._fresh = None if whole else np.zeros(config.page_count, dtype=bool)
        self._fresh_states = np.zeros(config.state_pages, dtype=bool)
        self._drafted: list[int] = []
        self._alone = Alone(machine, config)

    def forget(self) -> None:
        """The ranks were replaced: keys and values are gone, and from here on every page that is read was written here."""
        self.caches = self.machine.caches(self.caches.pages, self.caches.block_size, len(self._fresh_states))
        self._fresh = None

    def distrust(self, pages: Sequence[int], states: Sequence[int] = ()) -> None:
        """These pages, and pages of states, were read from a disk tier: what a step reads there is computed first."""
        if self._fresh is None:
            self._fresh = np.ones(self.caches.pages, dtype=bool)
            self._fresh_states[:] = True
        self._fresh[list(pages)] = False
        self._fresh_states[list(states)] = False

    def mistrust(self) -> None:
        """From here on a step reads only what is computed for it alone. Not of a `whole` run."""
        assert self._fresh is not None, "a whole run remembers what it wrote"
        self._fresh[:] = False
        self._fresh_states[:] = False

    def inputs(self, state: State, sampled: Sampled, drafts: Drafts) -> StepInputs:
        """The newest step in flight as arrays. What it reads is in the cache on return."""
        with refusing():
            inputs = rebuild(state, sampled, self.machine.config.vocab_size, self.machine.vocabulary, drafts)
            if inputs.copies is not None:
                self._copy_states(inputs.copies.before)
            if self._fresh is not None:
                self._mend(state, sampled, inputs, self._fresh)
            if (states := inputs.forward.recurrent) is not None:
                rows = zip(state.in_flight[-1].ids.tolist(), states.pages.tolist(), strict=True)
                self._drafted = [page for id_, page in rows if drafts.get(id_)]
            inputs = inputs._replace(forward=self.machine.adapters.placed(inputs.forward, state))
            return with_halves(inputs, state) if state.config.guidance else inputs

    def run(self, inputs: StepInputs) -> tuple[np.ndarray, torch.Tensor | None]:
        """The step's samples int64[S] and their logits float32 [S, V]."""
        with refusing():
            logits = self.machine.logits(inputs.forward, self.caches)
            logits = inputs.guided.combined(logits) if inputs.guided is not None and logits is not None else logits
            self._doubt_states()
            if inputs.copies is not None:
                self._copy_states(inputs.copies.after)
            if logits is None or inputs.sampling is None:
                return np.empty(0, dtype=np.int64), None
            return sample(logits, tensors_of_sampling(inputs.sampling), own=self.machine.sampler).tokens.numpy(), logits

    def _doubt_states(self) -> None:
        """What a step with drafts leaves is behind all of them, also those that are not kept: readers compute it again."""
        if self._drafted and self._fresh is None:
            self._fresh = np.ones(self.caches.pages, dtype=bool)
            self._fresh_states[:] = True
        self._fresh_states[self._drafted] = False

    def _copy_states(self, pairs: np.ndarray) -> None:
        self.machine.copy_states(self.caches, pairs)
        for source, target in pairs.tolist():
            self._fresh_states[target] = self._fresh_states[source]

    # ---- what is in the cache ------------------------------------------------------------------------------------

    def _mend(self, state: State, sampled: Sampled, inputs: StepInputs, fresh: np.ndarray) -> None:
        """Compute what the step reads and the cache lacks. Pages that the step writes from their first slot on need
        nothing."""
        size = state.config.block_size
        forward = inputs.forward
        slots = np.concatenate([forward.slots, *(group.slots for group in forward.groups)])
        fresh[slots[slots % size == 0] // size] = True
        ids, starts = state.in_flight[-1].ids, forward.positions[forward.query_starts[:-1]]
        pages = np.full(len(ids), -1) if forward.recurrent is None else np.asarray(forward.recurrent.pages)
        for id_, start, page in zip(ids.tolist(), starts.tolist(), pages.tolist()):
            if start:
                self._mend_row(state, sampled, fresh, (int(np.flatnonzero(state.rows.id == id_)[0]), start), page)
        self._fresh_states[pages[pages >= 0]] = True

    def _mend_row(self, state: State, sampled: Sampled, fresh: np.ndarray, where: tuple[int, int], page: int) -> None:
        """`where`: a row and the position that it goes on from; `page`: of its recurrent states, -1 without."""
        config, (row, start) = state.config, where
        groups, blocks = config.group_count, blocks_for(start, config.block_size)
        table = row_table(state, row)[: blocks * groups].astype(np.int64)
        places = np.arange(blocks * groups)
        seen = places // groups >= first_kept(config, np.array([start]))[0][places % groups]
        missing = np.flatnonzero(seen & (table >= 0) & ~fresh[np.maximum(table, 0)])
        lacks_state = page >= 0 and not self._fresh_states[page]
        if not len(missing) and not lacks_state:
            return
        tokens = np.array(history_of(state, row, sampled), dtype=np.int32)
        scratch = self._alone.computed(state.requests[int(state.rows.id[row])], tokens, start)
        self.machine.copy_pages(scratch, missing, self.caches, table[missing])
        if lacks_state:
            self.machine.copy_state(scratch, self.caches, page)
        fresh[table[missing]] = True
        self.rebuilt_tokens += start
