"""Steps of decodes as graphs, by the CUDA kernels' own sources on the CPU: padding and replays change no token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
from attention_steps import Shape, make_sequences
from device_ranks import RankBackend, run_threads
from device_twin import CaptureError, TwinDevice
from device_watch import watch_steps
from graph_cases import answers
from heads.runners import head_runner
from heads.saved import tiny_mimo
from host_shim import ORDERS, HostBackend, HostLauncher
from msgspec.structs import replace
from rank_drive import (
    EXPERTS,
    WINDOWS,
    bound_arrivals,
    device_rank,
    drive,
    picky_arrivals,
    runner_of,
    some_arrivals,
    started_with,
    tiny_checkpoint,
)

from vnext.kernels import products
from vnext.kernels.batch_index import plain_batch_operations
from vnext.kernels.calls import AttentionCall
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import attention, backends, compiled, operations
from vnext.kernels.cuda.decode_plan import DecodeAttention, slot_count, tiles_of, view_plan, word_count, write_plan
from vnext.kernels.cuda.plan import make_plan
from vnext.kernels.table import Operations, plain_operations
from vnext.models.layers.layers import describe_attention
from vnext.models.layers.sharding import Parallel
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.cascade import Costs
from vnext.runtime.gpu.decode_graphs import DecodeGraphs
from vnext.runtime.gpu.device_batch import DeviceBatch, HostStep
from vnext.runtime.gpu.row_parameters import RowParameters
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.determinism import gpu_invariance
from vnext.runtime.rank.gpu_loading import compiler
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.transport.collectives.device_group import DeviceGroup
from vnext.sampling.sampling import adjust_by_kernel, choose_by_kernel
from vnext.state.events import RequestArrived, pack_tokens
from vnext.state.params import Sampling

CONTEXTS = [700, 1, 256, 257, 33]


def plan_of(contexts: list[int], units: int, window: int, rows: list[int]) -> torch.Tensor:
    tiles = tiles_of(np.ones(len(contexts), dtype=np.int64), 2)
    flat = np.full(word_count(len(contexts), units), 12345, dtype=np.int32)
    write_plan(flat, units, np.array(contexts), np.array(rows), window, tiles)
    return torch.from_numpy(flat)


@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("room", [0, 7])
def test_a_plan_of_fixed_shape_gives_the_bits_of_the_step_s_own(shim: HostBackend, window: int, room: int) -> None:
    """Rows of a table in another order, too; units without tiles do nothing."""
    sequences = make_sequences(CONTEXTS, Shape(4, 2, 16, 16), torch.float32)
    table = torch.zeros(len(CONTEXTS), 44, dtype=torch.int32)
    for row, blocks in enumerate(sequences.blocks):
        table[row, : len(blocks)] = torch.tensor(blocks)
    query = torch.cat([each[-1:] for each in sequences.query])
    starts, contexts = np.arange(len(CONTEXTS) + 1), np.array(CONTEXTS)
    own = make_plan(starts, contexts, 2, window, 0, attention.warps_of(16), torch.device("cpu"))
    expected = attention.paged_attention(query, table, AttentionCall(*sequences.caches, own, 0.25, window))
    units = slot_count(tiles_of(np.ones_like(contexts), 2), contexts, window) + room
    order = [3, 1, 4, 0, 2]
    moved = torch.empty_like(table)
    moved[order] = table
    fixed = view_plan(plan_of(CONTEXTS, units, window, order), len(CONTEXTS), units)
    assert torch.equal(attention.paged_attention(query, moved, AttentionCall(*sequences.caches, fixed, 0.25, window)), expected)


def test_splits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ContractError, match="4 splits do not fit a plan with room for 3"):
        plan_of([700, 5], 3, 0, [0, 1])
    metadata = DecodeAttention(plan_of([5], 1, 0, [0]), 1, 1, torch.zeros(1, 1, dtype=torch.int32), 4, 2, 0)
    with pytest.raises(ContractError, match="needs attention by the kernels"):
        metadata.plain()


@pytest.mark.parametrize(
    ("changes", "arrive"),
    [({}, picky_arrivals), (WINDOWS, some_arrivals), ({}, bound_arrivals)],
    ids=["one group, asking for much", "two groups, from C++", "masked"],
)
def test_graphs_of_padded_decodes_give_the_tokens_of_steps_as_they_are(
    kernels: Operations, shim: HostBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object],
    arrive: Callable[[int, int], list[RequestArrived]],
) -> None:  # fmt: skip
    """And no step of either waits for the device, but masked ones for the step before. Steps as they are launch from Python; graphs do too, or are recorded and
    replayed with launches from C++."""
    folder = tiny_checkpoint(tmp_path / "tiny", **changes)
    watches = None if arrive is bound_arrivals else watch_steps(monkeypatch)
    given = {"arrive": arrive} if changes else {"arrive": arrive, "page_count": 18}  # of which some are taken from rows
    expected, ran = answers(kernels, folder, Shapes((), ()), **given)
    assert ran["graph"] == ran["pieces"] == 0 and ran["eager"] > 10
    launcher = HostLauncher(shim) if changes and compiled.is_built() else None
    with compiled.serving("cpu", launcher.launcher()) if launcher else nullcontext():
        found, ran = answers(kernels, folder, Shapes((2, 8), (24,)), **given)
    assert found == expected and (launcher is None or launcher.launches > 100)
    assert ran["graph"] > 5 and ran["pieces"] > 0 and ran["eager"] == 0
    assert watches is None or len(watches) > 25 and all(watch.looks > 20 for watch in watches)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("launches", ["from Python", "from C++"])
def test_caches_of_codes_give_the_same_tokens_in_graphs_chunks_and_after_preemption(
    kernels: Operations, shim: HostBackend, tmp_path: Path, launches: str, kind: str
) -> None:
    """And with hits, or without; not those of a cache of floats, of which the same rows are not rounded."""
    if launches == "from C++" and not compiled.is_built():
        pytest.skip("the extension was not built")
    folder = tiny_checkpoint(tmp_path / "tiny", **WINDOWS)
    given = {"arrive": some_arrivals, "kv_cache_dtype": kind, "count": 9, "dtype": "bfloat16" if kind == "fp8" else "float32"}
    expected, ran = answers(kernels, folder, Shapes((), ()), prefix_caching=False, **given)
    assert ran["eager"] > 10
    launcher = HostLauncher(shim)
    with compiled.serving("cpu", launcher.launcher()) if launches == "from C++" else nullcontext():
        for shapes, bounds in ((Shapes((2, 8), (24,)), {}), (Shapes((2, 8), ()), {"page_count": 26}), (Shapes((), ()), {"max_num_batched_tokens": 9})):
            assert answers(kernels, folder, shapes, **given, **bounds)[0] == expected
    assert (launcher.launches > 100) == (launches == "from C++")
    assert answers(kernels, folder, Shapes((), ()), prefix_caching=False, **given | {"kv_cache_dtype": "auto"})[0] != expected


def with_a_long_list_last(count: int, seed: int) -> list[RequestArrived]:
    """Three requests with a bias each, and one that comes when they decode, whose bias has more entries than there is room."""
    arrivals = some_arrivals(count, seed, plain=True)
    for at, arrival in enumerate(arrivals):
        bias = tuple((token, 30.0) for token in range(100, 140)) if at == count - 1 else ((7 + at, 20.0),)
        arrivals[at] = replace(arrival, sampling=Sampling(seed=at, max_tokens=12, temperature=0.0, logit_bias=bias))
    return arrivals


def test_graphs_know_tables_that_have_grown(kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a version that stays, by which graphs would read the tables of before."""
    folder, given = tiny_checkpoint(tmp_path / "tiny"), {"count": 4, "arrive": with_a_long_list_last}
    expected, ran = answers(kernels, folder, Shapes((8,), ()), **given)
    assert ran["graph"] > 10 and set(expected[3]) <= set(range(100, 140))
    monkeypatch.setattr(RowParameters, "version", property(lambda self: 0, lambda self, value: None), raising=False)
    assert not set(answers(kernels, folder, Shapes((8,), ()), **given)[0][3]) <= set(range(100, 140))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """The references, but for experts, whose gate is a kernel."""
    chosen = plain_operations()._replace(experts=operations.experts)
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: chosen)
    return chosen


