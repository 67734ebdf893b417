"""Loading a rank: the model's weights, this rank's place in its group, and how many blocks its memory holds.

What a GPU needs is imported for one only: a rank on the CPU starts sooner.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tqdm import tqdm

from vnext.kernels.cpu import native
from vnext.kernels.cuda import backends
from vnext.kernels.cuda.operations import SUMMARY as CUDA_KERNELS
from vnext.models.checkpoint import fingerprint
from vnext.models.config import load_config
from vnext.models.kv_cache import kv_groups
from vnext.models.sharding import Parallel
from vnext.runtime.cores import TEAM_SPIN_US
from vnext.runtime.determinism import describe_process
from vnext.runtime.group import join_group
from vnext.runtime.messages import ModelFacts, RankReady
from vnext.runtime.rank import Rank
from vnext.runtime.runner import ModelRunner
from vnext.runtime.settings import RankSettings

CACHE_SHARE = 0.25  # of the memory that is available once the weights are there
CACHE_BYTES_MAX = 4 * 2**30
PROGRESS_FROM_BYTES = 64 * 2**20  # smaller checkpoints load in a blink: no bar


def load_rank(settings: RankSettings, rendezvous: Path) -> tuple[Rank, ModelRunner]:
    """This rank with its weights. Raises ModelError, SettingsError."""
    start_threads(settings.threads)
    if settings.device == "cpu":
        return _load_cpu_rank(settings, rendezvous)
    from vnext.runtime.device_loading import device_rank, enough_memory, open_device, resolved_device

    if resolved_device(settings.device) == "cpu":
        return _load_cpu_rank(settings, rendezvous)
    device = open_device(settings.rank)
    parallel = join_group(
        settings.rank, settings.world_size, rendezvous, device.torch_device, settings.ipc_bytes_max
    )
    with enough_memory("the model's weights do"):
        runner = load_runner(settings, device.torch_device, parallel)
    runner.face = device
    return device_rank(settings, runner, device), runner


def _load_cpu_rank(settings: RankSettings, rendezvous: Path) -> tuple[Rank, ModelRunner]:
    parallel = join_group(settings.rank, settings.world_size, rendezvous, "cpu", settings.ipc_bytes_max)
    runner = load_runner(settings, "cpu", parallel)
    return Rank(settings.rank, runner), runner


def load_runner(settings: RankSettings, device: torch.device | str, parallel: Parallel) -> ModelRunner:
    """The weights, with a bar for the first rank."""
    progress, path = _Bar() if settings.rank == 0 else None, Path(settings.model_path)
    config = load_config(path, settings.generation_config == "auto", settings.max_model_len)
    return ModelRunner(
        path, settings.dtype, device, parallel, progress, settings.quantization, settings.deterministic, config
    )


def start_threads(threads: int) -> None:
    """The kernels' own team where they were built; torch then computes alone, so that two teams never fight for cores."""
    if native.is_built():
        native.start(threads, TEAM_SPIN_US)
    torch.set_num_threads(1 if native.is_built() else threads)


def ready_message(settings: RankSettings, runner: ModelRunner) -> RankReady:
    """What the engine core needs to size the cache."""
    budget = settings.kv_cache_bytes or default_cache_bytes(settings, runner)
    return RankReady(
        model=ModelFacts(
            vocab_size=runner.config.vocab_size,
            position_count_max=runner.config.position_count_max,
            eos_token_ids=runner.config.eos_token_ids,
            windows=kv_groups(runner.config).windows,
        ),
        rank=settings.rank,
        block_count_max=budget // runner.block_bytes(settings.block_size),
        block_bytes=runner.block_bytes(settings.block_size),
        model_digest=fingerprint(settings.model_path),
        environment=describe_process(str(runner.device)) | describe_numbers(settings, runner),
    )


def describe_numbers(settings: RankSettings, runner: ModelRunner) -> dict[str, str]:
    """How this rank holds and multiplies its numbers: with the checkpoint's digest, what a replay must have alike."""
    kernels = kernels_of(runner.device.type)
    dtype = str(runner.dtype).removeprefix("torch.")
    numbers = {"dtype": dtype, "quantization": settings.quantization, "kernels": kernels}
    return numbers | {"batch_invariant": str(runner.invariance)}


def kernels_of(device_type: str) -> str:
    """Whose kernels compute on a kind of device."""
    if device_type == "cpu":
        return native.level().name if native.is_built() else "plain torch"
    return CUDA_KERNELS if backends.is_usable() else "plain torch"


def default_cache_bytes(settings: RankSettings, runner: ModelRunner) -> int:
    """On the CPU a quarter of what memory is left, 4 GiB at most, shared by the ranks of this machine; on a GPU what its share
    leaves beside the largest step."""
    if runner.face is not None:
        from vnext.runtime.device_loading import fitting_cache_bytes

        return fitting_cache_bytes(settings, runner, runner.face)
    return int(min(CACHE_BYTES_MAX, available_memory_bytes() * CACHE_SHARE)) // settings.world_size


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, as Linux estimates it; 4 GiB where that is unknown."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * 2**30


class _Bar:
    """Progress of loading on stderr, for checkpoints that take a while."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if total_bytes < PROGRESS_FROM_BYTES:
            return
        if self._bar is None:
            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="loading weights", file=sys.stderr)
        self._bar.update(done_bytes - self._bar.n)
        if done_bytes >= total_bytes:
            self._bar.close()
