"""Draft heads on a device's twin: the drafts are those of the host's head, and no step waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from device_twin import TwinDevice, TwinMark
from heads.runners import head_runner
from heads.saved import random_head, right_head, save_mimo, save_target
from rank_drive import Answers, device_rank, repetitive_arrivals
from test_device_drafts import GRAMMARS, MODEL, WAYS, alternating_arrivals, driven, on_device, on_host, with_draft_model

from vnext.kernels.table import plain_operations
from vnext.models.layers.batch import ForwardBatch
from vnext.runtime.batch.draft_batch import DraftBatch, DraftedRow, HeadDrafts
from vnext.runtime.gpu import device_batch, head_drafts, unread
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.head_drafts import DeviceHeadDrafts
from vnext.runtime.gpu.row_parameters import RowParameters
from vnext.runtime.gpu.steps import DeviceSteps, DeviceVariants, PendingStep
from vnext.runtime.gpu.unread import MADE
from vnext.runtime.rank.draft_head import DraftHead
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.sampling import sampler_for
from vnext.state.config import Speculation
from vnext.state.events import RequestArrived
from vnext.state.state import State

Make = Callable[[], ModelRunner]
Drafts = dict[bytes, list[tuple[int, ...]]]
EAGLE = Speculation(method="eagle3", model="a head", num_speculative_tokens=3)
MTP = Speculation(method="mtp", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Make, Speculation]]:
    """Runners of models with heads: a right one, a wrong one that sees all tokens, and a model's own layer."""
    parent = tmp_path_factory.mktemp("models")
    target, mimo = save_target(parent / "target"), save_mimo(parent / "mimo")
    right, random = right_head(parent / "right", target), random_head(parent / "random")
    return {
        "right": (partial(head_runner, target, right), EAGLE), "random": (partial(head_runner, target, random), EAGLE),
        "mtp": (partial(head_runner, mimo), MTP),
    }  # fmt: skip


@pytest.fixture(scope="module")
def undrafted(makers: dict[str, tuple[Make, Speculation]]) -> Callable[[str, str], Answers]:
    """What the host answers without drafts, by model and way; the two heads have the same model."""
    answers = cache(lambda kind, way: on_host(makers[kind][0](), None, repetitive_arrivals(16, 3, GRAMMARS), **WAYS[way]))
    return lambda kind, way: answers("mtp" if kind == "mtp" else "right", way)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> dict[type, Drafts]:
    """What heads of both kinds draft behind which tokens; the twin's drafts are there at once."""
    found: dict[type, Drafts] = {HeadDrafts: defaultdict(list), DeviceHeadDrafts: defaultdict(list)}
    drafts = DraftBatch.drafts

    def watched(self: DraftBatch, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        made = drafts(self, rows)
        for row, each in zip(rows, made):
            if len(each):
                known = each if self.made is None else self.made.numpy()[MADE - each]
                found[type(self)][row.tokens.tobytes()].append(tuple(known.tolist()))
        return made

    monkeypatch.setattr(DraftBatch, "drafts", watched)
    return found


def require_same(drafted: dict[type, Drafts], at_least: int) -> None:
    """Behind the same tokens both kinds draft the same, as many of them as both have drafted."""
    device, host = drafted[DeviceHeadDrafts], drafted[HeadDrafts]
    both = device.keys() & host.keys()
    assert len(both) > at_least, len(both)
    for tokens in both:
        for found in device[tokens]:
            assert all(a == b for other in host[tokens] for a, b in zip(found, other)), "other drafts"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["right", "random", "mtp"])
def test_a_head_drafts_what_it_drafts_on_the_host(
    drafted: dict[type, Drafts], makers: dict[str, tuple[Make, Speculation]], undrafted: Callable[[str, str], Answers], kind: str,
    way: str,
) -> None:  # fmt: skip
    """After preemptions, hits in the prefix cache and prompts in pieces, and with penalties; what the model is fed is compared at
    every step. The tokens are those without drafts."""
    (make, speculation), arrivals = makers[kind], repetitive_arrivals(16, 3, GRAMMARS)
    found = on_device(make(), speculation, arrivals, **WAYS[way])
    assert found == on_host(make(), speculation, arrivals, **WAYS[way])
    assert found == undrafted(kind, way)
    require_same(drafted, 45)


