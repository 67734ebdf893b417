"""Adapters on a device's twin: read, copied, evicted and read again while rows run, they give the tokens of the plain rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import pytest
import torch
from device_twin import TwinDevice
from msgspec.structs import replace
from rank_drive import (
    Answers,
    device_rank,
    drive,
    host_rank,
    repetitive_arrivals,
    runner_of,
    some_arrivals,
    started_with,
    tiny_checkpoint,
)
from saved_adapters import save_adapter

from vnext.kernels.table import Operations, operations, plain_operations, substituted
from vnext.kernels.thin_tiles import names_of
from vnext.models.config.adapter_config import adapter_digest
from vnext.runtime.gpu.adapter_regions import AdapterRegions, Region
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.device import Mark
from vnext.runtime.gpu.device_batch import DeviceBatch
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.determinism import gpu_invariance
from vnext.runtime.protocol.messages import AdapterFiles, AdapterRead
from vnext.runtime.rank.adapters import AdapterSlots
from vnext.runtime.rank.gpu_loading import LaterSteps, keep_adapters, try_largest_step
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import Computed
from vnext.runtime.transport.ring.broadcast import ReadAdapter
from vnext.sampling.sampling import sampler_for
from vnext.state.config import Speculation
from vnext.state.events import AdapterEvicted, AdapterLoaded, RequestArrived

RANK_MAX = 20
TARGETS = (("q_proj", "v_proj", "up_proj"), ("k_proj", "gate_proj", "o_proj", "down_proj"), ("o_proj",))
"""Of the first three adapters; the last one has all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFiles]:
    """Adapters of the tiny model, of several ranks and layers."""
    found, parent = [], tmp_path_factory.mktemp("adapters")
    for seed in range(4):
        targets = {"targets": TARGETS[seed]} if seed < 3 else {}
        saved = save_adapter(folder, parent / str(seed), seed, rank=(1, 16, 5, RANK_MAX)[seed], lora_alpha=8, **targets)
        found.append(AdapterFiles(name=f"a{seed}", digest=adapter_digest(saved), path=str(saved)))
    return found


def adapted_arrivals(
    files: list[AdapterFiles], arrive: Callable[[int, int], list[RequestArrived]] = some_arrivals
) -> list[RequestArrived]:
    """Of five, four have an adapter, in changing order."""
    rng = random.Random(3)
    return [
        replace(each, sampling=replace(each.sampling, adapter=rng.choice(["", *(file.digest for file in files)])))
        for each in arrive(14, 3)
    ]


class StrictDevice(TwinDevice):
    """Refuses a copy to a region that does not wait for all work before it."""

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        if target.dtype == torch.uint8 and source.shape[0] > 2**16:
            assert after is self._newest, "a region is filled while steps may read it"
        return super().copy_in(target, source, after)


def served(
    folder: Path, files: list[AdapterFiles], chosen: Operations | None = None, max_loras: int = 2,
    arrivals: list[RequestArrived] | None = None, **bounds: Any,
) -> Answers:  # fmt: skip
    """The answers of a device's rank; of the plain rank without `chosen`."""
    runner = runner_of(folder, max_lora_rank=RANK_MAX)
    if chosen is None:
        rank = host_rank(runner)
    else:
        variants = DeviceVariants(operations=chosen, choose=sampler_for("cpu"), shapes=Shapes((), ()))
        rank = device_rank(runner, StrictDevice(), variants, max_loras, RANK_MAX)
    found = drive(rank, started_with(runner, max_loras=max_loras, **bounds), arrivals or adapted_arrivals(files), files=files)
    return found


def tokens_of(answers: Answers) -> dict[int, list[int]]:
    return {id_: [token for token, _ in each] for id_, each in answers.items()}


