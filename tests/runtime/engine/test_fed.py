"""What a rank's batch gives to the model is held to the state: spoilt on one rank, it is named with the rank and the kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_core import make_bench, wish  # noqa: F401  a fixture
from toy_ranks import ToyExecutor

from vnext.replay.cli.main import main as replay
from vnext.runtime.batch import batch as batches, fed, words as batch_words
from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs
from vnext.runtime.protocol.messages import StepResult
from vnext.runtime.rank import steps as rank_steps
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import Routes
from vnext.runtime.rank.steps import HostSteps
from vnext.runtime.transport.ring.broadcast import decode_events
from vnext.sampling.constraint import Vocabulary
from vnext.state.errors import LawBroken
from vnext.state.events import StepPlanned
from vnext.state.params import Constraint

SPOILT_STEP = 5
ROW = 1
Spoil = Callable[[PersistentBatch], None]


class ToyRunner:
    """A model that answers 1 + position modulo 7; it has no weights and no cache."""

    config, device, adapters, draft, routes = SimpleNamespace(vocab_size=50), torch.device("cpu"), None, None, Routes()
    cache = SimpleNamespace(states=None)

    def vocabulary(self, end_tokens: Sequence[int]) -> Vocabulary:
        return Vocabulary(Path("without a tokenizer"), 50, end_tokens)

    def make_cache(self, page_count: int, block_size: int, state_pages: int, drafts: int) -> None:
        pass

    def run(self, inputs: StepInputs) -> StepOutputs:
        positions = np.empty(0, dtype=np.int64) if inputs.sampling is None else inputs.sampling.position
        return StepOutputs(1 + positions % 7, ())


class Ranks(ToyExecutor):
    """Ranks as they are, each with its persistent batch; `spoil[rank]` happens to its batch right before SPOILT_STEP."""

    def __init__(self, world_size: int, spoil: dict[int, Spoil]) -> None:
        super().__init__(world_size)
        self.ranks = [Rank(rank, HostSteps(ToyRunner())) for rank in range(world_size)]
        self.spoil, self._next_id = spoil, 0

    def send(self, message: bytes) -> None:
        events = list(decode_events(message, self._next_id))
        for rank, spoil in self.spoil.items():
            if any(isinstance(event, StepPlanned) and event.step == SPOILT_STEP for event in events):
                spoil(self.ranks[rank].steps._batch)
        for rank in self.ranks:
            rank.handle(message)
            self._ready += rank.collect()
        self._next_id = self.ranks[0]._state.next_id


def column(name: str, value: float) -> Spoil:
    def spoil(batch: PersistentBatch) -> None:
        batch._sampling._columns[name][batch._places[ROW]] = value
        batch._sampling._cached_inputs, batch._decode_step = {}, None

    return spoil


def other_block(batch: PersistentBatch) -> None:
    batch._table[batch._places[ROW], 0] += 1
    batch._decode_step = None


def other_last_token(batch: PersistentBatch) -> None:
    batch._last[batch._places[ROW]] ^= 1


def moved_slots(batch: PersistentBatch) -> None:
    batch._decode_step._moved[1][ROW] += 4


def moved_samples(batch: PersistentBatch) -> None:
    batch._decode_step._inputs.sampling.position[ROW] += 1


def lost_bias(batch: PersistentBatch) -> None:
    batch._sampling._special.clear()
    batch._sampling._cached_inputs, batch._decode_step = {}, None


FAULTS: dict[str, tuple[Spoil, str]] = {
    "a block of the table is another": (other_block, "slots, block tables"),
    "the slots of a steady step are moved on twice": (moved_slots, "slots"),
    "the place of a sample is moved on twice": (moved_samples, "places of samples"),
    "the last token is another": (other_last_token, "token ids"),
    "temperature is another": (column("temperature", 0.25), "temperature"),
    "top_p is another": (column("top_p", 0.5), "top_p"),
    "top_k is another": (column("top_k", 3), "top_k"),
    "min_p is another": (column("min_p", 0.25), "min_p"),
    "the seed is another": (column("seed", 7), "seed"),
    "log-probabilities that nobody asked for": (column("logprobs", 2), "logprobs"),
    "a minimum length is forgotten": (column("min_known", 0), "banned tokens"),
    "bias and penalties are forgotten": (
        lost_bias, "repetition_penalty, presence_penalty, frequency_penalty, logit bias, banned tokens, counted tokens"
    ),
}  # fmt: skip


def served(make: Callable, world_size: int, spoil: dict[int, Spoil], **sampling: object):
    """A bench whose ranks serve two requests; the second with `sampling` besides."""
    bench = make(Ranks(world_size, spoil), pipeline_depth=2, block_size=8, eos_token_ids=(0,))
    first, second = wish("one", [1, 2, 3], 14), wish("two", [4, 5], 14)
    bench.say(bench.client(), first, replace(second, sampling=replace(second.sampling, **sampling)))
    return bench


SPECIAL = dict(
    logit_bias=((3, 1.5),), min_tokens=12, repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.5
)  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 1), (2, 0)])
def test_a_batch_that_drifted_is_named_at_its_step(make_bench, name: str, world_size: int, rank: int) -> None:  # noqa: F811
    spoil, kinds = FAULTS[name]
    special = SPECIAL if "banned" in kinds else {}
    message = rf"rank {rank} has drifted: its batch digest differs at step {SPOILT_STEP} \({kinds}\)"
    with pytest.raises(LawBroken, match=message):
        served(make_bench, world_size, {rank: spoil}, **special)


def test_ranks_that_match_a_grammar_otherwise_are_named(make_bench) -> None:  # noqa: F811
    """The engine core matches no grammar: a rank is compared with rank 0."""

    def take(batch: PersistentBatch) -> None:
        masks = batch._sampling.masks
        masks.wait()
        masks._advance([(place, made, (9,)) for place, made in masks.matchers.items()])

    constraint = Constraint(reasoning_end=(9,), reasoning_max=1)  # which ranks that draw nothing never reach
    message = rf"rank 1 has drifted: its batch digest differs at step {SPOILT_STEP} \(forbidden tokens\)"
    with pytest.raises(LawBroken, match=message):
        served(make_bench, 2, {1: take}, constraint=constraint)
    assert served(make_bench, 2, {}, constraint=constraint).core.state.counters.finished == 2


def test_positions_that_are_off_by_one_are_named(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    right = batches.positions_of
    monkeypatch.setattr(batches, "positions_of", lambda scheduled: right(scheduled) + 1)
    with pytest.raises(LawBroken, match=r"rank 0 has drifted: its batch digest differs at step 0 \(token ids, positions, slots\)"):
        served(make_bench, 1, {})


def test_the_log_names_what_was_fed_otherwise(make_bench, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    bench = make_bench(Ranks(2, {1: column("top_p", 0.5)}))
    with pytest.raises(LawBroken):
        bench.say(bench.client(), wish("one", [1, 2, 3], 14), wish("two", [4, 5], 14))
    bench.core.record_end()
    assert replay(["verify", "--json", str(bench.log_dir)]) == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["step"], found["field"]) == (SPOILT_STEP, "batch of rank 1") and "top_p" in found["message"]
    assert replay(["ranks", "--json", str(bench.log_dir)]) == 1
    right, drifted = json.loads(capsys.readouterr().out)["ranks"]
    assert not right["fields"] and (drifted["fields"], drifted["first_different_step"]) == (["top_p"], SPOILT_STEP)


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_batches_that_have_not_drifted_are_never_named(make_bench, special: dict) -> None:  # noqa: F811
    bench = served(make_bench, 2, {}, **special)
    assert bench.core.state.counters.finished == 2 and not bench.core._checks.due
    bench.core.shut_down()
    assert bench.verified()


def test_only_steps_whose_digest_is_due_are_hashed(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    hashed: list[StepInputs] = []

    def counting(inputs: StepInputs, config: object, digests: object) -> tuple[int, ...]:
        hashed.append(inputs)
        return batch_words.fed_words(inputs, config, digests)

    monkeypatch.setattr(rank_steps, "fed_words", counting)
    bench = make_bench(Ranks(1, {}), digest_interval=5)
    bench.say(bench.client(), wish("one", [1, 2, 3], 16))
    assert bench.core.state.planned >= 15 and len(hashed) == -(-bench.core.state.planned // 5)


def test_a_rank_that_hashes_no_batch_is_not_judged_by_it() -> None:
    reported = StepResult(rank=0, step=0, digest=0, token_digest=0, seconds=0.0)
    assert reported.fed == () and len(fed.NAMES) == len(set(fed.NAMES))
