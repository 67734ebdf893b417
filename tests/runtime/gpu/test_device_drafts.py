"""Drafts on a device's twin: a step waits for the tokens that its drafts follow, and every token is the host's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_twin import TwinDevice
from llguidance import LLMatcher
from msgspec.structs import replace
from rank_drive import (
    WINDOWS,
    Answers,
    Liar,
    device_rank,
    drive,
    host_rank,
    repetitive_arrivals,
    runner_of,
    started_with,
    tiny_checkpoint,
)

from vnext.kernels.table import operations, plain_operations
from vnext.runtime.batch import draft_rows
from vnext.runtime.batch.draft_rows import Drafted, Kept
from vnext.runtime.gpu import unread
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.device_batch import DeviceBatch, HostSamples, HostStep
from vnext.runtime.gpu.model_drafts import ModelDrafts
from vnext.runtime.gpu.sampling_updates import SamplingUpdates
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.gpu.unread import LaterDrafts, Unread
from vnext.runtime.rank.gpu_loading import LaterSteps
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import Computed, HostSteps
from vnext.sampling.sampling import sampler_for
from vnext.state.config import Speculation
from vnext.state.errors import IllegalEvent
from vnext.state.events import RequestArrived
from vnext.state.params import Sampling
from vnext.state.state import StepInFlight

MEMBERS = {"first_name": {"type": "boolean"}, "last_known_address": {"type": "boolean"}, "is_known": {"type": "boolean"}}
GRAMMARS = (
    LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": MEMBERS, "required": [*MEMBERS], "additionalProperties": False}
    ),
    LLMatcher.grammar_from_regex("(yes|no|perhaps)( indeed){2,9}"),
)
NGRAM = Speculation(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
SUFFIX = Speculation(method="suffix", num_speculative_tokens=5, suffix_decoding_min_token_prob=0.0)
MODEL = Speculation(method="draft_model", model="itself", num_speculative_tokens=3)
GRAMMAR = Speculation(method="grammar", num_speculative_tokens=6)
WAYS: dict[str, dict[str, Any]] = {
    "two steps ahead": {}, "in step": {"pipeline_depth": 1}, "three steps ahead, preempted": {"pipeline_depth": 3, "page_count": 34},
    "in chunks, uncached": {"max_num_batched_tokens": 12, "prefix_caching": False},
    "three steps ahead, few rows": {"pipeline_depth": 3, "max_num_seqs": 4},
}  # fmt: skip


def on_device(runner: ModelRunner, speculation: Speculation | None, arrivals: list[RequestArrived], **changes: Any) -> Answers:
    variants = DeviceVariants(operations=operations("cpu"), choose=sampler_for("cpu"), shapes=Shapes((), ()))
    return driven(device_rank(runner, TwinDevice(), variants), runner, speculation, arrivals, **changes)


def on_host(runner: ModelRunner, speculation: Speculation | None, arrivals: list[RequestArrived], **changes: Any) -> Answers:
    return driven(host_rank(runner), runner, speculation, arrivals, **changes)


def driven(
    rank: Rank, runner: ModelRunner, speculation: Speculation | None, arrivals: list[RequestArrived], **changes: Any
) -> Answers:
    return drive(rank, started_with(runner, eos_token_ids=(0, 4), speculation=speculation, **changes), arrivals)


@cache
def undrafted(way: str) -> Answers:
    """What the host answers without drafts, which every drafter is compared with."""
    return on_host(runner_of(), None, repetitive_arrivals(16, 3, GRAMMARS), **WAYS[way])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[type, list[Computed]]:
    """The results of all steps of both kinds."""
    found: dict[type, list[Computed]] = {HostSteps: [], LaterSteps: []}
    for steps, results in found.items():
        wait = steps.wait
        monkeypatch.setattr(steps, "wait", lambda self, wait=wait, results=results: results.append(wait(self)) or results[-1])
    return found


def drafts_in(results: list[Computed]) -> tuple[int, int]:
    """How many drafts were computed, and how many were kept."""
    computed, kept = (b"".join(getattr(each, name) for each in results if each.counts) for name in ("drafted", "counts"))
    return sum(computed), sum(kept) - len(kept)


def with_draft_model() -> ModelRunner:
    """The demo model, which drafts for itself."""
    runner = runner_of()
    runner.draft = runner_of()
    return runner


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_drafts_for_itself_is_right(seen: dict[type, list[Computed]], way: str) -> None:
    """On the device as on the host: after preemptions, hits in the prefix cache and prompts in pieces, and with penalties."""
    arrivals = repetitive_arrivals(16, 3, GRAMMARS)
    found = on_device(with_draft_model(), MODEL, arrivals, **WAYS[way])
    drafted, kept = drafts_in(seen[LaterSteps])
    assert found == undrafted(way)
    assert drafted > 150 and kept > 0.9 * drafted, "but for those behind a stop token"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("speculation", [NGRAM, SUFFIX, GRAMMAR, None], ids=["ngram", "suffix", "grammar", "liar"])
def test_drafted_steps_give_the_tokens_of_the_host(
    seen: dict[type, list[Computed]], monkeypatch: pytest.MonkeyPatch, speculation: Speculation | None, way: str
) -> None:
    """With log-probabilities, penalties, stops, minimum lengths, grammars; what the model is fed is compared at every step."""
    if speculation is None:
        monkeypatch.setattr(draft_rows, "drafter_of", lambda speculation: Liar(200))
    arrivals = repetitive_arrivals(16, 3, GRAMMARS)
    found = on_device(runner_of(), speculation or NGRAM, arrivals, **WAYS[way])
    assert found == on_host(runner_of(), speculation or NGRAM, arrivals, **WAYS[way])
    assert found == undrafted(way)
    drafted, kept = drafts_in(seen[LaterSteps])
    assert drafted > 20 and (speculation is None or kept > 10)


@pytest.mark.parametrize("speculation", [NGRAM, GRAMMAR, MODEL], ids=["ngram", "grammar", "model"])
def test_each_step_reports_what_the_host_s_step_does(seen: dict[type, list[Computed]], speculation: Speculation) -> None:
    """Tokens, counts, drafts, log-probabilities and the words of all inputs, masks too: of requests that all come in the first
    turn, so that the steps are the same."""
    arrivals = repetitive_arrivals(3, 7, GRAMMARS)
    make = with_draft_model if speculation is MODEL else runner_of
    on_device(make(), speculation, arrivals, pipeline_depth=1)
    on_host(make(), speculation, arrivals, pipeline_depth=1)
    device, host = ([each._replace(seconds=0.0) for each in seen[steps]] for steps in (LaterSteps, HostSteps))
    assert device == host and drafts_in(device)[0] > 5


@pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["one group", "two groups"])
def test_pieces_of_drafted_steps_give_the_tokens_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, object]
) -> None:
    """By the references, in which the twin's graphs see every operation."""
    chosen = plain_operations()
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: chosen)
    folder, arrivals = tiny_checkpoint(tmp_path / "tiny", **changes), repetitive_arrivals(10, 3)
    variants = DeviceVariants(operations=chosen, choose=sampler_for("cpu"), shapes=Shapes((), (4, 10, 24)))
    rank = device_rank(runner_of(folder), TwinDevice(), variants)
    found = driven(rank, runner_of(folder), NGRAM, arrivals)
    expected = on_host(runner_of(folder), None, arrivals)
    assert {id_: [token for token, _ in each] for id_, each in found.items()} == {
        id_: [token for token, _ in each] for id_, each in expected.items()
    }
    assert rank.steps.made.variants_run["pieces"] > 10 and rank.steps.made.variants_run["eager"] == 0


