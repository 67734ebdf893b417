"""The selection table is complete, and its doors refuse what a contract excludes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite, Router
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import compiled, operations as cuda_operations
from vnext.kernels.table import DEVICE_TYPES, Operations, choose, cuda_door, operations, rows


def test_every_operation_has_a_row_for_every_device() -> None:
    found = {(row.operation, row.device_type) for row in rows()}
    assert found == {(name, device) for name in Operations._fields for device in DEVICE_TYPES}
    assert operations("cpu").linear is choose("linear", "cpu")


def test_an_unknown_operation_or_device_is_named() -> None:
    with pytest.raises(ContractError, match="no implementation of 'linear' on 'tpu'; there are: .*linear on cpu"):
        choose("linear", "tpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CACHE = zeros(4, 2, 16, 8)
METADATA = choose("attention_metadata", "cpu")(
    AttentionStep(np.array([0, 3]), np.array([3]), torch.zeros(1, 1, dtype=torch.int32), 16, 2)
)


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def turned(**changes: Any) -> tuple[Any, ...]:
    """Arguments of rotary_kv_write, of which some are changed."""
    plain = dict(
        qkv=zeros(3, 64),
        q_norm=None,
        k_norm=None,
        eps=1e-5,
        cosine=zeros(3, 4),
        sine=zeros(3, 4),
        key_cache=CACHE,
        value_cache=CACHE,
        slots=zeros(3).long(),
    )
    first, *fields = {**plain, **changes}.values()
    return first, RotaryWrite(*fields)


def attended(query: torch.Tensor, *fields: Any) -> tuple[Any, ...]:
    return query, AttentionCall(*fields)


TABLE = zeros(2, 3, dtype=torch.int32)
SHARES, IDS = zeros(3, 2), zeros(3, 2).long()
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("rms_norm", (zeros(3, 8), zeros(9), 1e-5), r"weight must have the shape \[8\] but has \[9\]"),
    ("rms_norm", (zeros(3, 8, dtype=torch.int64), zeros(8), 1e-5), "x must be torch.float32 or .* but is torch.int64"),
    ("rms_norm", (zeros(8, 3).t(), zeros(8), 1e-5), "the last dimension of x must be dense but has the stride 3"),
    ("rms_norm", (zeros(3, 8), zeros(8), 0.0), "eps must be above 0"),
    ("add_rms_norm", (zeros(3, 8), zeros(2, 8), zeros(8), 1e-5), r"residual must have the shape \[3, 8\]"),
    ("rms_norm", (zeros(3, 8), zeros(8, dtype=torch.bfloat16), 1e-5), "weight must be torch.float32 or torch.float32"),
    ("layer_norm", (zeros(3, 8), zeros(8), zeros(7), 1e-5), r"bias must have the shape \[8\]"),
    ("activate", (zeros(8), None, None, "gelu"), r"x must have the shape \[any, any\]"),
    ("activate", (zeros(2, 8), None, None, "silu"), "'silu' is not known; there are: gelu_tanh, gelu, gated_gelu, relu2, xielu"),
    ("activate", (zeros(2, 8), zeros(1), None, "xielu"), "slopes above and below are those of xielu"),
    ("activate", (zeros(2, 8), zeros(1), zeros(1), "gelu"), "slopes above and below are those of xielu"),
    ("pack_weight", (zeros(8, 3).t(),), "weight must be contiguous"),
    ("pack_experts", (zeros(8, 3), ""), r"weights must have the shape \[any, any, any\]"),
    ("linear", (zeros(3, 8), zeros(5, 7), None), r"weight must have the shape \[any, 8\] but has \[5, 7\]"),
    ("linear", (zeros(3, 8), zeros(5, 8).bfloat16(), None), "weight must be torch.float32 but is torch.bfloat16"),
    ("linear", (zeros(3, 8), zeros(5, 8), zeros(4)), r"bias must have the shape \[5\]"),
    ("gated_linear", (zeros(3, 8), zeros(5, 8), None, "silu"), "an even height, but is 5 high"),
    ("gated_linear", (zeros(3, 8), zeros(6, 8), None, "relu"), "'relu' is not known; there are: silu, gelu_tanh"),
    ("logits", (zeros(3, 8), zeros(5, 9)), r"weight must have the shape \[any, 8\]"),
    ("route", (zeros(3, 8), Router(9, True)), "9 experts cannot be chosen out of 8"),
    ("route", (zeros(3, 8), Router(2, True, groups=3)), "8 experts do not have 3 groups of one size, of which 1 are kept"),
    ("route", (zeros(3, 8), Router(5, True, groups=2)), "groups of 4 experts are too small for 5 experts a token"),
    ("route", (zeros(3, 8), Router(2, True), zeros(7)), r"bias must have the shape \[8\]"),
    ("experts", (zeros(3, 8), SHARES, IDS, zeros(4, 6, 8), zeros(4, 8, 6), "silu"), r"down must have .* \[4, 8, 3\]"),
    ("experts", (zeros(3, 8), SHARES, IDS[:2], zeros(4, 6, 8), zeros(4, 8, 3), "silu"), "ids must have the shape"),
    ("head_products", (zeros(3, 4, 8), zeros(4, 5, 7)), r"weight must have the shape \[4, any, 8\]"),
    ("head_products", (zeros(3, 32), zeros(4, 5, 8)), r"x must have the shape \[any, any, any\]"),
    ("rotary_kv_write", turned(qkv=zeros(3, 72)), "qkv is 72 wide, which is no query, key and value of 2"),
    ("rotary_kv_write", turned(qkv=zeros(3, 32)), "qkv is 32 wide"),
    ("rotary_kv_write", turned(q_norm=zeros(9)), r"q_norm must have the shape \[8\]"),
    ("rotary_kv_write", turned(k_norm=zeros(8), eps=0.0), "eps must be above 0"),
    ("rotary_kv_write", turned(sine=None), "cosine and sine come together"),
    ("rotary_kv_write", turned(sine=zeros(3, 8)), r"sine must have the shape \[3, 4\]"),
    ("rotary_kv_write", turned(cosine=zeros(3, 5), sine=zeros(3, 5)), "5 angles turn more than a head of 8 has"),
    ("rotary_kv_write", turned(value_cache=CACHE.transpose(1, 2)), "value_cache"),
    ("rotary_kv_write", turned(slots=zeros(3).int()), "slots must be torch.int64"),
    ("attention_metadata", (AttentionStep(integers(0, 1), integers(1, 1), TABLE, 16, 2),), "query_starts must have 3 entries"),
    ("attention_metadata", (AttentionStep(integers(0, 2, 1), integers(2, 1), TABLE, 16, 2),), "query_starts must not fall"),
    ("attention_metadata", (AttentionStep(integers(0, 2, 3), integers(1, 1), TABLE, 16, 2),), "count the tokens of this step too"),
    ("attention_metadata", (AttentionStep(integers(0, 2, 3), integers(49, 1), TABLE, 16, 2),), "a context of 49 tokens needs more"),
    ("paged_attention", attended(zeros(3, 3, 8), CACHE, CACHE, METADATA, 1.0), "3 query heads cannot share 2"),
    ("paged_attention", attended(zeros(3, 4, 4), CACHE, CACHE, METADATA, 1.0), "query must have the shape"),
    ("paged_attention", attended(zeros(3, 4, 8), CACHE[:, :1].clone(), CACHE[:, :1].clone(), METADATA, 1.0), "metadata was"),
    ("paged_attention", attended(zeros(3, 4, 8), CACHE, CACHE, METADATA, 0.0), "scale must be above 0"),
    ("paged_attention", attended(zeros(3, 4, 8), CACHE, CACHE, METADATA, 1.0, 0, -1.0), "softcap not below it"),
    ("paged_attention", attended(zeros(3, 4, 8), CACHE, CACHE, METADATA, 1.0, 0, 0.0, 1.0, 1.0, zeros(3)), r"sinks must .* \[4\]"),
    ("paged_attention", attended(zeros(3, 4, 8), CACHE, CACHE, METADATA, 1.0, 5), r"made for the windows \(0,\) but .* is 5"),
    ("attention_metadata", (AttentionStep(integers(0, 1), integers(1), TABLE[:1], 16, 2, ()),), "windows must be at least one number"),
    ("attention_metadata", (AttentionStep(integers(0, 1), integers(1), TABLE[:1], 16, 2, (0,), 4),), "4 shared blocks do not stand in"),
    ("paged_attention", attended(zeros(3, 4, 8), CACHE, CACHE, METADATA, 1.0, 0, 0.0, 2.0), "float32 has no scales but they are 2.0"),
    ("rotary_kv_write", turned(key_scale=1.0, value_scale=0.0), "scales of keys and values must be above 0"),
    ("write_spans", (TABLE.t(), zeros(1), zeros(1), zeros(2), zeros(1)), "target must be contiguous"),
]


@pytest.mark.parametrize(("operation", "arguments", "message"), REFUSED)
def test_the_door_refuses(operation: str, arguments: tuple[Any, ...], message: str) -> None:
    function: Callable[..., Any] = choose(operation, "cpu")
    with pytest.raises(ContractError, match=message):
        function(*arguments)


@pytest.mark.skipif(not compiled.is_built(), reason=compiled.describe())
@pytest.mark.parametrize(("operation", "arguments", "message"), [case for case in REFUSED if case[0] in compiled.OPERATIONS])
def test_operations_that_look_for_themselves_refuse_the_same(operation: str, arguments: tuple[Any, ...], message: str) -> None:
    """No launch is come to: there is no launch function."""
    door = cuda_door(getattr(cuda_operations, operation), True)
    with compiled.serving("cpu", compiled.Launcher(1, 0, str)), pytest.raises(ContractError, match=message) as caught:
        door(*arguments)
    assert operation == "paged_attention" or "asks for" in str(caught.value.__context__), "refused by the operation first"
