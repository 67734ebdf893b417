"""What would make a step wait for its device is found: planted, one at a time, into steps on the device's twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from device_twin import WaitingError
from device_watch import watch_steps
from graph_cases import answers
from rank_drive import tiny_checkpoint

from vnext.kernels.table import Operations
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.device_batch import DeviceBatch
from vnext.runtime.gpu.row_parameters import RowParameters
from vnext.runtime.gpu.staging import Staging


def read_a_token(batch: DeviceBatch, wants: object, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    batch.null_row += 0 * int(tokens[0])


def send_a_list(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    torch.tensor([1.0], device=places.device)


def copy_an_array(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    parameters.tables.marks[0, :1].copy_(torch.from_numpy(np.zeros(1, dtype=np.int64)))


def mix_with_an_array(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    positions.add_(torch.zeros(positions.shape, dtype=torch.int64))


def index_by_a_mask(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    places[places >= 0] = places


def choose_by_value(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    if (places < 0).any():
        raise ValueError


def repeat_by_value(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    torch.repeat_interleave(places, places)


def list_values(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    places.tolist()


def set_an_element(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    positions.clone()[0] = 5


def fill_by_value(parameters: RowParameters, places: torch.Tensor, positions: torch.Tensor) -> None:
    positions.masked_fill(places < 0, positions.sum())


def wait_for_the_work(staging: Staging, arrays: object) -> None:
    staging._device.mark().wait()


OF_INPUTS = (
    send_a_list, copy_an_array, mix_with_an_array, index_by_a_mask, choose_by_value, repeat_by_value, list_values, set_an_element,
    fill_by_value,
)  # fmt: skip
FAULTS = [
    (DeviceBatch, "remember", read_a_token), (Staging, "send", wait_for_the_work),
    *((RowParameters, "inputs", deed) for deed in OF_INPUTS),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "deed"), FAULTS, ids=[fault[2].__name__ for fault in FAULTS])
def test_a_step_that_waits_is_found(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, deed: Callable[..., None]
) -> None:
    """Planted, one at a time, into the first step of a request."""
    folder, right = tiny_checkpoint(tmp_path / "tiny"), getattr(owner, name)

    def wrong(self: object, *arguments: object) -> object:
        deed(self, *arguments)
        return right(self, *arguments)

    monkeypatch.setattr(owner, name, wrong)
    watch_steps(monkeypatch)
    with pytest.raises(WaitingError):
        answers(kernels, folder, Shapes((), ()), 1)
