"""A rank is loaded for a device: who serves, what is captured and why not, how much cache fits. On the device's twin."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from device_twin import Roomy, TwinDevice, compute_on_twins
from heads.saved import random_head, save_mimo, save_target
from msgspec.structs import replace
from rank_drive import drive, host_rank, repetitive_arrivals, runner_of, some_arrivals, started_with

from vnext.kernels.arrays import is_int8
from vnext.kernels.calls import Router
from vnext.kernels.mxint8 import packed_width
from vnext.kernels.thin_tiles import header_bytes
from vnext.models.config.model_config import Experts
from vnext.models.layers.sharding import alone
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.steps import DeviceSteps, PendingStep
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.settings import GpuSettings, RankSettings, SettingsError
from vnext.runtime.rank import gpu_loading, loading
from vnext.runtime.rank.gpu_loading import GRAPH_BYTES, LaterSteps, trial_batch, try_largest_step
from vnext.sampling.sampling import sampler_for
from vnext.state.config import Speculation
from vnext.state.state import State

GPU = GpuSettings(tokens_max=50, rows_max=8)


def settings_of(**changes: object) -> RankSettings:
    fields = dict(
        rank=0, world_size=1, ring="", results_address="", rendezvous="", model_path=str(DEMO_MODEL), dtype="float32",
        quantization="none", deterministic=None, device="cuda", threads=1, block_size=4, kv_cache_bytes=0, gpu=GPU,
    )  # fmt: skip
    return RankSettings(**(fields | changes))


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which ranks are loaded. The CPU's kernels stand in for the GPU's row of the table."""
    compute_on_twins(monkeypatch)


def test_a_rank_that_drafts_is_loaded_sized_and_answers_as_the_plain_one(roomy: None) -> None:
    """Its trial step samples behind every draft, and what drafts cost is measured by steps of the device."""
    settings = settings_of(gpu=replace(GPU, drafts_max=3), draft_method="ngram", measures_draft_costs=True)
    rank, runner = loading.load_rank(settings, Path())
    ready = loading.ready_message(settings, runner)
    page = runner.block_bytes(4)
    trial_pages = 32 * 1 + 1
    left = int(2**32 * 0.9) - 2**30 - (2**28 - trial_pages * page) - GRAPH_BYTES - (9 + 32) * runner.config.vocab_size * 4
    assert ready.page_count_max == left // page and all(0 <= cost <= 1000 for cost in ready.draft_costs)
    speculation = Speculation(num_speculative_tokens=3, prompt_lookup_min=1)
    started, arrivals = started_with(runner, speculation=speculation), repetitive_arrivals(6, seed=2)
    assert drive(rank, started, arrivals) == drive(host_rank(runner_of()), started_with(runner), arrivals)