def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which regions take an adapter ("in") and give it up ("out"), in order, from here on."""
    found: list[tuple[str, int]] = []

    def noted(name: str, move: Callable[[AdapterRegions, Region], None]) -> None:
        monkeypatch.setattr(AdapterRegions, move.__name__, lambda self, region: (found.append((name, region.index)), move(self, region))[1])

    noted("in", AdapterRegions.use)
    noted("out", AdapterRegions.free)
    return found


@pytest.mark.parametrize("changes", [{}, {"max_loras": 1}, {"pipeline_depth": 3, "page_count": 40}], ids=["two slots", "one", "preempted"])
def test_tokens_are_those_of_the_plain_rank(
    folder: Path, files: list[AdapterFiles], monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    """In float32, where the sums differ in their last bits alone; what each step is fed is what the state says."""
    expected, moved = tokens_of(served(folder, files, **changes)), moves(monkeypatch)
    found = tokens_of(served(folder, files, chosen=operations("cpu"), **changes))
    assert found == expected and len(found) == 14
    assert moved.count(("in", 0)) > 1 and len({region for _, region in moved}) == changes.get("max_loras", 2) + 1
    base = [replace(each, sampling=replace(each.sampling, adapter="")) for each in adapted_arrivals(files)]
    without = tokens_of(served(folder, files, chosen=operations("cpu"), arrivals=base, **changes))
    adapted = [each.id for each in adapted_arrivals(files) if each.sampling.adapter]
    assert sum(without[id_] != found[id_] for id_ in adapted) > 5, "adapters change answers"


def test_products_of_one_shape_have_adapters_too(folder: Path, files: list[AdapterFiles], monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--deterministic` a weight is more than a tensor, and an adapter knows it by its identity."""
    expected, chosen = tokens_of(served(folder, files)), plain_operations()
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: chosen)
    monkeypatch.setattr(ModelRunner, "_invariance", lambda self, *_: gpu_invariance(True))
    assert tokens_of(served(folder, files, chosen=chosen)) == expected


