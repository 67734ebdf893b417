"""The kernels as operations of torch: registered as torch asks, and with the references' results behind the table's face."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_steps import Shape, make_sequences
from host_shim import HostBackend
from rows_cases import draw

from vnext.kernels import contracts, paged_attention as plain_attention, products, references, table
from vnext.kernels.cuda import operations
from vnext.kernels.table import Operations, checked

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
OPS = torch.ops.vnext_cuda


def step() -> tuple[torch.Tensor, ...]:
    """qkv, norms, angles, caches and slots of five tokens."""
    angles = draw(5, 8)
    caches = torch.zeros(2, 4, 2, 4, 16)
    return draw(5, 8 * 16), draw(16), draw(16, seed=1), angles.cos(), angles.sin(), caches[0], caches[1], torch.arange(5)


def test_rows_are_good_operations(shim: HostBackend) -> None:
    x, weight = draw(3, 64), draw(64, seed=1)
    torch.library.opcheck(OPS.rms_norm.default, (x, weight, 1e-6), test_utils=CHECKS)
    torch.library.opcheck(OPS.add_rms_norm.default, (x, x + 1, weight, 1e-6), test_utils=CHECKS)
    torch.library.opcheck(OPS.gate_and_mul.default, (x, "silu"), test_utils=CHECKS)
    torch.library.opcheck(OPS.embedding_rows.default, (x, torch.tensor([2, 0, 5]), 0), test_utils=CHECKS)
    qkv, q_norm, k_norm, *others = step()
    torch.library.opcheck(OPS.rotary_kv_write.default, (qkv, q_norm, k_norm, 1e-6, *others), test_utils=CHECKS)


def test_sampling_is_a_good_operation(shim: HostBackend) -> None:
    logits, ones, counts = draw(3, 40), torch.ones(3), torch.arange(3)
    columns = (ones, counts, ones * 0.9, ones * 0, counts, counts)
    torch.library.opcheck(OPS.sample_rows.default, (logits, *columns, 64), test_utils=CHECKS)
    penalties = (counts, ones * 1.5, ones, ones, logits > 0, (logits > 1).int())
    torch.library.opcheck(OPS.penalise.default, (logits.clone(), *penalties), test_utils=CHECKS)
    again = logits.clone()
    operations.penalise(again, *penalties)
    assert not torch.equal(again, logits)
    assert torch.equal(operations.sample_rows(again, ones * 0, *columns[1:]), again.argmax(-1))


def attention_arguments() -> tuple[object, ...]:
    sequences = make_sequences([300, 20], Shape(4, 2, 16, 16), torch.float32)
    places = torch.zeros(2, 19, dtype=torch.int32)
    for row, blocks in enumerate(sequences.blocks):
        places[row, : len(blocks)] = torch.tensor(blocks)
    starts, contexts = np.array([0, 1, 21]), np.array([300, 20])
    query = torch.cat((sequences.query[0][-1:], sequences.query[1]))
    return query, sequences.caches, starts, contexts, places


def test_attention_is_a_good_operation(shim: HostBackend) -> None:
    query, caches, starts, contexts, places = attention_arguments()
    plan = operations.attention_metadata(starts, contexts, places, 16, 2).plan(4, 16, 0)
    arguments = (query, *caches, places, list(plan[:7]), plan.slot_count, plan.narrow_is_partial, 0.25, 0, 0.0)
    torch.library.opcheck(OPS.paged_attention.default, arguments, test_utils=CHECKS)


def test_the_tables_functions_agree_with_the_references(shim: HostBackend) -> None:
    """Through the contracts, as the table puts them before every row."""
    functions = {
        function.__name__: checked(getattr(contracts, f"check_{function.__name__}"), function)
        for function in operations.FUNCTIONS
    }
    assert set(functions) <= set(Operations._fields)
    x, weight = draw(3, 64), draw(64, seed=1)
    close = {"rtol": 2e-6, "atol": 2e-6}
    assert torch.allclose(functions["rms_norm"](x, weight, 1e-6), references.rms_norm(x, weight, 1e-6), **close)
    for found, expected in zip(
        functions["add_rms_norm"](x, x, weight, 1e-6), references.add_rms_norm(x, x, weight, 1e-6), strict=True
    ):
        assert torch.allclose(found, expected, **close)
    assert torch.equal(functions["embedding_rows"](x, torch.tensor([1, 7]), 0), references.embedding_rows(x, torch.tensor([1, 7]), 0))
    wide = draw(12, 64, seed=4)
    for gate in contracts.ACTIVATIONS:
        expected_product = products.gated_linear(x, wide, None, gate)
        assert torch.allclose(functions["gated_linear"](x, wide, None, gate), expected_product, rtol=2e-6, atol=1e-5)
    found, expected = step(), step()
    for arguments, rotary in ((found, functions["rotary_kv_write"]), (expected, references.rotary_kv_write)):
        query = rotary(arguments[0].clone(), None, None, 1e-6, *arguments[3:])
        arguments[0].view(5, -1)[:, : query.numel() // 5] = query.reshape(5, -1)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    query, caches, starts, contexts, places = attention_arguments()
    results = [
        attend(query, *caches.nan_to_num(0.0), make(starts, contexts, places, 16, 2, (0, 30)), 0.25, window, 3.0)
        for make, attend in (
            (functions["attention_metadata"], functions["paged_attention"]),
            (plain_attention.attention_metadata, plain_attention.paged_attention),
        )
        for window in (0, 30)
    ]
    assert torch.allclose(results[0], results[2], **close) and torch.allclose(results[1], results[3], **close)


def test_what_no_kernel_was_written_for_is_the_references(shim: HostBackend) -> None:
    query, caches, starts, contexts, places = attention_arguments()
    metadata = operations.attention_metadata(starts, contexts, places, 16, 2)
    mixed = operations.paged_attention(query.half(), *caches.nan_to_num(0.0), metadata, 0.25)
    assert torch.equal(mixed, plain_attention.paged_attention(query.half(), *caches.nan_to_num(0.0), metadata.plain(), 0.25))
    integers = torch.arange(6).view(3, 2)
    assert operations.embedding_rows(integers, torch.tensor([2]), 0).tolist() == [[4, 5]]


def test_the_table_has_them_where_they_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.backends, "is_usable", lambda: True)
    assert {entry.row.operation for entry in table.cuda_entries()} == {f.__name__ for f in operations.FUNCTIONS}
    assert {entry.row.device_type for entry in table.cuda_entries()} == {"cuda"}
    monkeypatch.setattr(table.backends, "is_usable", lambda: False)
    assert table.cuda_entries() == []


def test_a_launch_takes_only_what_says_how_wide_it_is() -> None:
    from vnext.kernels.cuda.arguments import Arguments

    with pytest.raises(TypeError, match="not int"):
        Arguments([3])
