"""Steps on a device: each is launched without waiting; the next may be launched before the host knows its tokens.

Owns the order of one step's work, and the choice of its variant (`buckets.py`): a graph for decodes, pieces for other steps, or
eager, which is the plain variant of both. Every request to the device goes through the interface of `device.py`. Knows states and
tensors. Its choices affect no token, except through the last bits of products whose shape is padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vnext.kernels.batch_index import batch_operations
from vnext.kernels.table import Operations
from vnext.models.layers.batch import ForwardBatch, PreparedAttention
from vnext.models.layers.layers import describe_attention
from vnext.runtime.batch.draft_batch import DraftBatch
from vnext.runtime.batch.masks import ConstrainedRow, RowMasks, failed_requests
from vnext.runtime.batch.prompt_results import PromptSums
from vnext.runtime.batch.prompt_tensors import compute, places_of
from vnext.runtime.batch.prompts import PromptInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs, reported, spoilt_requests
from vnext.runtime.gpu.adapter_regions import Regions
from vnext.runtime.gpu.buckets import Choice, Shapes, choose_variant
from vnext.runtime.gpu.cascade import Costs, common_blocks, pays
from vnext.runtime.gpu.decode_graphs import DecodeGraphs, Watch, Wrap
from vnext.runtime.gpu.device import Device, Mark
from vnext.runtime.gpu.device_batch import DeviceBatch, HostStep, Samples
from vnext.runtime.gpu.device_words import FedOnDevice, FedWatch
from vnext.runtime.gpu.model import DeviceModel
from vnext.runtime.gpu.piecewise_graphs import PiecewiseGraphs
from vnext.runtime.gpu.staging import Staging
from vnext.runtime.gpu.unread import StepSamples, Unread
from vnext.runtime.protocol.messages import PromptResult, TokenLogprobs
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.inputs import Allowed, Sampled
from vnext.sampling.logits import Keep, adjust_rows, keep_allowed, prefer_times
from vnext.sampling.sampling import Adjust, Choose, report_in_parts
from vnext.state.drafting import most_drafts
from vnext.state.state import State, StepInFlight

WRITTEN_AHEAD = 1
"""Buffers beyond those of the steps in transit."""


class DeviceVariants(msgspec.Struct, frozen=True, kw_only=True):
    """What serves on this device. `shapes`: the captured sizes. `cascade`: the costs by which attention decides whether to read a
    prefix once; None where it cannot."""

    operations: Operations
    choose: Choose
    shapes: Shapes
    adjust: Adjust = adjust_rows
    keep: Keep = keep_allowed
    cascade: Costs | None = None
    wrap: Wrap | None = None


class OnDevice(NamedTuple):
    """A step's samples there: a Sampled in which log-probabilities cover only the rows that report them, and which rows hold a NaN,
    bool [S]."""

    sampled: Sampled
    spoilt: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """The tokens, then log-probabilities where some are reported, then what is spoilt."""
        return [part for part in (*self.sampled, self.spoilt) if part is not None]


class PendingStep(NamedTuple):
    """A step that was launched. Its samples are on their way to the host: `fetched` has the tensors of an OnDevice; None where the
    step samples nothing. `asked` int64 [S]: alternatives, -1 none. `fed`: the model's inputs, where they must be hashed. `prompts`:
    turns what was fetched of prompts into results, where a request wants some. `failed`: (request, why) of samples whose constraint
    cannot be followed. `samples`: which samples are kept, None where there are none."""

    scheduled: StepInFlight
    asked_s: float
    fetched: list[torch.Tensor] | None
    mark: Mark
    asked: np.ndarray
    fed: FedOnDevice | None = None
    prompts: Callable[[], tuple[PromptResult, ...]] = tuple
    failed: tuple[tuple[int, str], ...] = ()
    samples: StepSamples | None = None

    def is_there(self) -> bool:
        """Whether `outputs` would return at once."""
        return self.mark.is_reached()

    def outputs(self) -> StepOutputs:
        """The step's outputs; waits for them."""
        self.mark.wait()
        prompts = self.prompts()
        if self.fetched is None:
            return msgspec.structs.replace(NOTHING_SAMPLED, prompts=prompts) if prompts else NOTHING_SAMPLED
        tokens, *others, spoilt = self.fetched
        assert self.samples is not None
        logprobs = logprobs_of(tokens, others, self.asked) if others else ()
        return StepOutputs(self.samples.tokens, logprobs, prompts, tuple(spoilt.numpy().nonzero()[0].tolist()))

    def failures(self, outputs: StepOutputs) -> tuple[tuple[int, str], ...]:
        """(request, why) of the requests that this step ends, by its outputs."""
        return self.failed + spoilt_requests(self.scheduled, outputs)


