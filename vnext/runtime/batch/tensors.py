"""A step's arrays as torch's tensors, and back, in the same memory.

A batch is made of arrays on the host. What torch computes takes tensors, and a device's inputs are compared as arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vnext.kernels.arrays import as_array, as_tensor
from vnext.models.layers.batch import ForwardBatch, RecurrentBatch
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.sampling.inputs import SamplingInputs


def tensors_of_step(inputs: StepInputs) -> StepInputs:
    """The step with a tensor in the place of each array that a forward or sampling takes."""
    sampling = inputs.sampling and tensors_of_sampling(inputs.sampling)
    return inputs._replace(forward=tensors_of_batch(inputs.forward), sampling=sampling)


def tensors_of_batch(batch: ForwardBatch) -> ForwardBatch:
    """The batch as tensors. Its host copies and the tokens of adapters stay arrays."""
    return _batch(batch, as_tensor)


def tensors_of_sampling(inputs: SamplingInputs) -> SamplingInputs:
    return _sampling(inputs, _joined)


def arrays_of_step(inputs: StepInputs) -> StepInputs:
    """The step with arrays in the place of tensors on the CPU."""
    return inputs._replace(
        forward=_batch(inputs.forward, _as_array), sampling=inputs.sampling and _sampling(inputs.sampling, _as_array)
    )


def _batch(batch: ForwardBatch, change: Callable[[Any], Any]) -> ForwardBatch:
    groups, states = tuple(_fields(group, change) for group in batch.groups), batch.recurrent
    if states is not None:
        pools = tuple(tuple(map(change, parts)) for parts in states.pools)
        states = RecurrentBatch(pools, *(each if each is None else change(each) for each in states[1:]))
    changed: ForwardBatch = _fields(batch, change)
    return changed._replace(groups=groups, recurrent=states)


def _sampling(inputs: SamplingInputs, change: Callable[[Any], Any]) -> SamplingInputs:
    nested = {name: getattr(inputs, name) for name in ("penalties", "bias", "banned", "allowed")}
    changed: SamplingInputs = _fields(inputs, change)
    return changed._replace(**{name: _fields(part, change) for name, part in nested.items() if part is not None})


def _fields(part: Any, change: Callable[[Any], Any]) -> Any:
    return type(part)(*map(change, part))


def _joined(field: Any) -> Any:
    """A tensor of an array, or of the rows of a table."""
    return as_tensor(np.stack(field) if type(field) is tuple else field)


def _as_array(field: Any) -> Any:
    if type(field) is tuple:
        return tuple(map(_as_array, field))
    return as_array(field) if hasattr(field, "data_ptr") else field
