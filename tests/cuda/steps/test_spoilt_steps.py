"""A model that computes what is no number, on a device: every form of its steps says which requests that ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_twin import TwinDevice
from device_watch import watch_steps
from host_shim import HostBackend
from msgspec.structs import replace
from rank_drive import bound_arrivals, device_rank, drive, picky_arrivals, some_arrivals, started_with, tiny_checkpoint
from safetensors.torch import load_file, save_file

from vnext.kernels.table import Operations
from vnext.models.layers.sharding import alone
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.protocol.reasons import NOT_A_NUMBER
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.sampling import adjust_by_kernel, choose_by_kernel, keep_allowed_by_kernel
from vnext.state.events import RequestArrived

EAGER, GRAPHS, PIECES = Shapes((), ()), Shapes((2, 8), (24,)), Shapes((), (8, 24))
COUNT = 4
FORMS = {"eager": EAGER, "graph": GRAPHS, "pieces": PIECES}


def spoil(folder: Path, name: str, row: int) -> Path:
    """A number of the checkpoint's is none."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[row * (tensors[name].shape[-1] if tensors[name].dim() > 1 else 1)] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def ended(kernels: Operations, folder: Path, shapes: Shapes, arrivals: list[RequestArrived]) -> tuple[set[int], dict[str, int]]:
    """The requests that the steps of a rank end, and how often each form was run."""
    variants = DeviceVariants(
        operations=kernels, choose=choose_by_kernel, adjust=adjust_by_kernel, keep=keep_allowed_by_kernel, shapes=shapes
    )
    runner, found = ModelRunner(folder, ModelSettings(dtype="float32"), "cpu", alone()), set()
    rank = device_rank(runner, TwinDevice(), variants)
    collect = rank.collect

    def watched() -> list:
        results = list(collect())
        for result in results:
            assert all(why == NOT_A_NUMBER for _, why in result.failed)
            found.update(id_ for id_, _ in result.failed)
        return results

    rank.collect = watched
    drive(rank, started_with(runner), arrivals)
    return found, rank.steps.made.variants_run


@pytest.mark.parametrize(
    ("form", "arrive"),
    [("eager", bound_arrivals), ("graph", picky_arrivals), ("graph", bound_arrivals), ("pieces", some_arrivals)],
)
def test_every_request_of_a_spoilt_model_ends(
    kernels: Operations, shim: HostBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str,
    arrive: Callable[[int, int], list[RequestArrived]],
) -> None:  # fmt: skip
    """And no step waits for the device, but masked ones for the step before."""
    folder = spoil(tiny_checkpoint(tmp_path / "tiny"), "model.norm.weight", 5)
    watches = None if arrive is bound_arrivals else watch_steps(monkeypatch)
    ids, ran = ended(kernels, folder, FORMS[form], arrive(COUNT, 8))
    assert ids == set(range(COUNT)) and ran[form] > 0
    assert watches is None or all(watch.looks > 20 for watch in watches)


def test_one_logit_is_enough(kernels: Operations, shim: HostBackend, tmp_path: Path) -> None:
    """That of a token which no prompt holds: the layers compute numbers, and a row's other logits are some. A sound model ends none."""
    folder = tiny_checkpoint(tmp_path / "tiny")
    assert ended(kernels, folder, GRAPHS, some_arrivals(COUNT, 8))[0] == set()
    spoil(folder, "model.embed_tokens.weight", 205)
    assert ended(kernels, folder, GRAPHS, some_arrivals(COUNT, 8))[0] == set(range(COUNT))


def test_a_prompt_without_samples_ends_too(kernels: Operations, shim: HostBackend, tmp_path: Path) -> None:
    """Scores of a prompt's tokens are looked at as samples are."""
    folder = spoil(tiny_checkpoint(tmp_path / "tiny"), "model.norm.weight", 5)
    arrivals = [
        replace(each, sampling=replace(each.sampling, prompt_logprobs=0, max_tokens=1)) for each in some_arrivals(3, 8, plain=True)
    ]
    assert ended(kernels, folder, EAGER, arrivals)[0] == {0, 1, 2}
