"""The batch of a device that feeds itself gives the tensors of the simple twin; the host never tells it a token in flight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from device_twin import OrderError, TwinDevice
from test_batch import VOCABULARY, walk

from vnext.kernels.batch_index import BatchOperations, plain_batch_operations
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.tensors import arrays_of_step
from vnext.runtime.gpu.device_batch import DeviceBatch, HostStep, Samples
from vnext.runtime.gpu.row_parameters import RowParameters
from vnext.runtime.gpu.staging import Layout, Staging
from vnext.sampling.inputs import Banned, LogitBias, Penalties, SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.params import IN_PROMPT
from vnext.state.state import State, StepInFlight


class Fed:
    """A DeviceBatch with the face of a PersistentBatch. What was sampled goes to the device's memory and nowhere else."""

    def __init__(self, config: SchedulerConfig, operations: BatchOperations | None = None) -> None:
        device = TwinDevice()
        self._batch = DeviceBatch(config, VOCABULARY, device, operations or plain_batch_operations())
        self._staging = Staging(device, config.pipeline_depth + 1)

    def step_inputs(self, state: State) -> StepInputs:
        step = self._step = self._batch.host_step(state)
        forward, samples = self._batch.forward(step, self._staging)
        forward = forward._replace(**{name: getattr(forward, name).clone() for name in forward._fields[:7]})
        self._rows = samples.rows.clone()
        sampling = inputs_on(self._batch.parameters, samples, step) if len(step.samples.at) else None
        self._staging.release()
        return arrays_of_step(StepInputs(forward, sampling, step.asked))

    def take_sampled(self, scheduled: StepInFlight, tokens: np.ndarray) -> None:
        self._batch.remember(self._step.wants, self._rows, torch.from_numpy(tokens))


def inputs_on(parameters: RowParameters, samples: Samples, step: HostStep) -> SamplingInputs:
    """What a device's tables say of a step's samples, as the plain batch says it."""
    rows, positions = samples.rows, samples.positions.clone()
    inputs, tables = parameters.inputs(rows, positions), parameters.tables
    rates, (until, bias_count), history = tables.rates[:, rows], tables.marks[:, rows], tables.history[rows]
    penalised = torch.tensor([each != [1.0, 0.0, 0.0] for each in rates.T.tolist()]).nonzero()[:, 0]
    penalties = Penalties(
        penalised, *rates[:, penalised], tuple(history[penalised] >= IN_PROMPT), tuple(history[penalised] % IN_PROMPT)
    )
    biased = [(at, entry) for at, count in enumerate(bias_count.tolist()) for entry in range(count)]
    at, entries = torch.tensor(biased, dtype=torch.int64).view(-1, 2).T
    bias = LogitBias(at, tables.bias_tokens[rows[at], entries], tables.bias_values[rows[at], entries])
    early = (positions < until).nonzero()[:, 0].tolist()
    stops = [(at, token) for at in early for token in dict.fromkeys(tables.stop_tokens[rows[at]].tolist())]
    banned = Banned(*torch.tensor(stops, dtype=torch.int64).view(-1, 2).T)
    assert step.wants.adjusted == bool(len(penalised) or biased or stops)
    reported = [] if samples.reported is None else samples.reported.tolist()
    assert reported == np.flatnonzero(step.asked >= 0).tolist()
    random = inputs.temperature > 0
    return inputs._replace(
        penalties=penalties if len(penalised) else None, bias=bias if biased else None, banned=banned if stops else None,
        logprobs=int(step.asked.max()), any_random=bool(random.any()),
        any_filter=bool((random & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))).any()),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_a_fed_batch_equals_the_rebuilt_batch(seed: int) -> None:
    walk(seed, 100, Fed)


IN_THE_SIMULATOR = """
import sys
from functools import partial
sys.path[:0] = sys.argv[1:]
from test_batch_fed import Fed, walk
from vnext.kernels import batch_numba
walk(4, 60, partial(Fed, operations=batch_numba))
"""


def test_a_fed_batch_by_numba_equals_the_rebuilt_batch() -> None:
    """Numba's kernels over CPU tensors, in its simulator: a process of its own."""
    pytest.importorskip("numba", reason="Numba is not installed: pip install 'vnext[dev]'")
    folder = Path(__file__).parent
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(folder.parents[2])}
    command = [sys.executable, "-c", IN_THE_SIMULATOR, str(folder), str(folder.parents[1])]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr


def test_what_was_sent_is_read_after_the_work_has_joined_it() -> None:
    """Late copies spoil what comes before them: the host's half written too early, the device's half read too early."""
    device = TwinDevice()
    target, source = torch.zeros(8, dtype=torch.uint8), device.host_buffer(8).fill_(1)
    mark = device.copy_in(target, source, device.mark())
    assert not (target == 1).any(), "a copy that nobody joined has not arrived"
    source.fill_(2)
    device.join(mark)
    assert (target == 2).all(), "a half that is written before its copy is done sends what was written"
    with pytest.raises(OrderError, match="new memory"):
        device.copy_in(torch.zeros(8, dtype=torch.uint8), source, None)
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
