"""The selection table is complete, and its doors refuse what a contract excludes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vnext.kernels.contracts import ContractError
from vnext.kernels.table import DEVICE_TYPES, Operations, choose, operations, rows


def test_every_operation_has_a_row_for_every_device() -> None:
    found = {(row.operation, row.device_type) for row in rows()}
    assert found == {(name, device) for name in Operations._fields for device in DEVICE_TYPES}
    assert operations("cpu").rotary is choose("rotary", "cpu")


def test_an_unknown_operation_or_device_is_named() -> None:
    with pytest.raises(ContractError, match="no implementation of 'rotary' on 'tpu'; there are: .*rotary on cpu"):
        choose("rotary", "tpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CACHE = zeros(4, 2, 16, 8)
METADATA = choose("attention_metadata", "cpu")(
    np.array([0, 3]), np.array([3]), torch.zeros(1, 1, dtype=torch.int32), 16, 2
)


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


TABLE = zeros(2, 3, dtype=torch.int32)
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("rms_norm", (zeros(3, 8), zeros(9), 1e-5), r"weight must have the shape \[8\] but has \[9\]"),
    ("rms_norm", (zeros(3, 8, dtype=torch.int64), zeros(8), 1e-5), "x must be torch.float32 or .* but is torch.int64"),
    ("rms_norm", (zeros(8, 3).t(), zeros(8), 1e-5), "the last dimension of x must be dense but has the stride 3"),
    ("rms_norm", (zeros(3, 8), zeros(8), 0.0), "eps must be above 0"),
    ("add_rms_norm", (zeros(3, 8), zeros(2, 8), zeros(8), 1e-5), r"residual must have the shape \[3, 8\]"),
    ("silu_and_mul", (zeros(3, 7),), "an even width, but is 7 wide"),
    ("rotary", (zeros(3, 2, 8), zeros(3, 1, 8), zeros(3, 4), zeros(3, 8)), r"sine must have the shape \[3, 4\]"),
    ("rotary", (zeros(3, 2, 7), zeros(3, 1, 7), zeros(3, 4), zeros(3, 4)), "an even head size but it is 7"),
    ("kv_write", (zeros(3, 2, 8), zeros(3, 2, 8), CACHE, CACHE.transpose(1, 2), zeros(3).long()), "value_cache"),
    ("kv_write", (zeros(3, 2, 8), zeros(3, 2, 8), CACHE, CACHE, zeros(3).int()), "slots must be torch.int64"),
    ("kv_write", (zeros(3, 1, 8), zeros(3, 1, 8), CACHE, CACHE, zeros(3).long()), "key must have the shape"),
    ("attention_metadata", (integers(0, 1), integers(1, 1), TABLE, 16, 2), "query_starts must have 3 entries"),
    ("attention_metadata", (integers(0, 2, 1), integers(2, 1), TABLE, 16, 2), "query_starts must not fall"),
    ("attention_metadata", (integers(0, 2, 3), integers(1, 1), TABLE, 16, 2), "count the tokens of this step too"),
    ("attention_metadata", (integers(0, 2, 3), integers(49, 1), TABLE, 16, 2), "a context of 49 tokens needs more"),
    ("paged_attention", (zeros(3, 3, 8), CACHE, CACHE, METADATA, 1.0), "3 query heads cannot share 2"),
    ("paged_attention", (zeros(3, 4, 4), CACHE, CACHE, METADATA, 1.0), "query must have the shape"),
    ("paged_attention", (zeros(3, 4, 8), CACHE[:, :1].clone(), CACHE[:, :1].clone(), METADATA, 1.0), "metadata was"),
    ("paged_attention", (zeros(3, 4, 8), CACHE, CACHE, METADATA, 0.0), "scale must be above 0"),
]


@pytest.mark.parametrize(("operation", "arguments", "message"), REFUSED)
def test_the_door_refuses(operation: str, arguments: tuple[Any, ...], message: str) -> None:
    function: Callable[..., Any] = choose(operation, "cpu")
    with pytest.raises(ContractError, match=message):
        function(*arguments)