def logprobs_of(
    tokens: torch.Tensor, others: list[torch.Tensor], asked: np.ndarray
) -> tuple[TokenLogprobs | None, ...]:
    """One entry per sample, None where none was asked for; `others` are Sampled's other fields, for the rows that asked."""
    at = np.flatnonzero(asked >= 0)
    found: list[TokenLogprobs | None] = [None] * len(asked)
    for place, each in zip(at.tolist(), reported(Sampled(tokens[at], *others), asked[at]), strict=True):
        found[place] = each
    return tuple(found)


class DeviceSteps:
    """The steps of one rank. One thread."""

    def __init__(
        self, device: Device, model: DeviceModel, state: State, variants: DeviceVariants, vocabulary: Vocabulary | None = None,
        drafts_of: Callable[..., DraftBatch] | None = None, regions: Regions | None = None,
    ) -> None:  # fmt: skip
        """`state`: the engine's first. `vocabulary`: what constraints are matched with; none arrive without it. `drafts_of` and
        `regions`: as DeviceBatch's."""
        config = state.config
        self._device, self._model, self._variants = device, model, variants
        operations = batch_operations(device.torch_device.type)
        self._batch = DeviceBatch(config, model.config.vocab_size, device, operations, vocabulary, drafts_of, regions)
        self._masking = Masking(
            device, self._batch.masks, self._batch.unread, variants.keep, config.pipeline_depth + WRITTEN_AHEAD
        )
        self._staging = Staging(device, config.pipeline_depth + WRITTEN_AHEAD)
        self._decodes = DecodeGraphs(
            device, model, self._batch, variants.choose, variants.adjust, variants.wrap, max(variants.shapes.rows, default=0)
        )
        samples_max = config.max_num_seqs * (1 + most_drafts(config) if config.speculation else 1)
        self._pieces = PiecewiseGraphs(device, model, samples_max, variants.operations.paged_attention)
        self._sums = PromptSums(model.tail)
        self._watch = FedWatch(device, self._batch.parameters, model.adapters)
        self._common: tuple[bytes, int] = b"", 0
        self.variants_run: dict[str, int] = {"graph": 0, "pieces": 0, "eager": 0}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the graphs that most steps need: every number of rows, with short contexts."""
        for rows in reversed(self._variants.shapes.rows):
            self._decodes.prepare(rows, rows)

    @torch.inference_mode()
    def launch(self, state: State) -> PendingStep:
        """Start the newest step in flight of `state`."""
        began_s = time.perf_counter()
        step = self._batch.host_step(state)
        shared = self._shared_blocks(state, step)
        choice = self._choice(step, shared)
        self.variants_run[choice.variant] += 1
        seen: list[FedOnDevice] = []

        def watch(batch: ForwardBatch, samples: Samples) -> None:
            seen.append(self._watch.take(batch, samples, step.asked, step.wants.adjusted))

        is_due = step.step % state.config.digest_interval == 0
        sampled, prompts = self._run(step, choice, shared, watch if is_due else None)
        self._staging.release()
        masked = self._masking.take()
        fed = seen[0]._replace(allowed=masked.allowed) if is_due else None
        if sampled is None and not prompts:
            return PendingStep(state.in_flight[-1], began_s, None, self._device.mark(), step.asked, fed)
        of_samples = sampled.tensors() if sampled else []
        made = [self._batch.made] if of_samples and self._batch.made is not None and step.has_drafts else []
        fetched, mark = self._device.fetch([*of_samples, *prompts, *made])
        fetched, made = fetched[: len(of_samples) + len(prompts)], fetched[len(of_samples) + len(prompts) :]
        samples = StepSamples(step.computed, self._batch.bounds(step), fetched[0], mark, *made) if of_samples else None
        if samples is not None:
            self._batch.launched(step, samples)
            if masked.rows:
                self._masking.expect(masked.rows, samples)
        of_prompts = [tensor.numpy() for tensor in fetched[len(of_samples) :]]
        results = partial(self._sums.results, step.prompts, of_prompts) if step.prompts is not None and of_prompts else tuple
        failed = failed_requests(step.samples.ids, masked.failed)
        found = fetched[: len(of_samples)] or None
        return PendingStep(state.in_flight[-1], began_s, found, mark, step.asked, fed, results, failed, samples)

    @property
    def is_one_of_many(self) -> bool:
        """Whether other ranks compute the steps too."""
        return self._model.parallel.world_size > 1

    def give_up(self) -> None:
        """Memory lacks for the newest step: wait for what of it was started, and give the device all that is not in use."""
        self._device.mark().wait()
        self._masking.take()
        self._device.free_unused()

    def drop_steps(self) -> None:
        """The steps that were launched are over."""
        self._batch.unread.read()
        self._batch.drop_steps()

    def _choice(self, step: HostStep, shared: int) -> Choice:
        """The step's variant. No graph holds the hidden states that prompts need."""
        if step.prompts is not None:
            return Choice("eager", len(step.token_ids))
        return choose_variant(len(step.token_ids), step.is_decode, shared > 0, self._variants.shapes)

    def _run(
        self, step: HostStep, choice: Choice, shared: int, watch: Watch | None
    ) -> tuple[OnDevice | None, list[torch.Tensor]]:
        """The samples, and the tensors of `prompts.compute`."""
        if choice.variant == "graph":
            return self._decode(step, choice.size, watch), []
        return self._mixed(step, choice, shared, watch)

    def _decode(self, step: HostStep, rows: int, watch: Watch | None) -> OnDevice:
        """Everything but log-probabilities, and the sampling of masked rows, by a graph."""
        samples, tokens, spoilt, logits = self._decodes.run(step, rows, self._staging, watch)
        if step.wants.masked:
            assert logits is not None, "graphs of masked rows leave them"
            return self._sample(step, logits, samples)
        return self._reported(step, OnDevice(Sampled(tokens), spoilt), logits, samples.reported)

    def _mixed(
        self, step: HostStep, choice: Choice, shared: int, watch: Watch | None
    ) -> tuple[OnDevice | None, list[torch.Tensor]]:
        """In pieces, or eagerly."""
        batch, samples = self._batch.forward(step, self._staging)
        if watch is not None:
            watch(batch, samples)
        metadata = self._metadata(batch, shared)
        if choice.variant == "pieces":
            hidden = self._pieces.run(batch, metadata, choice.size)
        else:
            prepared = PreparedAttention(metadata, self._variants.operations.paged_attention)
            batch = batch._replace(attention=prepared)
            if step.prompts is not None:
                return self._with_prompts(step, step.prompts, batch, samples)
            hidden = self._model.hidden(batch)
        return self._sample(step, self._model.logits(hidden), samples) if len(step.samples.at) else None, []

    def _with_prompts(
        self, step: HostStep, prompts: PromptInputs, batch: ForwardBatch, samples: Samples
    ) -> tuple[OnDevice | None, list[torch.Tensor]]:
        upload, logits = self._device.upload, self._model.logits
        places = places_of(step.samples.at, prompts, upload)
        hidden = self._model.hidden(batch._replace(sample_at=places.at))
        sampled = self._sample(step, logits(hidden[places.samples]), samples) if len(step.samples.at) else None
        return sampled, compute(prompts, hidden[places.prompts], logits, upload)

    def _sample(self, step: HostStep, logits: torch.Tensor, samples: Samples) -> OnDevice:
        """Sample from `logits` float32 [S, V], which belong to this step."""
        parameters, raw = self._batch.parameters, logits
        if step.wants.reported and (step.wants.adjusted or step.wants.masked):
            logits = raw.clone()
        if step.wants.adjusted:
            self._variants.adjust(logits, parameters.tables, samples.rows, samples.positions, samples.drafts)
        if step.wants.masked:
            self._masking.apply(logits, step.samples.rows)
        spoilt = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        tokens = self._variants.choose(logits, parameters.inputs(samples.rows, samples.positions), spoilt=spoilt)
        self._batch.remember(step.wants, samples.takers, tokens)
        return self._reported(step, OnDevice(Sampled(tokens), spoilt), raw, samples.reported)

    def _reported(self, step: HostStep, found: OnDevice, logits: torch.Tensor | None, at: torch.Tensor | None) -> OnDevice:
        """Add the log-probabilities of the samples `at`, by the model's own logits [S, V]."""
        if at is None:
            return found
        assert logits is not None, "graphs of rows that report leave them"
        tokens = found.sampled.tokens
        reports = report_in_parts(logits.index_select(0, at), tokens.index_select(0, at), int(step.asked.max()))
        return OnDevice(reports._replace(tokens=tokens), found.spoilt)

    def _metadata(self, batch: ForwardBatch, shared: int) -> list[Any]:
        model, extra = self._model, (shared,) if shared else ()
        runs = model.config.form.sees_runs
        return describe_attention(model.kv, batch, self._variants.operations, model.windows, *extra, runs=runs)

    def _shared_blocks(self, state: State, step: HostStep) -> int:
        """Blocks that attention reads once for all entries; 0 where that does not pay. Computed once per batch."""
        costs = self._variants.cascade
        if costs is None or len(step.begins) < 2:
            return 0
        scheduled = state.in_flight[-1]
        owners = scheduled.entries[:2].tobytes()
        if owners != self._common[0]:
            rows = self._batch.state_rows(state, scheduled)
            self._common = owners, common_blocks(state, rows, step.begins)
        blocks = self._common[1]
        return blocks if pays(blocks * state.config.block_size, len(step.begins), step.is_decode, costs) else 0


