"""What a device's batch gives to the model is held to the state, in every form of its steps: spoilt, it is named by its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from device_twin import TwinDevice
from msgspec.structs import replace
from rank_drive import device_rank, drive, runner_of, some_arrivals, started_with, tiny_checkpoint

from vnext.kernels.table import plain_operations
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.device_batch import DeviceBatch
from vnext.runtime.gpu.sampling_updates import FLOATS, LONGS
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.sampling.sampling import sampler_for
from vnext.state.events import RequestArrived
from vnext.state.params import Sampling

SPOILT_STEP, ROW = 6, 1
SPECIAL = Sampling(
    seed=5, max_tokens=14, min_tokens=12, temperature=0.5, logit_bias=((3, 1.5),), stop_token_ids=(9,), repetition_penalty=1.25
)  # fmt: skip
Spoil = Callable[[DeviceBatch], None]


def other_block(batch: DeviceBatch) -> None:
    batch.table[ROW, 0] += 1


def other_last_token(batch: DeviceBatch) -> None:
    batch.last[ROW] += 1


def other_count(batch: DeviceBatch) -> None:
    """One token was sampled once less and another once more: their sum is what it was."""
    history = batch.parameters.tables.history[ROW]
    history[199] += 1
    history[198] -= 1


def column(table: int, place: int, value: float) -> Spoil:
    def spoil(batch: DeviceBatch) -> None:
        batch.parameters.columns[table][place, ROW] = value

    return spoil


def other_bias(batch: DeviceBatch) -> None:
    batch.parameters.tables.bias_values[ROW] += 1


def other_stops(batch: DeviceBatch) -> None:
    batch.parameters.tables.stop_tokens[ROW] += 1


FAULTS: dict[str, tuple[Spoil, str]] = {
    "a block of the table is another": (other_block, "block tables"),
    "the last token is another": (other_last_token, "token ids"),
    "temperature is another": (column(0, FLOATS.index("temperature"), 0.25), "temperature"),
    "top_p is another": (column(0, FLOATS.index("top_p"), 0.5), "top_p"),
    "a penalty is another": (column(0, FLOATS.index("presence_penalty"), 0.5), "presence_penalty"),
    "the seed is another": (column(1, LONGS.index("seed"), 77), "seed"),
    "a minimum length is forgotten": (column(1, LONGS.index("until"), 0), "banned tokens"),
    "a bias is another": (other_bias, "logit bias"),
    "a bias is forgotten": (column(1, LONGS.index("bias_count"), 0), "logit bias"),
    "stop tokens are others": (other_stops, "banned tokens"),
    "counts are another request's": (other_count, "counted tokens"),
}


def served(folder: Path, shapes: Shapes, spoil: Spoil | None) -> None:
    """Two requests on a device's twin; `spoil` happens to its batch right before SPOILT_STEP."""
    runner, arrivals = runner_of(folder), two_arrivals()
    rank = device_rank(
        runner, TwinDevice(), DeviceVariants(operations=plain_operations(), choose=sampler_for("cpu"), shapes=shapes)
    )
    started = started_with(runner, prefix_caching=False, eos_token_ids=())
    make = rank.steps._make_steps

    def spoiling(state):
        steps = make(state)
        launch = steps.launch

        def launch_spoilt(state):
            if spoil is not None and state.in_flight[-1].step == SPOILT_STEP:
                spoil(steps._batch)
            return launch(state)

        steps.launch = launch_spoilt
        return steps

    rank.steps._make_steps = spoiling
    drive(rank, started, arrivals)


def two_arrivals() -> list[RequestArrived]:
    return [replace(each, sampling=replace(SPECIAL, seed=each.id)) for each in some_arrivals(2, seed=5)]


@pytest.fixture(params=[Shapes((), ()), Shapes((), (4, 10, 24, 48))], ids=["as they are", "in pieces"])
def shapes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shapes:
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    for room in ("loading.tensor_place", "layers.layers"):
        monkeypatch.setattr(f"vnext.models.{room}.operations", lambda device_type: plain_operations())
    return request.param


@pytest.mark.parametrize("name", FAULTS)
def test_a_device_batch_that_drifted_is_named_at_its_step(shapes: Shapes, tmp_path: Path, name: str) -> None:
    spoil, kinds = FAULTS[name]
    with pytest.raises(AssertionError, match=f"step {SPOILT_STEP} is fed otherwise: .*{kinds}"):
        served(tiny_checkpoint(tmp_path / "tiny"), shapes, spoil)


def test_a_device_batch_that_has_not_drifted_is_never_named(shapes: Shapes, tmp_path: Path) -> None:
    served(tiny_checkpoint(tmp_path / "tiny"), shapes, None)
