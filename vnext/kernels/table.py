"""The selection table: which implementation serves an operation on a kind of device.

Chooses by the backends of `backends.py`. Owns no arithmetic; puts the operation's contract in front of each implementation.
References run on every device that torch supports, so each operation has a row for each kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vnext.kernels import batch_index, contracts, paged_attention, products, recurrence, references, thin, thin_tiles
from vnext.kernels.backends import BACKENDS, DEVICE_TYPES
from vnext.kernels.calls import ConvolutionCall, RecurrenceCall
from vnext.kernels.cpu import operations as cpu_operations
from vnext.kernels.cuda import compiled, operations as cuda_operations


class Row(NamedTuple):
    """One line of the table, as `vnext doctor` prints it."""

    operation: str
    device_type: str
    implementation: str
    summary: str


class Entry(NamedTuple):
    """A row with its checked function."""

    row: Row
    function: Callable[..., Any]


class Operations(NamedTuple):
    """All operations for one kind of device. Signatures are those of the references."""

    attention_metadata: Callable[..., Any]
    paged_attention: Callable[..., torch.Tensor]
    rotary_kv_write: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    layer_norm: Callable[..., torch.Tensor]
    activate: Callable[..., torch.Tensor]
    gate_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    soft_cap: Callable[..., torch.Tensor]
    pack_weight: Callable[..., Any]
    pack_gated_weight: Callable[..., Any]
    pack_codes: Callable[..., object]
    linear: Callable[..., torch.Tensor]
    sums: Callable[..., torch.Tensor]
    row_linear: Callable[..., torch.Tensor]
    gated_linear: Callable[..., torch.Tensor]
    logits: Callable[..., torch.Tensor]
    pack_experts: Callable[..., Any]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    experts: Callable[..., torch.Tensor]
    head_products: Callable[[torch.Tensor, Any], torch.Tensor]
    embedding_rows: Callable[..., torch.Tensor]
    add_thin: Callable[..., torch.Tensor]
    add_tiled: Callable[..., torch.Tensor]
    write_spans: Callable[..., None]
    index_tokens: Callable[..., None]
    place_tokens: Callable[..., None]
    short_convolution: Callable[[torch.Tensor, ConvolutionCall], torch.Tensor]
    recur: Callable[[torch.Tensor, RecurrenceCall], torch.Tensor]


def checked(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its contract check in front; both take the same positional arguments."""

    @wraps(function)
    def door(*arguments: Any) -> Any:
        check(*arguments)
        return function(*arguments)

    return door


