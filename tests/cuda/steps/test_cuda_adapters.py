"""Steps with adapters as graphs and in pieces, by the CUDA kernels' own sources on the CPU: one graph serves any adapters."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
from device_twin import TwinDevice
from device_watch import watch_steps
from msgspec.structs import replace
from rank_drive import (
    WINDOWS,
    device_rank,
    drive,
    host_rank,
    picky_arrivals,
    runner_of,
    some_arrivals,
    started_with,
    tiny_checkpoint,
)
from saved_adapters import save_adapter

from vnext.kernels.batch_index import plain_batch_operations
from vnext.kernels.table import Operations
from vnext.kernels.thin_tiles import ThinTiles
from vnext.models.config.adapter_config import adapter_digest
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.decode_graphs import DecodeGraphs
from vnext.runtime.gpu.device_batch import DeviceBatch, HostStep
from vnext.runtime.gpu.piecewise_graphs import PiecewiseGraphs, Static
from vnext.runtime.gpu.sampling_updates import Wants
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.rank.gpu_loading import compiler, keep_adapters
from vnext.sampling.sampling import adjust_by_kernel, choose_by_kernel, keep_allowed_by_kernel
from vnext.state.events import AdapterLoaded, RequestArrived

RANK_MAX = 20
EAGER, CAPTURED = Shapes((), ()), Shapes((2, 8), (24,))
Arrive = Callable[[int, int], list[RequestArrived]]


def made_of(folder: Path) -> list[AdapterFiles]:
    """Three adapters of the checkpoint, beside it."""
    found = []
    for seed, rank in enumerate((2, 16, RANK_MAX)):
        saved = save_adapter(folder, folder.parent / f"adapter {seed}", seed, rank=rank, lora_alpha=8)
        found.append(AdapterFiles(name=f"a{seed}", digest=adapter_digest(saved), path=str(saved)))
    return found


def answers(
    folder: Path, shapes: Shapes, kernels: Operations | None, arrive: Arrive = some_arrivals, count: int = 9, **bounds: Any
) -> tuple[dict[int, list[int]], dict[str, int]]:
    """Tokens of each request, and how often each form was run; of the plain rank without kernels. Every other request has one of
    three adapters, for which there are two slots."""
    files, rng = made_of(folder), random.Random(5)
    runner = runner_of(folder, max_lora_rank=RANK_MAX)
    if kernels is None:
        rank = host_rank(runner)
    else:
        variants = DeviceVariants(
            operations=kernels, choose=choose_by_kernel, adjust=adjust_by_kernel, keep=keep_allowed_by_kernel, shapes=shapes
        )
        rank = device_rank(runner, TwinDevice(), variants, 2, RANK_MAX)
    arrivals = [
        replace(each, sampling=replace(each.sampling, adapter=rng.choice([*["" for _ in files], *(file.digest for file in files)])))
        for each in arrive(count, 8)
    ]
    found = drive(rank, started_with(runner, max_loras=2, **bounds), arrivals, files=files)
    return {id_: [token for token, _ in each] for id_, each in found.items()}, rank.steps.made.variants_run if kernels else {}


@pytest.mark.parametrize(
    ("changes", "arrive"), [({}, some_arrivals), ({}, picky_arrivals), (WINDOWS, some_arrivals)],
    ids=["one group", "asking for much, preempted", "two groups"],
)  # fmt: skip
def test_any_mixture_of_adapters_by_graphs_gives_the_tokens_of_the_plain_rank(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], arrive: Arrive
) -> None:
    """And of eager steps; no step waits for the device."""
    folder, bounds = tiny_checkpoint(tmp_path / "tiny", **changes), {"page_count": 18} if arrive is picky_arrivals else {}
    expected, _ = answers(folder, EAGER, None, arrive, **bounds)
    kernels, watches = request.getfixturevalue("kernels"), watch_steps(monkeypatch)
    eager, ran = answers(folder, EAGER, kernels, arrive, **bounds)
    assert eager == expected and ran["graph"] == ran["pieces"] == 0
    found, ran = answers(folder, CAPTURED, kernels, arrive, **bounds)
    assert found == expected and ran["graph"] > 5 and ran["pieces"] > 0 and ran["eager"] == 0
    assert len(watches) > 25 and all(watch.looks > 20 for watch in watches)


def forget_tiles(static: Static) -> Static:
    """Written beside the memory that the graphs read."""
    return static._replace(tiles=ThinTiles(*(tensor.clone() for tensor in static.tiles)) if static.tiles else None)


def test_tiles_that_were_not_copied_to_static_memory_are_found(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted, into pieces."""
    folder, fill, pieces = tiny_checkpoint(tmp_path / "tiny"), PiecewiseGraphs._fill, Shapes((), (24,))
    right, ran = answers(folder, pieces, kernels, count=4)
    assert ran["pieces"] > 10
    monkeypatch.setattr(PiecewiseGraphs, "_fill", lambda self, static, batch: fill(self, forget_tiles(static), batch))
    assert answers(folder, pieces, kernels, count=4)[0] != right


def test_graphs_that_are_given_the_tiles_of_another_step_are_named(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what is hashed is what the graph's own memory holds, and the names are those in the regions."""
    folder, block_of = tiny_checkpoint(tmp_path / "tiny"), DecodeGraphs.block_of

    def swapped(self: DecodeGraphs, step: HostStep | None, *sizes: Any) -> np.ndarray:
        if step is not None and step.tiles is not None:
            step = step._replace(tiles=(step.tiles[0][::-1], step.tiles[1]))
        return block_of(self, step, *sizes)

    monkeypatch.setattr(DecodeGraphs, "block_of", swapped)
    with pytest.raises(AssertionError, match=r"fed otherwise: \['adapters'\]"):
        answers(folder, Shapes((8,), ()), kernels)


def test_a_compiler_takes_a_forward_with_adapters_as_one_graph(kernels: Operations, tmp_path: Path) -> None:
    """Breaks in it would be errors; each product that adapters change is followed by an operation of ours."""
    dynamo.reset()
    runner, device = runner_of(tiny_checkpoint(tmp_path / "tiny"), max_lora_rank=RANK_MAX), TwinDevice()
    keep_adapters(runner, device, 2, RANK_MAX)
    (each, *_), config = made_of(tmp_path / "tiny"), started_with(runner).config
    runner.adapters.fold(AdapterLoaded(name="", digest=each.digest, slot=0, path=each.path))
    model, wants = runner.device_model(config.page_count, config.block_size), Wants(False, False, adapted=True)
    batch = DeviceBatch(config, runner.config.vocab_size, device, plain_batch_operations())
    traced, found = list[torch.fx.GraphModule](), []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        traced.append(module)
        return module.forward

    for wrap, count in ((None, 3), (partial(compiler(), backend=backend), 3), (None, 0)):
        graphs = DecodeGraphs(device, model, batch, choose_by_kernel, adjust_by_kernel, wrap)
        fields = graphs.layout(4, 4, True).tensors(torch.from_numpy(graphs.block_of(None, 4, 4, True)))
        fields["tokens"].copy_(torch.tensor([3, 50, 7, 120]))
        fields["tile_tokens"].copy_(torch.tensor([0, 2, 3, 0]))
        fields["tiles"][:3].copy_(torch.tensor([runner.adapters[0].index, 0, count]))
        with torch.inference_mode():
            found.append([tensor.clone() for tensor in graphs.body(fields, 4, 4, wants)])
    assert len(traced) == 1 and sum("add_tiled" in str(node.target) for node in traced[0].graph.nodes) == 8
    assert all(map(torch.equal, found[0], found[1])) and not torch.equal(found[0][0], found[2][0])