def alternating_arrivals(count: int) -> list[RequestArrived]:
    """Greedy requests with a few likely tokens, of which penalties choose the one that came least often."""
    arrivals = repetitive_arrivals(count, 3)
    for at, arrival in enumerate(arrivals):
        likely = tuple((token, 60.0 + token / 50) for token in range(5 + at, 9 + at))
        penalties = {"frequency_penalty": 0.9 * (at % 2), "presence_penalty": 1.5}
        sampling = Sampling(seed=at, temperature=0.0, max_tokens=20, logit_bias=likely, **penalties)
        arrivals[at] = replace(arrival, sampling=sampling)
    return arrivals


def count_no_earlier_drafts(self: ModelDrafts, runs: Any, everywhere: Any) -> HostStep:
    """A bug: penalties do not count the drafts before a draft."""
    found = host_step(self, runs, everywhere)
    return found._replace(samples=found.samples._replace(depths=np.zeros_like(found.samples.depths)))


def draft_by_old_tables(self: ModelDrafts, runs: Any, everywhere: Any) -> HostStep:
    """A bug: the device drafts before it knows the rows' new blocks and requests."""
    taken = self._batch.take_changes()
    found = host_step(self, runs, everywhere)
    self._batch.take_changes = lambda: take_changes(self._batch) | taken
    return found


