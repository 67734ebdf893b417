"""Steps on a device's twin: asked for ahead of their tokens, in any form, they give the tokens of the plain rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_twin import CaptureError, TwinDevice
from msgspec.structs import replace
from rank_drive import (
    WINDOWS,
    device_rank,
    drive,
    host_rank,
    picky_arrivals,
    runner_of,
    some_arrivals,
    started_with,
    tiny_checkpoint,
)

from vnext.kernels.table import Operations, operations, plain_operations
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.piecewise_graphs import PiecewiseGraphs, Static
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.determinism import gpu_invariance
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.sampling import sampler_for
from vnext.state.events import RequestArrived

NOTHING = Shapes((), ())
PIECES = Shapes((), (4, 10, 24))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """The references compute, in which the twin's graphs see every operation."""
    chosen = plain_operations()
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: chosen)
    return chosen


@pytest.mark.parametrize(
    ("dtype", "arrive", "changes"),
    [
        ("float32", some_arrivals, {}),
        ("float32", some_arrivals, {"pipeline_depth": 1, "prefix_caching": False}),
        ("bfloat16", some_arrivals, {"pipeline_depth": 3, "page_count": 40}),
        ("float32", picky_arrivals, {"pipeline_depth": 3, "page_count": 30}),
    ],
    ids=["two steps ahead", "in step", "three steps ahead, preempted", "asking for much, preempted"],
)
def test_tokens_fed_on_the_device_are_those_of_the_plain_rank(
    dtype: str, arrive: Callable[[int, int], list[RequestArrived]], changes: dict[str, object]
) -> None:
    """By the CPU's own kernels where they were built; penalised rows count tokens that the host has not seen."""
    arrivals, expected_runner = arrive(14, 3), runner_of(dtype=dtype)
    started = started_with(expected_runner, **changes)
    expected = drive(host_rank(expected_runner), started, arrivals, abort=4)
    variants = DeviceVariants(operations=operations("cpu"), choose=sampler_for("cpu"), shapes=NOTHING)
    rank = device_rank(runner_of(dtype=dtype), TwinDevice(), variants)
    found = drive(rank, started, arrivals, abort=4)
    for answers in (found, expected):
        answers.pop(4, None)  # aborted, sooner or later
    assert found == expected and len(found) == 13


@pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["one group", "two groups"])
def test_pieces_of_padded_steps_give_the_tokens_of_whole_ones(
    plain: Operations, tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **changes)
    started, arrivals = started_with(runner_of(folder)), some_arrivals(14, seed=5)
    expected = drive(host_rank(runner_of(folder)), started, arrivals)
    device = TwinDevice()
    rank = device_rank(runner_of(folder), device, DeviceVariants(operations=plain, choose=sampler_for("cpu"), shapes=PIECES))
    assert tokens_of(drive(rank, started, arrivals)) == tokens_of(expected)
    assert rank.steps.made.variants_run["pieces"] > 10 and rank.steps.made.variants_run["graph"] == 0
    assert device.replays == 3 * rank.steps.made.variants_run["pieces"], "two layers have three pieces"


def forget_positions(static: Static) -> Static:
    return static._replace(positions=static.positions.clone())


def forget_samples(static: Static) -> Static:
    return static._replace(sample_at=static.sample_at.clone())


def forget_padding(static: Static) -> Static:
    return static._replace(slots=tuple(slots.clone() for slots in static.slots))


@pytest.mark.parametrize("bug", [forget_positions, forget_samples, forget_padding])
def test_the_twin_finds_what_was_not_copied_to_static_memory(
    plain: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[[Static], Static]
) -> None:
    """Each bug writes a step's input beside the memory that the graphs read."""
    folder, fill = tiny_checkpoint(tmp_path / "tiny"), PiecewiseGraphs._fill
    started, arrivals = started_with(runner_of(folder)), some_arrivals(6, seed=5)
    variants = DeviceVariants(operations=plain, choose=sampler_for("cpu"), shapes=PIECES)
    right = drive(device_rank(runner_of(folder), TwinDevice(), variants), started, arrivals)
    monkeypatch.setattr(PiecewiseGraphs, "_fill", lambda self, static, batch: fill(self, bug(static), batch))
    wrong = drive(device_rank(runner_of(folder), TwinDevice(), variants), started, arrivals)
    assert tokens_of(wrong) != tokens_of(right)


def linear_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As a library whose sums go in another order for each number of rows, only more so."""
    return torch.matmul(x, weight.T) * (1.0 + x.shape[0] * 2.0**-7)


def test_products_of_one_shape_make_an_answer_independent_of_its_batch(
    plain: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs of padded steps too: `--deterministic` on a device whose products depend on their shape."""
    folder, arrivals = tiny_checkpoint(tmp_path / "tiny"), some_arrivals(6, seed=5)
    monkeypatch.setattr("vnext.kernels.products.functional.linear", linear_by_rows)
    monkeypatch.setattr(torch.Tensor, "matmul", lambda x, turned: linear_by_rows(x, turned.T))

    def answers(asked: bool, given: list[list[RequestArrived]]) -> list[list[int]]:
        monkeypatch.setattr(ModelRunner, "_invariance", lambda self, *_: gpu_invariance(asked))
        found = []
        for some in given:
            variants = DeviceVariants(operations=plain, choose=sampler_for("cpu"), shapes=PIECES)
            rank = device_rank(runner_of(folder), TwinDevice(), variants)
            each = tokens_of(drive(rank, started_with(runner_of(folder), prefix_caching=False), some))
            found += [each[id_] for id_ in sorted(each)]
        return found

    alone = [[replace(each, id=0)] for each in arrivals]
    assert answers(True, alone) == answers(True, [arrivals])
    assert answers(False, alone) != answers(False, [arrivals])


def test_a_recorded_step_knows_addresses_and_no_python() -> None:
    device, source, scale = TwinDevice(), torch.tensor([1.0, 2.0]), 3.0
    graph = device.graph()
    graph.begin()
    result = (source * scale).cumsum(0)
    graph.end()
    assert not result.isfinite().any(), "what recording computed is not what a replay gives"
    scale = 5.0
    source.fill_(2.0)
    graph.replay()
    assert result.tolist() == [6.0, 12.0]
    graph = device.graph()
    graph.begin()
    with pytest.raises(CaptureError, match="waits for the device"):
        source.sum().item()
    graph.end()


def tokens_of(answers: dict[int, list[tuple[int, object]]]) -> dict[int, list[int]]:
    """Log-probabilities aside: products of another number of rows differ in their last bits."""
    return {id_: [token for token, _ in each] for id_, each in answers.items()}