def explained(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which itself refuses the arguments that its contract excludes; the contract then gives the error."""

    @wraps(function)
    def door(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError:
            check(*arguments)
            raise

    return door


def reference_entries() -> list[Entry]:
    """The references, on every kind of device."""
    pairs = (
        (contracts.check_attention_metadata, paged_attention.attention_metadata),
        (contracts.check_paged_attention, paged_attention.paged_attention),
        (contracts.check_rotary_kv_write, references.rotary_kv_write),
        (contracts.check_rms_norm, references.rms_norm),
        (contracts.check_add_rms_norm, references.add_rms_norm),
        (contracts.check_layer_norm, references.layer_norm),
        (contracts.check_activate, references.activate),
        (contracts.check_gate_by, references.gate_by),
        (contracts.check_soft_cap, references.soft_cap),
        (contracts.check_pack_weight, products.pack_weight),
        (contracts.check_pack_gated_weight, products.pack_gated_weight),
        (contracts.check_pack_codes, products.pack_codes),
        (contracts.check_linear, products.linear),
        (contracts.check_sums, products.sums),
        (contracts.check_row_linear, products.row_linear),
        (contracts.check_gated_linear, products.gated_linear),
        (contracts.check_logits, products.logits),
        (contracts.check_pack_experts, products.pack_experts),
        (contracts.check_route, products.route),
        (contracts.check_experts, products.experts),
        (contracts.check_head_products, products.head_products),
        (contracts.check_embedding_rows, references.embedding_rows),
        (contracts.check_add_thin, thin.add_thin),
        (contracts.check_add_tiled, thin_tiles.add_tiled),
        (recurrence.check_short_convolution, recurrence.short_convolution),
        (recurrence.check_recur, recurrence.recur),
    )
    looked_at = [(function.__name__, checked(check, function)) for check, function in pairs]
    looked_at += batch_index.plain_batch_operations()._asdict().items()  # these have their contracts inside
    return [
        Entry(Row(name, device_type, "reference", "plain torch"), function)
        for name, function in looked_at
        for device_type in DEVICE_TYPES
    ]


ONCE = ("attention_metadata", "pack_weight", "pack_gated_weight", "pack_codes", "pack_experts")
"""Called once a step or once a weight: their contracts cost nothing. The others look at their arguments themselves."""


def compiled_entries() -> list[Entry]:
    return [
        Entry(
            Row(function.__name__, "cpu", "compiled", cpu_operations.describe()),
            checked(getattr(contracts, f"check_{function.__name__}"), function) if function.__name__ in ONCE else function,
        )
        for function in cpu_operations.FUNCTIONS
    ]


def cuda_entries() -> list[Entry]:
    looking = compiled.OPERATIONS if compiled.serves("cuda") else ()
    return [
        Entry(Row(function.__name__, "cuda", "cuda", cuda_operations.SUMMARY), cuda_door(function, function.__name__ in looking))
        for function in cuda_operations.FUNCTIONS
    ]


def cuda_door(function: Callable[..., Any], is_looking: bool) -> Callable[..., Any]:
    """The function behind its contract, or, where it looks at its arguments itself, before it."""
    check = getattr(contracts, f"check_{function.__name__}")
    return explained(check, function) if is_looking else checked(check, function)


def numba_entries() -> list[Entry]:
    """The batch's index work on a GPU; its kernels are loaded when one is asked for."""

    def later(name: str) -> Callable[..., None]:
        @wraps(getattr(batch_index, name))
        def door(*arguments: Any) -> None:
            getattr(batch_index.batch_operations("cuda"), name)(*arguments)

        return door

    return [Entry(Row(name, "cuda", "numba", "batch_numba.py"), later(name)) for name in batch_index.BatchOperations._fields]


ENTRIES = {"reference": reference_entries, "compiled": compiled_entries, "cuda": cuda_entries, "numba": numba_entries}
"""By backend."""


def make_table() -> Mapping[tuple[str, str], Entry]:
    """Rows of all backends that can be used here; a later backend's go before those of an earlier one."""
    found = [entry for name, backend in BACKENDS.items() if not backend.why_not() for entry in ENTRIES[name]()]
    return MappingProxyType({(entry.row.operation, entry.row.device_type): entry for entry in found})


TABLE = make_table()


def choose(operation: str, device_type: str) -> Callable[..., Any]:
    """The implementation of an operation on a kind of device ("cpu", "cuda"). Raises ContractError if there is none."""
    entry = TABLE.get((operation, device_type))
    if entry is None:
        known = ", ".join(f"{name} on {device}" for name, device in TABLE)
        raise contracts.ContractError(f"no implementation of {operation!r} on {device_type!r}; there are: {known}")
    return entry.function


_substitutes: dict[int, Operations] = {}  # by thread; torch 2.11 compiles no forward that reads a ContextVar


def operations(device_type: str) -> Operations:
    """Every operation for one kind of device, or what `substituted` put in their place."""
    if not _substitutes:
        return chosen_operations(device_type)
    return _substitutes.get(get_ident()) or chosen_operations(device_type)


_chosen: dict[str, Operations] = {}  # by kind of device


def chosen_operations(device_type: str) -> Operations:
    """The table's own choice, whatever was substituted."""
    if device_type not in _chosen:
        _chosen[device_type] = Operations(*(choose(name, device_type) for name in Operations._fields))
    return _chosen[device_type]


@contextmanager
def substituted(others: Operations) -> Iterator[None]:
    """Make `operations` return `others` in this thread during the block, to observe a model's calls or to run it on other
    implementations. Packed weights work only with the implementation that packed them: load and run under the same one."""
    thread = get_ident()
    before = _substitutes.get(thread)
    _substitutes[thread] = others
    try:
        yield
    finally:
        del _substitutes[thread]
        if before is not None:
            _substitutes[thread] = before


def plain_operations() -> Operations:
    """The references alone, behind their contracts: the oracle of every other row. They run on every device."""
    plain = {entry.row.operation: entry.function for entry in reference_entries() if entry.row.device_type == "cpu"}
    return Operations(*(plain[name] for name in Operations._fields))


def rows() -> tuple[Row, ...]:
    """The whole table, for people."""
    return tuple(entry.row for entry in TABLE.values())