def forget_nothing(self: ModelDrafts, places: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
    """A bug: the draft model reuses its keys and values of rejected drafts, and of pages that belong to another request by now."""


host_step, take_changes = ModelDrafts._host_step, DeviceBatch.take_changes
MODEL_BUGS = [
    ("_host_step", count_no_earlier_drafts), ("_host_step", draft_by_old_tables), ("forget", forget_nothing),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bug"), MODEL_BUGS, ids=[bug.__name__ for _, bug in MODEL_BUGS])
def test_planted_bugs_of_a_draft_model_are_seen(
    seen: dict[type, list[Computed]], monkeypatch: pytest.MonkeyPatch, name: str, bug: Any
) -> None:
    """By words of inputs, or by drafts of a model for itself that are wrong: such bugs change no token."""
    arrivals, way = (repetitive_arrivals(16, 3), alternating_arrivals(16))[name == "_host_step"], WAYS["three steps ahead, preempted"]
    on_device(with_draft_model(), MODEL, arrivals, **way)
    right = drafts_in(seen[LaterSteps])
    seen[LaterSteps].clear()
    monkeypatch.setattr(ModelDrafts, name, bug)
    try:
        on_device(with_draft_model(), MODEL, arrivals, **way)
    except AssertionError as error:
        assert "fed otherwise" in str(error)
        return
    drafted, kept = drafts_in(seen[LaterSteps])
    assert drafted - kept > right[0] - right[1]


def keep_every_draft(*arguments: Any) -> Kept:
    """A bug: no draft is compared with the request's own token."""
    scheduled, drafts, tokens, _ = arguments
    sizes = scheduled.drafts[scheduled.samples] + 1
    counts = bytes(sizes.tolist()) if len(drafts) else b""
    return Kept(tokens, np.arange(len(tokens)), counts, bytes((sizes - 1).tolist()) if counts else b"", drafts)


def forget_the_last_token(self: LaterDrafts, places: np.ndarray, *others: Any) -> None:
    """A bug: rows whose drafts were read take their last token from the device, which does not have it."""
    take(self, places, *others)
    self.is_known[places] = False


def start_where_it_was_planned(self: LaterDrafts, scheduled: StepInFlight, places: np.ndarray) -> Drafted:
    """A bug: a step without drafts of its own does not wait for those of the step before."""
    if scheduled.drafts.any():
        self._unread.read()
    return self._rows.drafted(scheduled, places, self._lengths)


def count_for_whoever_has_the_row(self: LaterDrafts, places: np.ndarray, has_drafts: Any, tenants: Any, samples: Any) -> None:
    """A bug: what a request has kept counts for the one that has its row by now."""
    take(self, places, has_drafts, self._tenants[places], samples)


def count_nothing(self: SamplingUpdates, places: np.ndarray, tokens: np.ndarray) -> None:
    """A bug: penalties do not know the tokens that were kept."""


def feed_by_place(self: DeviceBatch, *arguments: Any) -> HostSamples:
    """A bug: every sample of a row becomes its last token and counts, kept or not."""
    found = samples_of(self, *arguments)
    return found._replace(takers=found.rows)


def count_no_drafts(self: DeviceBatch, *arguments: Any) -> HostSamples:
    """A bug: penalties do not count the drafts before a sample."""
    found = samples_of(self, *arguments)
    return found._replace(depths=np.zeros_like(found.depths))


def read_out_of_turn(self: Unread, deed: Callable[[], None]) -> None:
    """A bug: a row's request changes before what its last step sampled is read."""
    deed()


take, samples_of = LaterDrafts._take, DeviceBatch._samples_of
BUGS = [
    (unread, "kept", keep_every_draft, "other tokens"),
    (LaterDrafts, "_take", forget_the_last_token, "step"),
    (LaterDrafts, "drafted", start_where_it_was_planned, "step"),
    (LaterDrafts, "_take", count_for_whoever_has_the_row, "step"),
    (SamplingUpdates, "count", count_nothing, "step"),
    (DeviceBatch, "_samples_of", feed_by_place, "step"),
    (DeviceBatch, "_samples_of", count_no_drafts, "step"),
    (Unread, "then", read_out_of_turn, ""),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "bug", "seen_by"), BUGS, ids=[bug.__name__ for _, _, bug, _ in BUGS])
def test_planted_bugs_of_drafted_steps_are_seen(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Any, seen_by: str
) -> None:
    """By wrong tokens, by words of inputs that the state does not have, or by a commit that the state refuses."""
    monkeypatch.setattr(owner, name, bug)
    for seed, way in ((9, "three steps ahead, few rows"), (3, "two steps ahead")):
        arrivals = repetitive_arrivals(24, seed, GRAMMARS)
        try:
            found = on_device(runner_of(), NGRAM, arrivals, **WAYS[way])
            assert found == on_host(runner_of(), None, arrivals, **WAYS[way]), "other tokens"
        except (AssertionError, IllegalEvent, KeyError) as error:
            assert str(error).startswith(seen_by), error
            return
    raise AssertionError("the bug is not seen")
