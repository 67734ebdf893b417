"""Steps with drafts as graphs, by the CUDA kernels' own sources on the CPU: drafts are query rows, and change no token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from device_twin import WaitingError
from device_watch import watch_steps
from graph_cases import answers
from heads.saved import random_head, tiny_mimo
from host_shim import HostBackend
from msgspec.structs import replace
from rank_drive import WINDOWS, repetitive_arrivals, tiny_checkpoint

from vnext.kernels.table import Operations
from vnext.runtime.batch.draft_batch import DraftedRow
from vnext.runtime.batch.draft_rows import Drafted, Kept
from vnext.runtime.gpu import unread
from vnext.runtime.gpu.buckets import Shapes, choose_variant
from vnext.runtime.gpu.decode_graphs import DecodeGraphs
from vnext.runtime.gpu.device_batch import HostStep
from vnext.runtime.gpu.head_drafts import DeviceHeadDrafts
from vnext.runtime.gpu.model_drafts import ModelDrafts
from vnext.runtime.gpu.unread import MADE, LaterDrafts, Unread
from vnext.state.config import Speculation
from vnext.state.events import RequestArrived
from vnext.state.params import Constraint
from vnext.state.state import StepInFlight

NGRAM = Speculation(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
MODEL = Speculation(method="draft_model", model="itself", num_speculative_tokens=3)
EAGER, GRAPHS = Shapes((), ()), Shapes((4, 24), (24,))


def bound_by_lists(count: int, seed: int) -> list[RequestArrived]:
    """Every third request may use few tokens only, and drafts nothing."""
    arrivals = repetitive_arrivals(count, seed)
    for at in range(0, count, 3):
        constraint = Constraint(allowed=tuple(range(5 + at, 25 + at)), banned=((9,), (11, 12)))
        arrivals[at] = replace(arrivals[at], sampling=replace(arrivals[at].sampling, constraint=constraint, min_tokens=0))
    return arrivals


@pytest.mark.parametrize(
    ("changes", "arrive"), [({}, repetitive_arrivals), (WINDOWS, repetitive_arrivals), ({}, bound_by_lists)],
    ids=["one group", "two groups", "masked"],
)  # fmt: skip
def test_graphs_of_drafted_steps_give_the_tokens_without_drafts(
    kernels: Operations, shim: HostBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object],
    arrive: Callable[[int, int], list[RequestArrived]],
) -> None:  # fmt: skip
    """A graph of 4 rows serves four decodes, or a request with three drafts: what is captured knows no drafts."""
    folder, run, drafts = tiny_checkpoint(tmp_path / "tiny", **changes), DecodeGraphs.run, defaultdict[int, list[int]](list)

    def watched(self: DecodeGraphs, step: HostStep, rows: int, *others: object) -> object:
        drafts[rows].append(len(step.drafted.tokens))
        return run(self, step, rows, *others)

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    expected, ran = answers(kernels, folder, EAGER, 9, arrive=arrive)
    assert ran["eager"] > 10
    found, ran = answers(kernels, folder, GRAPHS, 9, arrive=arrive, speculation=NGRAM)
    assert found == expected and ran["eager"] == 0
    assert sum(map(sum, drafts.values())) > 20 and min(drafts[4]) == 0 < max(drafts[4])


def test_a_model_drafts_in_graphs_and_pieces(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself by its own graphs is right, but behind a stop token."""
    folder, run_step, kept = tiny_checkpoint(tmp_path / "tiny"), ModelDrafts._run_step, unread.kept
    variants, drafts = defaultdict[str, int](int), [0, 0]

    def watched(self: ModelDrafts, step: HostStep) -> torch.Tensor | None:
        variants[choose_variant(len(step.token_ids), step.is_decode, False, self._variants.shapes).variant] += 1
        return run_step(self, step)

    def counted(*arguments: object) -> Kept:
        found = kept(*arguments)
        drafts[0], drafts[1] = drafts[0] + sum(found.drafted), drafts[1] + sum(found.counts) - len(found.counts)
        return found

    monkeypatch.setattr(ModelDrafts, "_run_step", watched)
    monkeypatch.setattr(unread, "kept", counted)
    expected, _ = answers(kernels, folder, EAGER, 7, arrive=repetitive_arrivals)
    found, ran = answers(kernels, folder, GRAPHS, 7, arrive=repetitive_arrivals, speculation=MODEL, drafts_itself=True)
    assert found == expected and ran["eager"] == 0
    assert variants["graph"] > 20 and variants["pieces"] > 3 and variants["eager"] == 0
    assert drafts[0] > 40 and drafts[1] > 0.9 * drafts[0]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_drafts_behind_graphs_and_pieces(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Graphs and pieces leave the states that eager steps leave: the head drafts the same, and the tokens are those without drafts."""
    folder = tiny_mimo(tmp_path / "tiny") if method == "mtp" else tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=3)
    head = folder if method == "mtp" else random_head(tmp_path / "head", vocab=211, known=180, layers=(0, 2))
    speculation, drafts = Speculation(method=method, num_speculative_tokens=3), DeviceHeadDrafts.drafts
    found: list[dict[bytes, list[int]]] = []

    def watched(self: DeviceHeadDrafts, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        made = drafts(self, rows)
        found[-1] |= {row.tokens.tobytes(): self.made.numpy()[MADE - each].tolist() for row, each in zip(rows, made) if len(each)}
        return made

    monkeypatch.setattr(DeviceHeadDrafts, "drafts", watched)
    expected, _ = answers(kernels, folder, EAGER, 7, arrive=repetitive_arrivals)
    for shapes in (EAGER, GRAPHS):
        found.append({})
        tokens, ran = answers(kernels, folder, shapes, 7, arrive=repetitive_arrivals, speculation=speculation, head=head)
        assert tokens == expected
    assert ran["graph"] > 12 and ran["pieces"] > 3 and ran["eager"] == 0
    both = found[0].keys() & found[1].keys()
    assert len(both) > 20
    for each in both:
        assert all(a == b for a, b in zip(found[0][each], found[1][each]))


def test_a_draft_that_a_row_takes_is_seen(kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the draft model draws counts and becomes the row's last token, as a graph of the model's own step has it."""
    folder, host_step = tiny_checkpoint(tmp_path / "tiny"), ModelDrafts._host_step

    def taken(self: ModelDrafts, runs: object, everywhere: bool | None) -> HostStep:
        found = host_step(self, runs, everywhere)
        return found._replace(samples=found.samples._replace(takers=found.samples.rows))

    monkeypatch.setattr(ModelDrafts, "_host_step", taken)
    with pytest.raises(AssertionError, match="fed otherwise: .*counted tokens"):
        answers(kernels, folder, GRAPHS, 4, arrive=repetitive_arrivals, speculation=MODEL, drafts_itself=True)


def undrafted(count: int, seed: int) -> list[RequestArrived]:
    """Requests that ask for no drafts."""
    arrivals = repetitive_arrivals(count, seed)
    return [replace(each, sampling=replace(each.sampling, num_speculative_tokens=0)) for each in arrivals]


def read_all(self: LaterDrafts, scheduled: StepInFlight, places: np.ndarray) -> Drafted:
    """A step that waits for those before it, whoever drafts."""
    self._unread.read()
    return self._rows.drafted(scheduled, places, self._lengths)


@pytest.mark.parametrize("shapes", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_rows_that_do_not_draft_wait_for_nothing(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: Shapes
) -> None:
    """In an engine with drafts. A step that drafts waits, and so would all steps if they read what they need not."""
    folder, watches, lengths, look = tiny_checkpoint(tmp_path / "tiny"), watch_steps(monkeypatch), [], Unread.look

    def looked(self: Unread) -> None:
        look(self)
        lengths.append(len(self._deeds))

    monkeypatch.setattr(Unread, "look", looked)
    given = {"speculation": NGRAM, "pipeline_depth": 3}
    answers(kernels, folder, shapes, arrive=undrafted, **given)
    assert len(watches) > 25 and all(watch.looks > 20 for watch in watches)
    assert 1 < max(lengths) < 10, "what was reported is read"
    with pytest.raises(WaitingError, match="waits for a mark"):
        answers(kernels, folder, shapes, arrive=repetitive_arrivals, **given)
    monkeypatch.setattr(LaterDrafts, "drafted", read_all)
    with pytest.raises(WaitingError, match="waits for a mark"):
        answers(kernels, folder, shapes, arrive=undrafted, **given)


def forget_depths(fields: dict[str, np.ndarray], step: HostStep) -> None:
    fields["depths"][:] = 0


def forget_takers(fields: dict[str, np.ndarray], step: HostStep) -> None:
    fields["takers"][: len(step.token_ids)] = step.samples.rows


def forget_drafts(fields: dict[str, np.ndarray], step: HostStep) -> None:
    fields["tokens"][: len(step.token_ids)][step.samples.depths > 0] = 7


@pytest.mark.parametrize("bug", [forget_depths, forget_takers, forget_drafts])
def test_planted_faults_of_a_graph_s_block_are_seen(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[..., None]
) -> None:
    """What is hashed is what the graph's own memory holds."""
    folder, block_of = tiny_checkpoint(tmp_path / "tiny"), DecodeGraphs.block_of

    def wrong(self: DecodeGraphs, step: HostStep | None, *sizes: int) -> np.ndarray:
        block = block_of(self, step, *sizes)
        if step is not None:
            bug(self.layout(*sizes).arrays(block), step)
        return block

    monkeypatch.setattr(DecodeGraphs, "block_of", wrong)
    with pytest.raises(AssertionError, match="fed otherwise"):
        answers(kernels, folder, GRAPHS, arrive=repetitive_arrivals, speculation=NGRAM)