# ---- masks on a device -------------------------------------------------------------------------------------------
# Masks on a device: made by the host while the device computes the forward, and sent before the step is sampled.
#
# Owns what links a step to the one before: a mask depends on the token before it, which the host learns while the next forward
# runs. So a step with masks is launched in two parts, and between them this thread waits for the step before, never for its own.


class Masked(NamedTuple):
    """What a step's masks were: its constrained samples, the masks on the host, (index among the samples, why) of those that
    cannot be followed."""

    rows: list[ConstrainedRow]
    allowed: Allowed | None
    failed: list[tuple[int, str]]


NOT_MASKED = Masked([], None, [])


class Masking:
    """The masks of one rank's steps. One thread."""

    def __init__(self, device: Device, masks: RowMasks, unread: Unread, keep: Keep, buffer_count: int) -> None:
        """`buffer_count`: as Staging's."""
        self._masks, self._unread, self._keep = masks, unread, keep
        self._staging = Staging(device, buffer_count)
        self._masked = NOT_MASKED

    def apply(self, logits: torch.Tensor, places: np.ndarray) -> None:
        """Mask the logits float32 [S, V] of a step's samples at batch rows `places` int64 [S], in place. Waits for the tokens of
        earlier steps, and for the masks."""
        self._unread.read()
        rows = self._masks.of(places)
        allowed = self._masks.allowed(rows)
        assert allowed is not None, "some rows are masked"
        masks = allowed.masks_of_rows()
        sent = self._staging.send({"rows": allowed.rows, "masks": masks.reshape(-1)})
        here = torch.arange(len(rows), device=logits.device)
        self._keep(logits, Allowed(sent["rows"], here, sent["masks"].view(masks.shape)))
        prefer_times(logits, allowed)
        self._staging.release()
        kept = Allowed(allowed.rows, np.arange(len(rows)), masks, firsts=allowed.firsts)
        self._masked = Masked(rows, kept, self._masks.failed(rows))

    def take(self) -> Masked:
        """The masks that were applied since the last call."""
        masked, self._masked = self._masked, NOT_MASKED
        return masked

    def expect(self, rows: list[ConstrainedRow], samples: StepSamples) -> None:
        """A step with constrained rows has been launched: they take their tokens when these are read."""
        self._unread.add(samples, partial(self._take, rows, samples))

    def _take(self, rows: list[ConstrainedRow], samples: StepSamples) -> None:
        kept = set(samples.kept.samples.tolist())
        self._masks.take([row for row in rows if row.at in kept], samples.tokens)