@pytest.mark.parametrize("kind", ["right", "mtp"])
def test_pieces_write_the_states(
    monkeypatch: pytest.MonkeyPatch, drafted: dict[type, Drafts], makers: dict[str, tuple[Make, Speculation]], kind: str
) -> None:
    """By the references, in which the twin's graphs see every operation."""
    chosen, (make, speculation) = plain_operations(), makers[kind]
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    for module in ("models.layers.layers", "models.layers.head_layer", "models.families.llama_eagle3", "models.families.mimo"):
        monkeypatch.setattr(f"vnext.{module}.operations", lambda device_type: chosen)
    arrivals = repetitive_arrivals(8, 3)
    variants = DeviceVariants(operations=chosen, choose=sampler_for("cpu"), shapes=Shapes((), (4, 10, 24)))
    runner = make()
    rank = device_rank(runner, TwinDevice(), variants)
    found, expected = driven(rank, runner, speculation, arrivals), on_host(make(), speculation, arrivals)
    assert {id_: [token for token, _ in each] for id_, each in found.items()} == {
        id_: [token for token, _ in each] for id_, each in expected.items()
    }
    assert rank.steps.made.variants_run["pieces"] > 10 and rank.steps.made.variants_run["eager"] == 0
    require_same(drafted, 25)


def waits_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each launch from here on waits for the device."""
    launch, wait, found = DeviceSteps.launch, TwinMark.wait, list[int]()

    def launched(self: DeviceSteps, state: State) -> PendingStep:
        found.append(0)
        self._device.launches = True
        try:
            return launch(self, state)
        finally:
            self._device.launches = False

    def waited(self: TwinMark) -> None:
        if self._arrive is not None and getattr(self._device, "launches", False) and not self._device.at_work:
            found[-1] += 1
        wait(self)

    monkeypatch.setattr(DeviceSteps, "launch", launched)
    monkeypatch.setattr(TwinMark, "wait", waited)
    return found


@pytest.mark.parametrize("kind", ["right", "mtp", "draft model"])
def test_a_step_waits_for_no_draft_of_a_head(
    monkeypatch: pytest.MonkeyPatch, makers: dict[str, tuple[Make, Speculation]], kind: str
) -> None:
    """A step that drafts waits for the one before, as with every drafter; with a draft model also for each draft."""
    make, speculation = makers.get(kind, (with_draft_model, MODEL))
    waits = waits_of(monkeypatch)
    on_device(make(), speculation, repetitive_arrivals(16, 3))
    assert len(waits) > 25 and sum(waits) > 10
    assert (max(waits) == 1) == (kind != "draft model")


# ---- planted faults ----------------------------------------------------------------------------------------------


def write_no_states(self: DraftHead, slots: torch.Tensor, aux: Any) -> None:
    """A bug: steps of the model leave no states."""


def write_states_behind(self: DraftHead, slots: torch.Tensor, aux: Any) -> None:
    """A bug: states lie a place behind their tokens."""
    write(self, (slots + 1) % len(self._states), aux)


def forget_nothing(self: DeviceHeadDrafts, places: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
    """A bug: the head keeps what it has computed of pages that have a new holder."""


def keep_drafts(self: DeviceHeadDrafts, runs: Any, drafts: Any) -> np.ndarray:
    """A bug: what the head has computed of drafts, by states of its own, serves later."""
    found = draw(self, runs, drafts)
    self._note(runs)
    return found


def read_own_state(self: DeviceHeadDrafts, sent: Any, width: int) -> tuple[ForwardBatch, torch.Tensor]:
    """A bug: a token reads the state at its own place."""
    rows, _ = rows_of(self, sent, width)
    return rows, rows.slots


def see_the_first_token(self: DeviceHeadDrafts, sent: Any, width: int) -> tuple[ForwardBatch, torch.Tensor]:
    """A bug: the table begins with the first token, which the head does not compute."""
    rows, before = rows_of(self, sent, width)
    first = self._batch.table.index_select(0, sent["sampled"])[:, :1] * self._config.block_size
    return rows._replace(block_table=torch.cat((first, rows.block_table), dim=1)), before


def draft_by_the_first(token_ids: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A bug: the device takes the drafts of the first row."""
    return with_made(token_ids.clamp(min=MADE), made)