def test_drafting_costs_are_those_of_steps_with_drafts(roomy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are slower the more rows they have, and slower still when they draft."""
    launch = DeviceSteps.launch

    def slow(self: DeviceSteps, state: State) -> PendingStep:
        pending = launch(self, state)
        drafts = state.in_flight[-1].drafts
        clock[0] += 1.0 + 0.05 * len(state.rows) + (0.3 if drafts is not None and drafts.any() else 0.0)
        return pending

    clock = [0.0]
    monkeypatch.setattr(DeviceSteps, "launch", slow)
    monkeypatch.setattr("vnext.runtime.rank.draft_costs.time.perf_counter", lambda: clock[0])
    settings = settings_of(draft_method="ngram", measures_draft_costs=True)
    _, runner = loading.load_rank(settings, Path())
    assert loading.ready_message(settings, runner).draft_costs == (round(50 / 1.05), round((300 - 50) / 1.05), round(9 / 8 * 50 / 1.05))


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_a_rank_that_drafts_with_a_model_is_loaded_and_sized(roomy: None, tmp_path: Path, method: str) -> None:
    """Its trial step writes states, pages have room for the head's part, and a draft's cost is measured on the device."""
    model = save_mimo(tmp_path / "model") if method == "mtp" else save_target(tmp_path / "model")
    paths = {"eagle3": partial(random_head, tmp_path / "head"), "draft_model": lambda: model, "mtp": lambda: ""}
    settings = settings_of(
        model_path=str(model), draft_method=method, draft_path=str(paths[method]()), measures_draft_costs=True,
        gpu=replace(GPU, drafts_max=3), max_model_len=96,
    )  # fmt: skip
    rank, runner = loading.load_rank(settings, Path())
    ready = loading.ready_message(settings, runner)
    own, page, trial = runner.own_block_bytes(4), runner.block_bytes(4), 32 * 1 + 1
    assert page > own and (runner.head is None) == (method == "draft_model")
    peak = 2**28 - trial * (page if runner.head else own)
    left = int(2**32 * 0.9) - 2**30 - peak - GRAPH_BYTES - (9 + 32) * runner.config.vocab_size * 4
    assert ready.page_count_max == left // page and 0 < ready.draft_costs[0] <= 1000
    speculation = Speculation(method=method, num_speculative_tokens=3)
    arrivals = repetitive_arrivals(6, seed=2)
    expected = drive(host_rank(runner_of(model)), started_with(runner), arrivals)
    assert drive(rank, started_with(runner, speculation=speculation), arrivals) == expected


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_a_rank_of_a_device_is_loaded_sized_and_answers_as_the_plain_one(roomy: None, kind: str) -> None:
    """Pages of int8 are smaller: more of them fit, and the trial's too."""
    settings = settings_of(kv_cache_dtype=kind)
    rank, runner = loading.load_rank(settings, Path())
    ready = loading.ready_message(settings, runner)
    page = runner.block_bytes(4)
    trial_pages = 8 * 2 + 1
    left = int(2**32 * 0.9) - 2**30 - (2**28 - trial_pages * page) - GRAPH_BYTES - (9 + 8) * runner.config.vocab_size * 4
    assert isinstance(rank.steps, LaterSteps) and ready.page_count_max == left // page
    config = runner.config
    row_bytes = packed_width(config.head_dim) if kind == "int8" else 4 * config.head_dim
    assert page == 2 * config.layer_count * config.kv_head_count * 4 * row_bytes
    started, arrivals = started_with(runner), some_arrivals(6, seed=2)
    assert drive(rank, started, arrivals) == drive(host_rank(runner_of(kv_cache_dtype=kind)), started, arrivals)
    assert is_int8(rank.steps.made._model.kv[0][0].dtype) == (kind == "int8")


def test_a_rank_of_a_device_with_adapters_reserves_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots and one region more, before the cache is sized; a GPU that is too small for them is one sentence."""
    device = Roomy()
    compute_on_twins(monkeypatch)
    monkeypatch.setattr(gpu_loading, "open_device", lambda rank: device)
    settings = settings_of(max_lora_rank=20, gpu=replace(GPU, adapters_max=3))
    rank, runner = loading.load_rank(settings, Path())
    ready = loading.ready_message(settings, runner)
    sizes = ready.linear_layers.values()
    bytes_ = sum(4 * (inputs * 32 + -(-outputs // 16) * 16 * 20) for inputs, outputs in sizes)
    assert rank.steps.adapters is runner.adapters and ready.page_count_max > 0
    assert runner.regions.memory.shape == (4, bytes_ + header_bytes(len(sizes)))

    def fail(*arguments: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "host_buffer", fail)
    with pytest.raises(SettingsError, match="^the adapters do not fit into the GPU's memory: lower --max-loras or --max-lora-rank$"):
        loading.load_rank(settings, Path())


def test_a_disk_tier_is_left_its_memory_and_knows_all_of_a_page(roomy: None, tmp_path: Path) -> None:
    counts = []
    for folder in ("", str(tmp_path)):
        rank, runner = loading.load_rank(settings_of(kv_disk_dir=folder), Path())
        counts.append(loading.ready_message(settings_of(kv_disk_dir=folder), runner, rank).page_count_max)
        rank.close()
    assert counts[0] - counts[1] == gpu_loading.COPIED_PAGES
    model = save_mimo(tmp_path / "model")
    drafts = {"model_path": str(model), "draft_method": "mtp", "max_model_len": 96}
    with pytest.raises(SettingsError, match="^--kv-disk-dir keeps no state of a draft head"):
        loading.load_rank(settings_of(kv_disk_dir=str(tmp_path), **drafts), Path())


def test_weights_of_8_bits_are_for_a_cpu_and_floats_of_8_bits_stand_beside_16(roomy: None) -> None:
    with pytest.raises(SettingsError, match="^--quantization int8 works on a CPU so far: leave it out, or add --device cpu$"):
        loading.load_rank(settings_of(quantization="int8", dtype="bfloat16"), Path())
    with pytest.raises(SettingsError, match="^--kv-cache-dtype is fp8, .* and the dtype is float32: add --dtype bfloat16$"):
        loading.load_rank(settings_of(kv_cache_dtype="fp8"), Path())


def test_a_sampler_from_outside_is_for_a_cpu(roomy: None) -> None:
    with pytest.raises(SettingsError, match="^--sampler works on a CPU so far: leave it out, or add --device cpu$"):
        loading.load_rank(settings_of(sampler="own"), Path())


def test_packed_weights_are_for_a_cpu(roomy: None, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="^--packed-weights-dir works on a CPU so far: leave it out, or add --device cpu$"):
        loading.load_rank(settings_of(packed_weights_dir=str(tmp_path)), Path())


def test_the_largest_step_fits_its_own_pages() -> None:
    batch, pages = trial_batch(50, 8, 4, 2, torch.device("cpu"))
    assert pages == 8 * 2 * 2 and batch.query_starts.tolist() == [0, 7, 14, 20, 26, 32, 38, 44, 50]
    slots = torch.cat((batch.slots, batch.groups[0].slots))
    assert len(slots.unique()) == 100 and int(slots.max()) < pages * 4
    assert batch.context_lengths.sum() == 50 and batch.positions[7:14].tolist() == list(range(7))
    runner = runner_of()
    _, trial_bytes = try_largest_step(runner, TwinDevice(), sampler_for("cpu"), 5, 8, 4)
    assert trial_bytes == (5 + 1) * runner.block_bytes(4), "no more rows than tokens"


@pytest.mark.parametrize(
    ("gpu", "why_not", "shapes"),
    [
        (GPU, "", Shapes((1, 2, 4, 8), (16, 24, 32, 48, 50))),
        (GpuSettings(rows_max=8, graph_sizes=(8, 3), tokens_max=16), "", Shapes((3, 8), (16,))),
        (GpuSettings(rows_max=4, drafts_max=3, tokens_max=16), "", Shapes((1, 2, 4, 8, 16), (16,))),
        (GpuSettings(rows_max=4, drafts_max=3, tokens_max=9, graph_sizes=(2, 99)), "", Shapes((2, 9), (9,))),
        (GpuSettings(enforce_eager=True), "", Shapes((), ())),
        (GPU, "a reason", Shapes((), ())),
    ],
)
def test_what_is_captured(gpu: GpuSettings, why_not: str, shapes: Shapes) -> None:
    assert gpu_loading.captured_shapes(gpu, why_not) == shapes


def test_why_a_model_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = runner_of().config
    if torch.version.cuda is None:
        assert "without CuPy" in gpu_loading.why_eager(config, alone(), torch.float32)
    monkeypatch.setattr("vnext.kernels.cuda.backends.is_usable", lambda: True)
    assert gpu_loading.why_eager(config, alone(), torch.bfloat16) == ""
    two = replace(alone(), world_size=2)
    assert "ranks' sums" in gpu_loading.why_eager(config, two, torch.bfloat16)
    assert gpu_loading.why_eager(config, replace(two, can_capture=True), torch.bfloat16) == ""
    sparse = replace(config, experts=Experts(count=4, intermediate_size=32, router=Router(2, True)))
    assert gpu_loading.why_eager(sparse, alone(), torch.bfloat16) == ""
    for dtype, is_fixed in ((torch.float32, False), (torch.bfloat16, True)):
        assert "experts' products" in gpu_loading.why_eager(sparse, alone(), dtype, is_fixed)
    assert "heads of 32" in gpu_loading.why_eager(config, alone(), torch.float64)


def test_an_exhausted_gpu_is_one_sentence() -> None:
    with pytest.raises(SettingsError, match="^the weights do not fit into the GPU's memory: use"):
        with gpu_loading.enough_memory("the weights do"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB. And much more.")


def test_a_host_step_is_kept_from_the_next() -> None:
    """Its outputs are overwritten then: of an engine in one process, two steps come before their results are collected."""
    runner = runner_of()
    rank, started, arrivals = host_rank(runner), started_with(runner), some_arrivals(6, seed=2)
    run, shared = runner.run, np.zeros(8, dtype=np.int64)

    def overwriting(inputs: StepInputs) -> StepOutputs:
        found = run(inputs)
        shared[: len(found.tokens)] = found.tokens
        return StepOutputs(shared[: len(found.tokens)], found.logprobs)

    runner.run, taken = overwriting, rank.collect
    turns = iter(range(10**6))
    rank.collect = lambda: taken() if next(turns) % 2 else []
    assert drive(rank, started, arrivals) == drive(host_rank(runner_of()), started, arrivals)
