"""torch's flex attention for long rows, in torch's plain form: against dense float64, beside the kernel's rows; its blocks by hand."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
from attention_steps import Options, Range, Sequences, Shape, check, in_fp8, make_sequences
from device_twin import TwinDevice
from host_shim import HostBackend, compiler
from msgspec.structs import replace
from rank_drive import device_rank, drive, runner_of, some_arrivals, started_with, tiny_checkpoint
from torch.nn.attention.flex_attention import flex_attention

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import flex
from vnext.kernels.table import Operations
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.determinism import Invariance
from vnext.runtime.protocol.settings import GpuSettings, SettingsError
from vnext.runtime.rank import gpu_loading
from vnext.sampling.sampling import choose_by_kernel

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
OPTIONS = [Options(), Options(window=100), Options(300, 2.0), Options(window=1)]
GIVEN = [Range(2, 39, 40), Range(0, 250, 700), Range(1, 0, 300), Range(2, 30, 38), Range(0, 699, 700)]
"""A decode, a chunk behind a prefix, a whole prompt, a few drafts, a decode."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are long from 20 queries on."""
    monkeypatch.setattr(flex, "QUERIES_MIN", 20)


def attend(sequences: Sequences, ranges: list[Range], options: Options = Options()) -> list[torch.Tensor]:
    """One step: the result of each range. Blocks that no query sees are -1 in the table."""
    shape = sequences.shape
    table = torch.full((len(ranges), max(map(len, sequences.blocks))), -1, dtype=torch.int32)
    for row, (index, start, stop) in enumerate(ranges):
        first = max(start - options.window + 1, 0) // shape.block_size if options.window else 0
        last = -(-stop // shape.block_size)
        table[row, first:last] = torch.tensor(sequences.blocks[index][first:last])
    counts = [stop - start for _, start, stop in ranges]
    query = torch.cat([sequences.query[index][start:stop] for index, start, stop in ranges])
    contexts = np.array([stop for *_, stop in ranges])
    described = (np.cumsum([0, *counts]), contexts, table, shape.block_size, shape.kv_heads, (options.window,))
    metadata = flex.attention_metadata(AttentionStep(*described))
    found = [flex.paged_attention(query, AttentionCall(*sequences.caches, metadata, shape.head_dim**-0.5, *options)) for _ in range(2)]
    assert torch.equal(*found), "two layers share a mask"
    return list(found[0].split(counts))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [Shape(4, 2, 64, 16), Shape(2, 2, 64, 7), Shape(3, 1, 128, 32)], ids=str)
def test_long_rows_and_others_are_what_dense_attention_gives(shim: HostBackend, shape: Shape, options: Options) -> None:
    sequences = make_sequences([700, 300, 40], shape, torch.float32)
    assert sequences.caches.isnan().any()
    for ranges in (GIVEN, GIVEN[1:2], GIVEN[1:3], GIVEN[::4]):
        for found, given in zip(attend(sequences, ranges, options), ranges, strict=True):
            check(found, sequences, given, options)