def draft_by_old_tables(self: DeviceHeadDrafts, *given: Any) -> None:
    """A bug: the head drafts before the device knows the rows' new blocks and requests."""
    taken = self._batch.take_changes()
    step(self, *given)
    self._batch.take_changes = lambda: type(self._batch).take_changes(self._batch) | taken


def count_no_drafts(self: DeviceHeadDrafts, *given: Any) -> None:
    """A bug: penalties do not count the drafts before a draft."""
    step(self, *given)
    for entries in self._counted:
        self._batch.parameters.uncount(entries)
    self._counted.clear()


def count_for_good(self: RowParameters, entries: torch.Tensor) -> None:
    """A bug: penalties count drafts that are not kept."""


write, draw, step = DraftHead.write, DeviceHeadDrafts._draw, DeviceHeadDrafts._step
rows_of, with_made = DeviceHeadDrafts._rows, unread.with_made
BUGS: list[tuple[Any, str, Any]] = [
    (DraftHead, "write", write_no_states), (DraftHead, "write", write_states_behind),
    (DeviceHeadDrafts, "forget", forget_nothing), (DeviceHeadDrafts, "_draw", keep_drafts),
    (DeviceHeadDrafts, "_rows", read_own_state), (DeviceHeadDrafts, "_rows", see_the_first_token),
    (head_drafts, "with_made", draft_by_the_first), (device_batch, "with_made", draft_by_the_first),
    (DeviceHeadDrafts, "_step", draft_by_old_tables), (DeviceHeadDrafts, "_step", count_no_drafts),
    (RowParameters, "uncount", count_for_good),
]  # fmt: skip


@pytest.fixture
def on_the_host(drafted: dict[type, Drafts], makers: dict[str, tuple[Make, Speculation]]) -> Callable[[bool], None]:
    """Puts what the wrong head drafts on the host among `drafted`; it computes that once for all bugs."""

    def put(penalised: bool) -> None:
        if penalised not in HOST_DRAFTS:
            make, speculation = makers["random"]
            on_host(make(), speculation, arrivals_of(penalised), **WAY)
            HOST_DRAFTS[penalised] = dict(drafted[HeadDrafts])
        drafted[HeadDrafts].update(HOST_DRAFTS[penalised])

    return put


def arrivals_of(penalised: bool) -> list[RequestArrived]:
    return alternating_arrivals(16) if penalised else repetitive_arrivals(16, 3)


HOST_DRAFTS: dict[bool, Drafts] = {}
WAY = WAYS["three steps ahead, preempted"]


@pytest.mark.parametrize(("owner", "name", "bug"), BUGS, ids=[f"{bug.__name__}, {owner.__name__.split('.')[-1]}" for owner, _, bug in BUGS])
def test_planted_bugs_of_heads_are_seen(
    monkeypatch: pytest.MonkeyPatch, drafted: dict[type, Drafts], makers: dict[str, tuple[Make, Speculation]],
    on_the_host: Callable[[bool], None], owner: Any, name: str, bug: Any,
) -> None:  # fmt: skip
    """By other drafts than the host's, or by words of inputs that the state does not have."""
    make, speculation = makers["random"]
    penalised = bug in (count_no_drafts, count_for_good)
    on_the_host(penalised)
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError, match="other drafts|fed otherwise"):
        on_device(make(), speculation, arrivals_of(penalised), **WAY)
        require_same(drafted, 10)