def test_experts_are_captured_and_are_those_of_the_reference(
    shim: HostBackend, plain: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, which torch's grouped product serves: the twin refuses whatever would wait for the host."""
    monkeypatch.setattr(ModelRunner, "_invariance", lambda runner: gpu_invariance(runner.settings.deterministic))  # no shards without
    folder = tiny_checkpoint(tmp_path / "tiny", **EXPERTS)
    expected, ran = answers(plain, folder, Shapes((), ()), 3, "bfloat16")
    assert ran["eager"] > 5
    found, ran = answers(plain, folder, Shapes((), (4, 24)), 3, "bfloat16")
    assert found == expected and ran["pieces"] > 5 and ran["eager"] == 0
    x, ids = torch.randn(9, 16), torch.tensor([[3, 0], [0, 3], [2, 3], *[[3, 2]] * 6])
    sizes = (x.bfloat16(), torch.rand(9, 2), ids, torch.randn(4, 48, 16).bfloat16(), torch.randn(4, 16, 24).bfloat16(), "silu")
    torch.testing.assert_close(operations.experts(*sizes), products.experts(*sizes), rtol=0.02, atol=0.2)
    with pytest.raises(CaptureError, match="waits for the device"):
        graph = TwinDevice().graph()
        graph.begin()
        try:
            products.experts(*sizes)
        finally:
            graph.end()


def test_graphs_of_two_ranks_meet_in_every_replay(
    plain: Operations, shim: HostBackend, libraries: Path, tmp_path: Path
) -> None:
    """Ranks as threads; their sums are nodes of the graphs, and count on from replay to replay."""
    folder, backend = tiny_checkpoint(tmp_path / "tiny"), RankBackend(libraries, precompile=True)

    def work(shapes: Shapes, rank: int, group: DeviceGroup) -> tuple[dict, dict]:
        parallel = Parallel(rank=rank, world_size=2, all_reduce=group.all_reduce, all_gather=group.all_gather)
        found = answers(plain, folder, shapes, 2, parallel=parallel)
        group.require_whole()
        return found

    backends.use("cpu", lambda: backend)
    try:
        (expected, ran), (other, _) = run_threads(backend, (0, 0), partial(work, Shapes((), ())))
        assert expected == other and ran["eager"] > 5
        for found, ran in run_threads(backend, ORDERS[1:3], partial(work, Shapes((), (4, 24)))):
            assert found == expected and ran["pieces"] > 5 and ran["eager"] == 0
    finally:
        backends.use("cpu", lambda: shim)


def test_a_graph_that_is_given_an_old_block_is_named(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: positions of the step before. What is hashed is what the graph's own memory holds."""
    folder, block_of, old = tiny_checkpoint(tmp_path / "tiny"), DecodeGraphs.block_of, []

    def stale(self: DecodeGraphs, step: HostStep | None, *sizes: int) -> np.ndarray:
        old.append(step)
        before = old[-2] if len(old) > 1 and old[-2] is not None and step is not None else step
        return block_of(self, before if before is None or len(before.begins) == len(step.begins) else step, *sizes)

    monkeypatch.setattr(DecodeGraphs, "block_of", stale)
    with pytest.raises(AssertionError, match="fed otherwise: .*positions, slots, context lengths"):
        answers(kernels, folder, Shapes((8,), ()), count=3)


def test_a_prefix_that_is_read_once_changes_no_token(
    kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it always pays: decodes leave their graphs for it, and come back when one row alone is left."""
    folder, shared = tiny_checkpoint(tmp_path / "tiny"), []

    def described(*arguments: object, **named: object) -> object:
        shared.append(arguments[4] if len(arguments) > 4 else 0)
        return describe_attention(*arguments, **named)

    monkeypatch.setattr("vnext.runtime.gpu.steps.describe_attention", described)
    common = [5 + place * 7 % 200 for place in range(260)]
    sampling = [Sampling(seed=index, max_tokens=3 + index, temperature=0.9) for index in range(3)]
    arrivals = [
        RequestArrived(
            id=id_, name="", prompt=pack_tokens([*common, 9 + id_, 11]), sampling=each, priority=0, arrival_ns=0
        )
        for id_, each in enumerate(sampling)
    ]  # fmt: skip
    bounds = {"block_size": 16, "page_count": 70, "max_num_batched_tokens": 270, "max_model_len": 300}
    found = []
    for costs in (None, Costs(token_bytes=10**12, layer_count=2)):
        variants = DeviceVariants(operations=kernels, choose=choose_by_kernel, shapes=Shapes((4,), ()), cascade=costs)
        rank = device_rank(runner_of(folder), TwinDevice(), variants)
        found.append(drive(rank, started_with(runner_of(folder), **bounds), arrivals))
        assert (max(shared) == 16) == (costs is not None), "sixteen whole blocks of the common beginning"
        assert rank.steps.made.variants_run["graph"] > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("has_head", [False, True], ids=["alone", "with a head"])
def test_a_compiler_takes_the_forward_as_one_graph(kernels: Operations, tmp_path: Path, has_head: bool) -> None:
    """Breaks in it would be errors. What is traced is run as it is: code for a GPU needs one."""
    dynamo.reset()
    folder, device = tmp_path / "tiny", TwinDevice()
    runner = head_runner(tiny_mimo(folder)) if has_head else runner_of(tiny_checkpoint(folder))
    config = started_with(runner).config
    model = runner.device_model(config.page_count, config.block_size)
    batch = DeviceBatch(config, runner.config.vocab_size, device, plain_batch_operations())
    traced: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        traced.append(module)
        return module.forward

    found = []
    for wrap in (None, partial(compiler(), backend=backend)):
        graphs = DecodeGraphs(device, model, batch, choose_by_kernel, adjust_by_kernel, wrap)
        fields = graphs.layout(4, 4).tensors(torch.from_numpy(graphs.block_of(None, 4, 4)))
        fields["tokens"].copy_(torch.tensor([3, 50, 7, 120]))
        with torch.inference_mode():
            found.append([tensor.clone() for tensor in graphs.body(fields, 4, 4)])
    assert len(traced) == 1 and sum("vnext_cuda" in str(node.target) for node in traced[0].graph.nodes) >= 10
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
