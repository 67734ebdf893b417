"""Steps on a device: each is asked for and not waited for; the next may be asked for before its tokens are known here.

Owns the order of one step's work, and the choice of its form (`buckets.py`): a graph for decodes, pieces for others, or as it
is, which is the twin of both. Everything it asks of the device goes through the face of `device.py`. Knows states and
tensors; decides nothing that a token could show, but for the last bits of products whose shape is padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vnext.kernels.batch_index import batch_operations
from vnext.kernels.table import Operations
from vnext.models.batch import ForwardBatch, PreparedAttention
from vnext.models.layers import describe_attention
from vnext.runtime.batch_fed import FedBatch, HostStep, Samples
from vnext.runtime.buckets import Choice, Shapes, choose_form
from vnext.runtime.cascade import Costs, common_blocks, pays
from vnext.runtime.device import Device, Mark
from vnext.runtime.device_model import DeviceModel
from vnext.runtime.graph_decode import DecodeGraphs
from vnext.runtime.graph_pieces import PieceGraphs
from vnext.runtime.logits import adjust_rows
from vnext.runtime.messages import TokenLogprobs
from vnext.runtime.runner import NOTHING_SAMPLED, StepOutputs, reported
from vnext.runtime.sampling import Adjust, Choose, report_in_parts
from vnext.runtime.sampling_inputs import Sampled
from vnext.runtime.staging import Staging
from vnext.state.state import State

WRITTEN_AHEAD = 1
"""Buffers beside those of the steps on their way."""


class DeviceForms(msgspec.Struct, frozen=True, kw_only=True):
    """What serves on this device. `shapes`: what is captured. `cascade`: whether attention can read a prefix once, and
    what that is weighed by. `wrap` is put around what is captured: a compiler."""

    operations: Operations
    choose: Choose
    shapes: Shapes
    adjust: Adjust = adjust_rows
    cascade: Costs | None = None
    wrap: Callable[..., Callable] | None = None


class Flying(NamedTuple):
    """A step that was asked for: its samples on their way to the host, `fetched` as Sampled of which all but the tokens are of
    the rows alone that report log-probabilities; None where it samples nothing. `asked` int64 [S]: alternatives, -1 none."""

    step: int
    asked_s: float
    fetched: list[torch.Tensor] | None
    mark: Mark
    asked: np.ndarray

    def is_there(self) -> bool:
        """Whether `outputs` will not wait."""
        return self.mark.is_reached()

    def outputs(self) -> StepOutputs:
        """What the step gave; waits for it."""
        self.mark.wait()
        if self.fetched is None:
            return NOTHING_SAMPLED
        tokens, *others = self.fetched
        return StepOutputs(tokens.numpy(), logprobs_of(tokens, others, self.asked) if others else ())


def logprobs_of(
    tokens: torch.Tensor, others: list[torch.Tensor], asked: np.ndarray
) -> tuple[TokenLogprobs | None, ...]:
    """One entry for each of S samples, None where none were asked for; `others`: what Sampled has beside tokens, of those."""
    at = np.flatnonzero(asked >= 0)
    found: list[TokenLogprobs | None] = [None] * len(asked)
    for place, each in zip(at.tolist(), reported(Sampled(tokens[at], *others), asked[at]), strict=True):
        found[place] = each
    return tuple(found)


class DeviceSteps:
    """The steps of one rank. One thread."""

    def __init__(self, device: Device, model: DeviceModel, state: State, forms: DeviceForms) -> None:
        """`state`: the engine's first."""
        config = state.config
        self._device, self._model, self._forms = device, model, forms
        operations = batch_operations(device.torch_device.type)
        self._batch = FedBatch(config, model.config.vocab_size, device, operations)
        self._staging = Staging(device, config.pipeline_depth + WRITTEN_AHEAD)
        self._decodes = DecodeGraphs(device, model, self._batch, forms.choose, forms.adjust, forms.wrap)
        self._pieces = PieceGraphs(device, model, config.running_max, forms.operations.paged_attention)
        self._common: tuple[bytes, int] = b"", 0
        self.forms_run: dict[str, int] = {"graph": 0, "pieces": 0, "eager": 0}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what most steps will need: every number of rows, with short contexts."""
        for rows in reversed(self._forms.shapes.rows):
            self._decodes.prepare(rows, rows)

    @torch.inference_mode()
    def launch(self, state: State) -> Flying:
        """Ask for the newest step in flight of `state`."""
        began_s = time.perf_counter()
        step = self._batch.host_step(state)
        shared = self._shared_blocks(state, step)
        choice = choose_form(len(step.token_ids), len(step.begins), step.is_decode, shared > 0, self._forms.shapes)
        self.forms_run[choice.form] += 1
        sampled = self._decode(step, choice.size) if choice.form == "graph" else self._mixed(step, choice, shared)
        self._staging.release()
        if sampled is None:
            return Flying(step.step, began_s, None, self._device.mark(), step.asked)
        fetched, mark = self._device.fetch([part for part in sampled if part is not None])
        return Flying(step.step, began_s, fetched, mark, step.asked)

    def _decode(self, step: HostStep, rows: int) -> Sampled:
        """By a graph, all but log-probabilities."""
        tokens, logits, reported_at = self._decodes.run(step, rows, self._staging)
        return self._reported(step, tokens, logits, reported_at)

    def _mixed(self, step: HostStep, choice: Choice, shared: int) -> Sampled | None:
        """In pieces or as it is."""
        batch, samples = self._batch.forward(step, self._staging)
        metadata = self._metadata(batch, shared)
        if choice.form == "pieces":
            hidden = self._pieces.run(batch, metadata, choice.size)
        else:
            prepared = PreparedAttention(metadata, self._forms.operations.paged_attention)
            hidden = self._model.hidden(batch._replace(attention=prepared))
        return self._sample(step, self._model.logits(hidden), samples) if len(step.sampled) else None

    def _sample(self, step: HostStep, logits: torch.Tensor, samples: Samples) -> Sampled:
        """`logits` float32 [S, V] are the step's own."""
        parameters, raw = self._batch.parameters, logits
        if step.wants.adjusted:
            logits = raw.clone() if step.wants.reported else raw
            self._forms.adjust(logits, parameters.tables, samples.rows, samples.positions)
        tokens = self._forms.choose(logits, parameters.inputs(samples.rows, samples.positions))
        self._batch.remember(step.wants, samples.rows, tokens)
        return self._reported(step, tokens, raw, samples.reported)

    def _reported(
        self, step: HostStep, tokens: torch.Tensor, logits: torch.Tensor | None, at: torch.Tensor | None
    ) -> Sampled:
        """Tokens int64 [S]; log-probabilities of the samples `at` by the model's own logits [S, V], where some report."""
        if at is None:
            return Sampled(tokens)
        found = report_in_parts(logits.index_select(0, at), tokens.index_select(0, at), int(step.asked.max()))
        return found._replace(tokens=tokens)

    def _metadata(self, batch: ForwardBatch, shared: int) -> list[Any]:
        extra = (shared,) if shared else ()
        return describe_attention(self._model.kv, batch, self._forms.operations, self._model.windows, *extra)

    def _shared_blocks(self, state: State, step: HostStep) -> int:
        """Blocks that attention reads once for all entries; 0 where it does not pay. Looked up once for each batch."""
        costs = self._forms.cascade
        if costs is None or len(step.begins) < 2:
            return 0
        flight = state.flights[-1]
        owners = flight.entries[:2].tobytes()
        if owners != self._common[0]:
            rows = self._batch.state_rows(state, flight)
            self._common = owners, common_blocks(state, rows, step.begins)
        blocks = self._common[1]
        return blocks if pays(blocks * state.config.block_size, len(step.begins), step.is_decode, costs) else 0