def test_drafts_of_rows_with_adapters_are_verified_with_them(
    folder: Path, files: list[AdapterFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is another token of its row's adapter: answers are those without drafts, of which some were kept."""
    arrivals, kept = adapted_arrivals(files, repetitive_arrivals), list[int]()
    expected = tokens_of(served(folder, files, arrivals=arrivals))
    wait = LaterSteps.wait

    def counting(steps: LaterSteps) -> Computed:
        done = wait(steps)
        kept.append(sum(done.counts) - len(done.counts))
        return done

    monkeypatch.setattr(LaterSteps, "wait", counting)
    speculation = Speculation(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    drafted = served(folder, files, chosen=operations("cpu"), arrivals=arrivals, speculation=speculation)
    assert tokens_of(drafted) == expected and sum(kept) > 10


def before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterRegions, "is_there", lambda self, region: True)
    monkeypatch.setattr(AdapterRegions, "use", lambda self, region: None)


def while_steps_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second copy on: of the first, the twin itself asks that it comes after all work."""
    right, marks = StrictDevice.mark, []
    begin = AdapterRegions.begin

    def early(self: AdapterRegions, *given: Any) -> Region:
        marks.append(right(self._device))
        monkeypatch.setattr(self._device, "mark", lambda: marks[0])
        region = begin(self, *given)
        monkeypatch.setattr(self._device, "mark", lambda: right(self._device))
        return region

    monkeypatch.setattr(AdapterRegions, "begin", early)


def over_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterRegions, "use", lambda self, region: (self._device.join(region.mark), self.free(region)))


def of_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterSlots, "__getitem__", lambda self, slot: self.resident(max(self._residents)).held)


def of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    right, made = DeviceBatch._tiles_of, {}
    monkeypatch.setattr(DeviceBatch, "_tiles_of", lambda self, state, step: made.setdefault(step.tokens, right(self, state, step)))


POISONED = "shape .* is invalid for input of size 0"
"""What the twin leaves in a region until a copy has arrived makes no adapter."""
FAULTS = {
    before_it_is_there: (RuntimeError, POISONED),
    while_steps_may_read: (AssertionError, "a region is filled while steps may read it"),
    over_one_that_is_used: ((RuntimeError, AssertionError), POISONED + r"|is fed otherwise: \['adapters'\]"),  # as the copy has arrived
    of_another_slot: (AssertionError, r"is fed otherwise: \['adapters'\]"),
    of_the_step_before: (AssertionError, r"is fed otherwise: \['adapters'\]"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_adapter_that_is_not_the_request_s_is_found(
    folder: Path, files: list[AdapterFiles], monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Planted: one that is used before its time, overwritten, or taken for another."""
    fault(monkeypatch)
    error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        served(folder, files, chosen=operations("cpu"))


class Slots(NamedTuple):
    """A rank's slots without its steps."""

    slots: AdapterSlots
    regions: AdapterRegions

    def read(self, each: AdapterFiles) -> None:
        self.slots.read(ReadAdapter(digest=each.digest, path=each.path))

    def reported(self) -> AdapterRead:
        """What is reported of the adapter that is read, once it is there."""
        for _ in range(2000):
            if found := self.slots.done():
                return found[0]
            sleep(0.002)
        raise AssertionError("nothing is reported")

    def load(self, slot: int, each: AdapterFiles) -> None:
        self.slots.fold(AdapterLoaded(name=each.name, digest=each.digest, slot=slot, path=each.path))

    def names(self, *slots: int) -> list[str]:
        """The adapters that lie in the regions of these slots."""
        names = names_of(self.regions.memory)
        return [names[self.slots[slot].index] for slot in slots]


@pytest.fixture
def slots(folder: Path) -> Slots:
    runner = runner_of(folder, max_lora_rank=RANK_MAX)
    keep_adapters(runner, StrictDevice(), 2, RANK_MAX)
    return Slots(runner.adapters, runner.regions)


def test_adapters_that_nobody_asked_for_are_read_when_they_are_loaded(slots: Slots, files: list[AdapterFiles]) -> None:
    """As in the replay of a log; and beside one that is being read, which stays, or is given up for another."""
    first, second, third, last = files
    slots.load(0, first)
    slots.read(second)
    slots.load(1, third)
    assert slots.names(0, 1) == [first.digest, third.digest]
    assert slots.reported() == AdapterRead(rank=0, digest=second.digest, error="")
    slots.slots.fold(AdapterEvicted(slot=0))
    slots.load(0, second)
    assert slots.names(0, 1) == [second.digest, third.digest]
    slots.read(first)
    slots.reported()
    slots.read(last)
    assert slots.reported().digest == last.digest and not slots.slots.is_reading
    slots.slots.fold(AdapterEvicted(slot=1))
    slots.load(1, last)
    assert slots.names(0, 1) == [second.digest, last.digest]


def test_an_adapter_that_cannot_be_read_is_reported_and_takes_no_room(slots: Slots, files: list[AdapterFiles]) -> None:
    slots.load(0, files[0])
    slots.load(1, files[1])
    for _ in range(3):
        slots.read(AdapterFiles(name="", digest="0" * 32, path=files[2].path))
        assert "has changed since it was named" in slots.reported().error
    slots.read(files[3])
    assert slots.reported().error == ""
    assert slots.names(0, 1) == [files[0].digest, files[1].digest]


def test_the_largest_step_has_adapters(folder: Path) -> None:
    """So that the cache leaves their memory free. It writes nothing into a region."""
    runner = runner_of(folder, max_lora_rank=RANK_MAX)
    keep_adapters(runner, TwinDevice(), 1, RANK_MAX)
    seen, add = [], plain_operations().add_tiled

    def noted(product: torch.Tensor, x: torch.Tensor, memory: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(others[0].shape)
        return add(product, x, memory, *others)

    with substituted(operations("cpu")._replace(add_tiled=noted)):
        try_largest_step(runner, TwinDevice(), sampler_for("cpu"), 30, 4, 4)
    assert seen == [(30,)] * 8 and not runner.regions.memory.any(), "four products in each of two layers"
