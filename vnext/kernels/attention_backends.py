"""Attention backends of a GPU: the implementations of attention and their capabilities. The values of --attention.

A backend is a row here and a module with `attention_metadata` and `paged_attention`, with the signatures of
paged_attention.py, and `why_not(dtype, head_dim)`: why it cannot serve such a model here, "" where it can. Settings import this
file, so it imports a backend's module only on use. `auto` is our kernel, with another backend for long prompts where a record
says so.
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
        AttentionBackend("vnext", "", can_capture=True, shares_prefix=True, invariant=True, reads_int8=True),
        AttentionBackend(
            "flex", "vnext.kernels.cuda.flex", can_capture=True, shares_prefix=True, invariant=False, reads_int8=False
        ),
        AttentionBackend(
            "flashinfer", "vnext.kernels.cuda.flashinfer", can_capture=False, shares_prefix=False, invariant=False, reads_int8=False
        ),
    )
}
"""By name; the first is the default."""
LONG_PROMPTS = {(9, 0): "flex"}
"""Which backend `auto` takes for long prompts, by a device's compute capability: perf/records/2026-11-26-gpu-*.json have it 1.9
times as fast as our kernel at 4,096 tokens on an H200 and an H100. Not with --deterministic: bits depend on how a prompt is cut."""
