"""A tiny model's requests through a rank on the device's twin, by given operations and the sampling kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from device_twin import TwinDevice
from heads.runners import head_runner
from rank_drive import device_rank, drive, some_arrivals, started_with

from vnext.kernels.table import Operations
from vnext.models.layers.sharding import Parallel, alone
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.sampling import adjust_by_kernel, choose_by_kernel, keep_allowed_by_kernel
from vnext.state.events import RequestArrived


def answers(
    kernels: Operations, folder: Path, shapes: Shapes, count: int = 6, dtype: str = "float32", parallel: Parallel = alone(),
    arrive: Callable[[int, int], list[RequestArrived]] = some_arrivals, drafts_itself: bool = False,
    kv_cache_dtype: str = "auto", head: Path | None = None, **bounds: object,
) -> tuple[dict, dict]:  # fmt: skip
    """Tokens of each request, and how often each form was run. `bounds` of the engine. `drafts_itself`: the model is its own
    draft model. `head`: the folder of a head that drafts, or of the model itself, whose own layer drafts."""
    variants = DeviceVariants(operations=kernels, choose=choose_by_kernel, adjust=adjust_by_kernel, keep=keep_allowed_by_kernel, shapes=shapes)
    runner = ModelRunner(folder, ModelSettings(dtype=dtype, kv_cache_dtype=kv_cache_dtype), "cpu", parallel)
    runner.draft = ModelRunner(folder, ModelSettings(dtype=dtype), "cpu", parallel) if drafts_itself else None
    if head is not None:
        runner = head_runner(folder, None if head == folder else head)
    rank = device_rank(runner, TwinDevice(), variants)
    found = drive(rank, started_with(runner, **bounds), arrive(count, 8))
    return {id_: [token for token, _ in each] for id_, each in found.items()}, rank.steps.made.variants_run