@pytest.mark.parametrize("fault", ["a key too few", "a window too wide", "another row's keys", "the next page"])
def test_the_oracle_would_notice(shim: HostBackend, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    sequences, options = make_sequences([700, 300, 40], Shape(4, 2, 64, 16), torch.float32), Options(window=100)
    since, pack = flex.seen_since, flex.pack

    def packed(*given: object) -> flex.Packed:
        found = pack(*given)
        if fault == "a key too few":
            return found._replace(limits=found.limits - 1)
        if fault == "the next page":
            return found._replace(sources=found.sources.roll(-16))
        return found._replace(limits=found.limits % flex.SPAN, codes=found.codes % flex.SPAN)

    if fault == "a window too wide":
        monkeypatch.setattr(flex, "seen_since", lambda position, window: np.maximum(since(position, window) - 1, 0))
    else:
        monkeypatch.setattr(flex, "pack", packed)
    with pytest.raises(AssertionError):
        for found, given in zip(attend(sequences, GIVEN, options), GIVEN, strict=True):
            check(found, sequences, given, options)


@pytest.mark.parametrize("seed", range(12))
def test_blocks_hold_what_queries_see(seed: int) -> None:
    """Each that some query sees, once; those taken whole are seen whole by every query. What codes say is what positions say."""
    rng = random.Random(seed)
    lengths = np.array([rng.randint(20, 700) for _ in range(3)])
    contexts = lengths + np.array([rng.choice([0, 1, 127, 128, rng.randint(0, 900)]) for _ in lengths])
    window = rng.choice([0, 1, 40, 128, 129, 500])
    since = flex.seen_since(contexts - lengths, window)
    rows = flex.Rows(np.arange(3), np.cumsum(lengths) - lengths, lengths, contexts, since)
    packed = flex.pack(rows, torch.arange(3 * 200, dtype=torch.int32).view(3, 200), 16, 1)
    blocks = flex.blocks_of(rows, window, torch.device("cpu"))
    limits, lows, codes = packed.limits.numpy(), blocks.lows.numpy(), packed.codes.numpy()
    seen = (codes <= limits[:, None]) & (codes > lows[:, None])
    position, row = limits % flex.SPAN, limits // flex.SPAN
    key, key_row = codes % flex.SPAN, codes // flex.SPAN
    expected = (key_row == row[:, None]) & (key <= position[:, None]) & (not window or key > position[:, None] - window)
    assert np.array_equal(seen, expected) and seen.any(1).all()
    by_block = seen.reshape(len(limits) // flex.BLOCK, flex.BLOCK, len(codes) // flex.BLOCK, flex.BLOCK)
    for at, (count, whole_count) in enumerate(zip(blocks.mixed_counts.tolist(), blocks.whole_counts.tolist())):
        mixed, whole = blocks.mixed[at, :count].tolist(), blocks.whole[at, :whole_count].tolist()
        assert len({*mixed, *whole}) == count + whole_count, "each once"
        assert {*by_block[at].any((0, 2)).nonzero()[0].tolist()} <= {*mixed, *whole}
        assert by_block[at][:, whole].all() and all(by_block[at][:, each].any() for each in mixed)
    assert sum(blocks.whole_counts.tolist()) > 0 or window in (1, 40, 128, 129)


def test_one_program_serves_every_step(shim: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its sizes and windows; a soft cap has another."""
    programs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        programs.append(graph)
        return graph.forward

    dynamo.reset()
    attended = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=counted)
    monkeypatch.setattr(flex, "attend_on", lambda device_type: attended)
    sequences = make_sequences([700, 300, 40], Shape(4, 2, 64, 16), torch.float32)
    for options in (Options(), Options(window=100), Options(), Options(window=300)):
        for ranges in (GIVEN, GIVEN[1:2], [Range(1, 100, 290)], [Range(0, 0, 700), Range(1, 0, 300)]):
            for found, given in zip(attend(sequences, ranges, options), ranges, strict=True):
                check(found, sequences, given, options)
    plain = len(programs)
    attend(sequences, GIVEN, Options(300, 2.0))
    assert plain == 1 < len(programs)


def test_what_a_compiler_makes_of_it_reads_the_blocks(shim: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's plain form looks at the function alone; its compiled one for a CPU walks the blocks, as that for a GPU does."""
    if compiler() is None:
        pytest.skip("no C++ compiler here, which torch's compiler needs on a CPU")
    dynamo.reset()
    attended = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "attend_on", lambda device_type: attended)
    sequences = make_sequences([700, 300, 40], Shape(4, 2, 64, 16), torch.float32)
    for found, given in zip(attend(sequences, GIVEN, Options(window=300)), GIVEN, strict=True):
        check(found, sequences, given, Options(window=300))


def test_what_it_is_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_sequences([60], Shape(4, 2, 64, 16), torch.bfloat16)
    with pytest.raises(ContractError, match=r"reads caches of the query's type, torch.bfloat16, and not of torch.float8_e4m3fn"):
        attend(in_fp8(sequences)[0], [Range(0, 0, 60)])
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert flex.why_not(torch.bfloat16, 128).startswith("Triton is not installed here")
    monkeypatch.setattr(flex, "find_spec", lambda name: name)
    assert flex.why_not(torch.bfloat16, 128) == "" and flex.why_not(torch.bfloat16, 96) == "it does not know heads of 96 in bfloat16"
    assert flex.why_not(torch.float32, 64) == "it does not know heads of 64 in float32"


def test_rows_beyond_what_may_be_copied_are_the_kernel_s(shim: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_sequences([700, 300, 40], Shape(4, 2, 64, 16), torch.float32)
    monkeypatch.setattr(flex, "KEYS_MAX", 768)
    copied = flex.copied
    seen = []
    monkeypatch.setattr(flex, "copied", lambda cache, packed: seen.append(len(packed.codes)) or copied(cache, packed))
    for found, given in zip(attend(sequences, GIVEN), GIVEN, strict=True):
        check(found, sequences, given)
    assert set(seen) == {768}
    assert flex.copied_bytes(8, 128, torch.bfloat16, 700, 8192) == 2 * 768 * 8 * 128 * 2
    monkeypatch.setattr(flex, "KEYS_MAX", 1 << 17)
    assert flex.copied_bytes(8, 128, torch.bfloat16, 700, 39) == 2 * 768 * 8 * 128 * 2
    assert flex.copied_bytes(8, 128, torch.bfloat16, 700, 19) == 0


def test_a_device_that_computes_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "QUERIES_MIN", 1024)
    cpu, heads = torch.device("cpu"), (2, 1, 64)
    flex.why_not_here.cache_clear()
    assert flex.why_not_here(cpu, torch.bfloat16, heads) == ""
    flex.why_not_here.cache_clear()
    with monkeypatch.context() as planted:
        planted.setattr(flex, "seen_since", lambda position, window: np.minimum(position, 1))
        assert "its results on this GPU differ by" in flex.why_not_here(cpu, torch.bfloat16, heads)
    flex.why_not_here.cache_clear()
    with monkeypatch.context() as planted:
        planted.setattr(flex, "attend_on", lambda device_type: flex_attention)
        planted.setattr(flex, "block_mask", lambda *given: 1 / 0)
        assert flex.why_not_here(cpu, torch.bfloat16, heads) == "torch cannot compile it here (ZeroDivisionError: division by zero)"
    flex.why_not_here.cache_clear()


def test_an_engine_s_tokens_are_those_of_the_kernel(kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decodes, some of them in graphs."""
    monkeypatch.setattr(flex, "QUERIES_MIN", 5)
    folder, found, long = tiny_checkpoint(tmp_path / "tiny", head_dim=64), [], []
    pack = flex.pack
    monkeypatch.setattr(flex, "pack", lambda rows, *others: long.append(len(rows.row)) or pack(rows, *others))
    theirs = kernels._replace(attention_metadata=flex.attention_metadata, paged_attention=flex.paged_attention)
    for operations in (kernels, theirs):
        variants = DeviceVariants(operations=operations, choose=choose_by_kernel, shapes=Shapes((2, 8), ()))
        rank = device_rank(runner_of(folder), TwinDevice(), variants)
        answers = drive(rank, started_with(runner_of(folder)), some_arrivals(6, seed=8, plain=True))
        found.append({id_: [token for token, _ in each] for id_, each in answers.items()})
        assert rank.steps.made.variants_run["graph"] > 3
    assert found[0] == found[1] and sum(long) > 3


def test_it_serves_long_prompts_where_a_record_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless bits may not depend on how a prompt is cut. Whole steps stay graphs, and a shared prefix is read once."""
    runner = runner_of(tiny_checkpoint(tmp_path / "tiny", head_dim=64), "bfloat16")
    runner.invariance = Invariance(holds=False, why="")
    monkeypatch.setattr("vnext.kernels.cuda.backends.is_usable", lambda: True)
    monkeypatch.setattr(flex, "find_spec", lambda name: name)

    def serves(attention: str = "auto") -> bool:
        variants = gpu_loading.device_variants(runner, GpuSettings(attention=attention))
        assert variants.shapes.rows and variants.shapes.tokens and variants.cascade is not None
        is_flex = variants.operations.paged_attention is flex.paged_attention
        assert is_flex == (variants.operations.attention_metadata is flex.attention_metadata)
        return is_flex

    assert not serves() and serves("flex"), "without a GPU there is no record"
    monkeypatch.setattr(gpu_loading, "capability", lambda: (9, 0))
    gpu = GpuSettings(attention="auto", tokens_max=8192)
    assert serves() and not serves("vnext") and gpu_loading.copied_bytes(runner, gpu) > 0
    assert gpu_loading.copied_bytes(runner, replace(gpu, attention="vnext")) == 0
    monkeypatch.setattr(gpu_loading, "capability", lambda: (8, 0))
    assert not serves() and gpu_loading.copied_bytes(runner, gpu) == 0
    monkeypatch.setattr(gpu_loading, "capability", lambda: (9, 0))
    runner.invariance = Invariance(holds=True, why="")
    assert not serves()
    with pytest.raises(SettingsError, match="--attention is flex, but its results depend on the batch, and --deterministic is asked"):
        serves("flex")
    runner.invariance = Invariance(holds=False, why="")
    runner.settings = replace(runner.settings, kv_cache_dtype="fp8")
    with caplog.at_level(logging.INFO):
        assert not serves()
    assert "own kernel serves the attention of long prompts, and not flex: it does not read keys and values in 8 bits" in caplog.text
    with pytest.raises(SettingsError, match="--attention is flex, but it does not read keys and values in 8 bits"):
        serves("flex")
