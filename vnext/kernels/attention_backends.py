"""Attention backends of a GPU: the implementations of attention and their capabilities. The values of --attention.

A backend is a row here and a module with `attention_metadata` and `paged_attention`, with the signatures of
paged_attention.py, and `why_not(dtype, head_dim)`: why it cannot serve such a model here, "" where it can. Settings import this
file, so it imports a backend's module only on use.
"""

from __future__ import annotations

from typing import NamedTuple


class AttentionBackend(NamedTuple):
    """`module`: "" for the operations of table.py. `can_capture`: graphs can hold a whole decode step. `shares_prefix`: it reads
    the first blocks that all rows share once for all rows. `invariant`: a row's bits do not depend on its batch. `reads_int8`: it
    reads caches of int8 (kernels/mxint8.py)."""

    name: str
    module: str
    can_capture: bool
    shares_prefix: bool
    invariant: bool
    reads_int8: bool


ATTENTION_BACKENDS = {
    each.name: each
    for each in (
        AttentionBackend("auto", "", can_capture=True, shares_prefix=True, invariant=True, reads_int8=True),
        AttentionBackend(
            "flashinfer", "vnext.kernels.cuda.flashinfer", can_capture=False, shares_prefix=False, invariant=False, reads_int8=False
        ),
    )
}
"""By name; the first is the default."""
