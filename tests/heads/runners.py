"""Runners of models that draft with heads, without an engine around them."""

from __future__ import annotations

from pathlib import Path

from rank_drive import runner_of

from vnext.runtime.protocol.settings import GpuSettings, RankSettings
from vnext.runtime.rank.loading import load_drafter
from vnext.runtime.rank.runner import ModelRunner


def head_runner(model: Path, head: Path | None = None) -> ModelRunner:
    """The runner of a model with an EAGLE-3 head, or with its own layer."""
    runner = runner_of(model)
    method, draft_path = ("mtp", "") if head is None else ("eagle3", str(head))
    settings = RankSettings(
        rank=0, world_size=1, ring="", results_address="", rendezvous="", model_path=str(model), dtype="float32",
        quantization="none", deterministic=None, device="cpu", threads=1, block_size=4, kv_cache_bytes=0, gpu=GpuSettings(),
        draft_method=method, draft_path=draft_path,
    )  # fmt: skip
    load_drafter(settings, runner)
    return runner
