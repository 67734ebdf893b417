"""Steps of a rank on a GPU, in this process: under torch's errors for what waits, the tokens of the plain rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_drive import (
    bound_arrivals,
    device_rank,
    drive,
    host_rank,
    picky_arrivals,
    repetitive_arrivals,
    runner_of,
    started_with,
    tiny_checkpoint,
)

from vnext.runtime.gpu.steps import DeviceSteps, PendingStep
from vnext.runtime.protocol.settings import GpuSettings
from vnext.runtime.rank.gpu_loading import device_variants, open_device
from vnext.state.config import Speculation
from vnext.state.events import RequestArrived
from vnext.state.state import State

NGRAM = Speculation(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
ALIKE_MIN = 12
"""Of 14 streams: products of another machine differ in their last bits, and now and then two logits are almost equal."""


@pytest.mark.parametrize(
    ("arrive", "speculation"), [(picky_arrivals, None), (bound_arrivals, None), (repetitive_arrivals, NGRAM)],
    ids=["asking for much", "masked", "drafted"],
)  # fmt: skip
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs and pieces", "as they are"])
def test_steps_of_rows_that_ask_for_much_wait_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool, arrive: Callable[[int, int], list[RequestArrived]],
    speculation: Speculation | None,
) -> None:  # fmt: skip
    """torch's errors know no waits for events and no copies from memory that is not pinned; tests/device_watch.py does. Masked
    steps and those with drafts wait for the step before."""
    launch = DeviceSteps.launch

    def strict(steps: DeviceSteps, state: State) -> PendingStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(steps, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(DeviceSteps, "launch", strict)
    folder, arrivals, device = tiny_checkpoint(tmp_path / "tiny"), arrive(14, 3), open_device(0)
    plain = runner_of(folder)
    bounds = {"pipeline_depth": 3, "page_count": 30}
    expected = drive(host_rank(plain), started_with(plain, **bounds), arrivals)
    runner = runner_of(folder, device=str(device.torch_device))
    gpu = GpuSettings(tokens_max=24, rows_max=8, enforce_eager=enforce_eager)
    rank = device_rank(runner, device, device_variants(runner, gpu))
    found = drive(rank, started_with(plain, speculation=speculation, **bounds), arrivals)
    assert (rank.steps.made.variants_run["graph"] == 0) == enforce_eager
    alike = [id_ for id_ in expected if [token for token, _ in found[id_]] == [token for token, _ in expected[id_]]]
    assert len(alike) >= ALIKE_MIN
    for id_ in alike:
        for (_, ours), (_, theirs) in zip(found[id_], expected[id_], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or abs(ours.logprob - theirs.logprob) < 1e-3
