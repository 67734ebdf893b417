"""Loading a rank: the model's weights, this rank's place in its group, and how many blocks its memory holds."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tqdm import tqdm

from vnext.kernels.cpu import native
from vnext.models.checkpoint import fingerprint
from vnext.models.kv_cache import kv_groups
from vnext.runtime.collectives import join_group
from vnext.runtime.determinism import describe_process
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
    parallel = join_group(settings.rank, settings.world_size, rendezvous, settings.device, settings.ipc_bytes_max)
    progress = _Bar() if settings.rank == 0 else None
    path = Path(settings.model_path)
    runner = ModelRunner(
        path, settings.dtype, settings.device, parallel, progress, settings.quantization, settings.deterministic
    )
    return Rank(settings.rank, runner), runner


def start_threads(threads: int) -> None:
    """The kernels' own team where they were built; torch then computes alone, so that two teams never fight for cores."""
    if native.is_built():
        native.start(threads)
    torch.set_num_threads(1 if native.is_built() else threads)


def ready_message(settings: RankSettings, runner: ModelRunner) -> RankReady:
    """What the engine core needs to size the cache."""
    budget = settings.kv_cache_bytes or default_cache_bytes(settings)
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
        environment=describe_process(settings.device) | describe_numbers(settings, runner),
    )


def describe_numbers(settings: RankSettings, runner: ModelRunner) -> dict[str, str]:
    """How this rank holds and multiplies its numbers: with the checkpoint's digest, what a replay must have alike."""
    kernels = native.level().name if native.is_built() and settings.device == "cpu" else "plain torch"
    dtype = str(runner.dtype).removeprefix("torch.")
    numbers = {"dtype": dtype, "quantization": settings.quantization, "kernels": kernels}
    return numbers | {"batch_invariant": str(runner.invariance)}


def default_cache_bytes(settings: RankSettings) -> int:
    """A quarter of what memory is left, 4 GiB at most, shared by the ranks of this machine."""
    if settings.device != "cpu":
        free, _ = torch.cuda.mem_get_info(settings.device)
        return int(free * 0.9)
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
