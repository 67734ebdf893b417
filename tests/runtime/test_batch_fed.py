"""The batch of a device that feeds itself gives the tensors of the simple twin; the host never tells it a token in flight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_twin import TwinDevice
from test_batch import VOCABULARY, walk

from vnext.kernels.batch_index import plain_batch_operations
from vnext.runtime.step_inputs import StepInputs
from vnext.runtime.batch_fed import FedBatch
from vnext.runtime.staging import Layout, Staging
from vnext.state.config import SchedulerConfig
from vnext.state.state import Flight, State


class Fed:
    """A FedBatch with the face of a PersistentBatch. What was sampled goes to the device's memory and nowhere else."""

    def __init__(self, config: SchedulerConfig) -> None:
        device = TwinDevice()
        self._batch = FedBatch(config, VOCABULARY, device, plain_batch_operations())
        self._staging = Staging(device, config.pipeline_depth + 1)

    def step_inputs(self, state: State) -> StepInputs:
        step = self._step = self._batch.host_step(state)
        forward, self._rows = self._batch.forward(step, self._staging)
        forward = forward._replace(**{name: getattr(forward, name).clone() for name in forward._fields[:7]})
        self._rows = self._rows.clone()
        self._staging.release()
        ends = step.contexts.astype(np.int64)[step.sampled]
        return StepInputs(forward, *self._batch.columns.inputs(step.places[step.sampled], ends))

    def take_sampled(self, flight: Flight, tokens: np.ndarray) -> None:
        self._batch.remember(self._step, self._rows, torch.from_numpy(tokens))


@pytest.mark.parametrize("seed", range(12))
def test_a_fed_batch_equals_the_rebuilt_batch(seed: int) -> None:
    walk(seed, 100, None, Fed)


def test_what_was_sent_is_read_after_the_work_has_joined_it() -> None:
    """Late copies spoil what comes before them: the host's half written too early, the device's half read too early."""
    device = TwinDevice()
    target, source = torch.zeros(8, dtype=torch.uint8), device.host_buffer(8).fill_(1)
    mark = device.copy_in(target, source, None)
    assert not (target == 1).any(), "a copy that nobody joined has not arrived"
    source.fill_(2)
    device.join(mark)
    assert (target == 2).all(), "a half that is written before its copy is done sends what was written"
    staging = Staging(device, 2)
    for value in range(5):
        sent = staging.send({"numbers": np.full(3, value), "others": np.full(5, value, dtype=np.float32)})
        assert sent["numbers"].tolist() == [value] * 3 and sent["others"].tolist() == [value] * 5
        staging.release()
    wide = staging.send({"numbers": np.arange(10**5)})
    assert torch.equal(wide["numbers"], torch.arange(10**5)), "a buffer grows with what is sent"


def test_a_layout_keeps_its_fields_apart() -> None:
    layout = Layout([("a", np.dtype(np.int32), 3), ("b", np.dtype(np.int64), 2), ("c", np.dtype(np.float32), 0)])
    block = np.zeros(layout.size_bytes, dtype=np.uint8)
    fields = layout.arrays(block)
    fields["a"][:], fields["b"][:] = 7, 2**40
    tensors = layout.tensors(torch.from_numpy(block))
    assert tensors["a"].tolist() == [7, 7, 7] and tensors["b"].tolist() == [2**40] * 2 and tensors["c"].shape == (0,)
