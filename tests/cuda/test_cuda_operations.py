"""The kernels as operations of torch: registered as torch asks, and with the references' results behind the table's face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from device_twin import TwinDevice
from host_shim import HostBackend, HostLauncher
from rows_cases import adapters, draw, tiles_of
from sampling_cases import Draws, asked, masked
from table_cases import agree, mixed_step, rotary_step

from vnext.kernels import contracts, paged_attention as plain_attention, table
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cuda import compiled, operations
from vnext.kernels.table import checked, plain_operations

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
OPS = torch.ops.vnext_cuda
CPU = torch.device("cpu")


@pytest.fixture(params=["from Python", "from C++"])
def form(request: pytest.FixtureRequest, shim: HostBackend) -> Iterator[str]:
    """Both forms of the operations; that they were launched as they should is seen by their number."""
    if request.param == "from Python":
        yield request.param
        return
    launcher: HostLauncher = request.getfixturevalue("from_cpp")
    yield request.param
    assert launcher.launches > 0


def test_rows_are_good_operations(form: str) -> None:
    x, weight = draw(3, 64), draw(64, seed=1)
    torch.library.opcheck(OPS.rms_norm.default, (x, weight, 1e-6), test_utils=CHECKS)
    torch.library.opcheck(OPS.add_rms_norm.default, (x, x + 1, weight, 1e-6), test_utils=CHECKS)
    torch.library.opcheck(OPS.gate_and_mul.default, (x, "silu"), test_utils=CHECKS)
    torch.library.opcheck(OPS.embedding_rows.default, (x, torch.tensor([2, 0, 5]), 0), test_utils=CHECKS)
    qkv, q_norm, k_norm, *others = rotary_step(CPU)
    torch.library.opcheck(OPS.rotary_kv_write.default, (qkv, q_norm, k_norm, 1e-6, *others), test_utils=CHECKS)


def test_sampling_is_a_good_operation(shim: HostBackend) -> None:
    logits, inputs = draw(3, 40), Draws(2).inputs(3)
    torch.library.opcheck(OPS.sample_rows.default, (logits, list(inputs.columns()), 64), test_utils=CHECKS)
    tables, *places = asked(Draws(1), 40, 3)[:3]
    wide = draw(5, 40)
    torch.library.opcheck(OPS.adjust_rows.default, (wide.clone(), *places, *tables), test_utils=CHECKS)
    tables_of, *placed, _, drafts = asked(Draws(1), 40, 3, is_drafted=True)
    torch.library.opcheck(OPS.adjust_rows.default, (draw(9, 40), *placed, *tables_of, *drafts), test_utils=CHECKS)
    allowed = masked(Draws(3), 5, 40)
    torch.library.opcheck(OPS.mask_rows.default, (wide.clone(), allowed.rows, allowed.masks), test_utils=CHECKS)
    again = wide.clone()
    operations.adjust_rows(again, *places, tables, (None, None))
    assert not torch.equal(again, wide)
    assert torch.equal(operations.sample_rows(logits, inputs._replace(temperature=torch.zeros(3)).columns()), logits.argmax(-1))


def test_thin_products_are_a_good_operation(shim: HostBackend) -> None:
    given, tiles = adapters(60, (20,), [[5], [3]], torch.float32), tiles_of([(0, [0, 2]), (1, [1])])
    arguments = (draw(3, 20), draw(3, 60), given.memory, *tiles, *given.lines)
    torch.library.opcheck(OPS.add_tiled.default, arguments, test_utils=CHECKS)


def test_attention_is_a_good_operation(form: str) -> None:
    query, caches, starts, contexts, places, _ = mixed_step(CPU)
    plan = operations.attention_metadata(AttentionStep(starts, contexts, places, 16, 2)).plan(4, 16, 0)
    arguments = (query, *caches, places, list(plan[:7]), plan.slot_count, plan.narrow_is_partial, 0.25, 0, 0.0)
    torch.library.opcheck(OPS.paged_attention.default, arguments, test_utils=CHECKS)


def test_the_tables_functions_agree_with_the_references(form: str) -> None:
    """Through the contracts, as the table puts them before every row."""
    functions = {
        function.__name__: checked(getattr(contracts, f"check_{function.__name__}"), function)
        for function in operations.FUNCTIONS
    }
    plain = plain_operations()._asdict()
    assert set(functions) <= set(plain)
    agree(functions | {name: plain[name] for name in plain if name not in functions}, plain, CPU, 2e-6)


def test_both_forms_give_the_same_bits(from_cpp: HostLauncher) -> None:
    """And the same caches. Where C++ makes dense copies of its own, too: of a query, of angles."""
    step, steps = mixed_step(CPU), []
    plan = operations.attention_metadata(AttentionStep(step.starts, step.contexts, step.table, 16, 2)).plan(4, 16, 0)
    apart = step.query.repeat_interleave(2, 1)[:, ::2]
    qkv, q_norm, k_norm, cosine, sine, _, _, slots = rotary_step(CPU)
    turns = [torch.cat((part, part), 1)[:, : part.shape[1]] for part in (cosine, sine)]
    for place in ("cpu", None):
        with compiled.set_aside(place) if place else nullcontext():
            caches = torch.zeros(2, 4, 2, 4, 16)
            rotary = OPS.rotary_kv_write(qkv, q_norm, k_norm, 1e-6, *turns, *caches, slots)
            attended = OPS.paged_attention(apart, *step.caches, step.table, list(plan[:7]), *plan[7:], 0.25, 30, 3.0)
            steps.append((rotary, caches, attended, OPS.rms_norm(qkv, qkv[0], 1e-6), *OPS.add_rms_norm(qkv, qkv, qkv[0], 1e-6)))
    assert not any(part.isnan().any() for part in steps[0])
    assert all(torch.equal(*pair) for pair in zip(*steps, strict=True)) and from_cpp.launches == 6


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normed, total = operations.add_rms_norm(x, x, weight, 1e-6)
    return operations.rms_norm(total, weight, 1e-5) + OPS.gate_and_mul(torch.cat((normed, total), 1), "silu")


def test_a_compiler_and_a_graph_take_them(from_cpp: HostLauncher) -> None:
    """As one graph without breaks; and recorded, then replayed over other numbers in the same memory."""
    x, weight = draw(3, 64), draw(64, seed=1)
    expected = layer(x, weight)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight), expected)
    graph, held = TwinDevice().graph(), x.clone()
    with torch.inference_mode():
        graph.begin()
        found = layer(held, weight)
        graph.end()
        held.copy_(x * 2)
        graph.replay()
    assert torch.equal(found, layer(x * 2, weight)) and not torch.equal(found, expected)
    assert from_cpp.launches == 3 * 5


def test_what_no_kernel_was_written_for_is_the_references(shim: HostBackend) -> None:
    query, caches, starts, contexts, places, _ = mixed_step(CPU)
    metadata = operations.attention_metadata(AttentionStep(starts, contexts, places, 16, 2))
    mixed = operations.paged_attention(query.half(), AttentionCall(*caches.nan_to_num(0.0), metadata, 0.25))
    assert torch.equal(mixed, plain_attention.paged_attention(query.half(), AttentionCall(*caches.nan_to_num(0.0), metadata.plain(), 0.25)))
    integers = torch.arange(6).view(3, 2)
    assert operations.embedding_rows(integers, torch.tensor([2]), 0).tolist() == [[4, 5]]


def test_the_table_has_them_where_they_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, served in ((True, {f.__name__ for f in operations.FUNCTIONS}), (False, set())):
        monkeypatch.setattr("vnext.kernels.cuda.backends.is_usable", lambda usable=usable: usable)
        rows = [entry.row for entry in table.make_table().values() if entry.row.implementation == "cuda"]
        assert {row.operation for row in rows} == served and {row.device_type for row in rows} <= {"cuda"}


def test_a_launch_takes_only_what_says_how_wide_it_is() -> None:
    from vnext.kernels.cuda.interface import Arguments

    for given, name in ((3, "int"), (np.int16(3), "int16"), (np.bool_(True), "bool")):
        with pytest.raises(TypeError, match=f"not {name}"):
            Arguments([given])
