"""Batches with drafts: what the rows' own drafts make of a planned step equals what is built from the state alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from test_batch import VOCABULARY, assert_equal_steps, engine_started, random_sampling, without_unread_entries

from vnext.runtime.batch import fed
from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.batch.draft_rows import kept
from vnext.runtime.batch.rebuild import Sampled, history_of, rebuild
from vnext.runtime.batch.words import fed_words
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.drafters.drafter import Drafter, drafter_of
from vnext.sched.schedule import schedule
from vnext.state.config import Speculation
from vnext.state.events import RequestAborted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.feasibility import refusal
from vnext.state.reduce import reduce, start
from vnext.state.state import State, StepInFlight, sample_points


def as_computed(state: State, sampled: Sampled, drafter: Drafter) -> tuple[State, dict[int, list[int]]]:
    """The newest step with true starts and the drafts that a rank makes, request by request."""
    scheduled = state.in_flight[-1]
    entries, counts, drafts = scheduled.entries.copy(), scheduled.drafts.copy(), {}
    for place, (id_, _, first, count) in enumerate(scheduled.entries.T.tolist()):
        history = history_of(state, int(np.flatnonzero(state.rows.id == id_)[0]), sampled)
        base, most = count - int(scheduled.drafts[place]), int(scheduled.drafts[place])
        unbound = state.requests[id_].sampling.constraint is None  # and the others have no grammar, which could force tokens
        drafts[id_] = drafter.row(b"", 0).drafts(np.array(history, dtype=np.int32), most).tolist() if most and unbound else []
        counts[place] = len(drafts[id_])
        entries[2:, place] = min(first, len(history) - base), base + counts[place]
    step = replace(scheduled, entries=entries, drafts=counts, tokens=int(entries[3].sum()))
    return replace(state, in_flight=(*state.in_flight[:-1], step)), drafts


def drawn(scheduled: StepInFlight, drafts: np.ndarray, rng: random.Random) -> np.ndarray:
    """A token for each sample, which is often the draft behind it."""
    points, at, tokens = sample_points(scheduled), 0, []
    for back in points.back.tolist():
        right = back and rng.random() < 0.7
        tokens.append(int(drafts[at]) if right else rng.randrange(1, 5))
        at += back > 0
    return np.array(tokens, dtype=np.int64)


@pytest.mark.parametrize("seed", range(16))
def test_a_drafted_batch_equals_the_rebuilt_batch(seed: int) -> None:
    rng = random.Random(seed)
    started = engine_started(rng)
    speculation = Speculation(
        method=("ngram", "suffix")[seed % 2], num_speculative_tokens=rng.choice((1, 3, 6)), prompt_lookup_min=1,
        prompt_lookup_max=3, suffix_decoding_max_cached_requests=0,
    )  # fmt: skip
    started = replace(started, config=replace(started.config, speculation=speculation))
    state, words = start(started), Vocabulary(Path("no tokenizer"), VOCABULARY, started.config.eos_token_ids)
    batch, sampled, commits = PersistentBatch(started.config, VOCABULARY, words), {}, {}
    results, steps, several = [], 0, 0
    while steps < 150:
        choice = rng.random()
        if choice < 0.2:
            prompt = pack_tokens([rng.randrange(1, 4) for _ in range(rng.randint(1, 16))])
            sampling = random_sampling(rng, True)
            arrival = RequestArrived(id=state.next_id, name="", prompt=prompt, sampling=sampling, priority=0, arrival_ns=0)
            if len(state.requests) < 6 and refusal(state.config, arrival) is None:
                state = reduce(state, arrival)
        elif choice < 0.23 and state.next_id:
            state = reduce(state, RequestAborted(ids=(rng.randrange(state.next_id),), reason="client"))
        elif choice < 0.65 and (plan := schedule(state)) is not None:
            state, steps = reduce(state, plan), steps + 1
            fast = without_unread_entries(batch.step_inputs(state), started.config)
            seen, drafts = as_computed(state, sampled, drafter_of(speculation))
            assert_equal_steps(fast, rebuild(seen, sampled, VOCABULARY, words, drafts))
            scheduled = seen.in_flight[-1]
            flat = np.array([token for id_ in scheduled.ids.tolist() for token in drafts[id_]], dtype=np.int32)
            tokens = drawn(scheduled, flat, rng)
            words_due = fed_words(fast, started.config)[:-1]
            found = batch.take_sampled(state.in_flight[-1], tokens) or kept(scheduled, flat, tokens, scheduled.drafts[scheduled.samples])
            assert words_due == fed.due(state, commits, pack_tokens(found.drafts), found.drafted)
            again = kept(scheduled, flat, tokens, scheduled.drafts[scheduled.samples])
            assert np.array_equal(found.tokens, again.tokens) and found[2:4] == again[2:4]
            runs = np.frombuffer(found.counts, np.uint8) if found.counts else np.ones(len(found.tokens), np.uint8)
            owners = scheduled.entries[:2, scheduled.samples].T.tolist()
            for owner, run in zip(owners, np.split(found.tokens, np.cumsum(runs)[:-1])):
                sampled[(scheduled.step, *owner)] = run.tolist()
            several += int((runs > 1).sum())
            commit = StepCommitted(
                step=scheduled.step, tokens=pack_tokens(found.tokens), counts=found.counts, drafted=found.drafted
            )
            commits[scheduled.step] = commit
            results.append(commit)
        elif results:
            state = reduce(state, results.pop(0))
    assert several > 10
