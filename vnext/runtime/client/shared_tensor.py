"""Where a tensor lies in memory that another program shares with an engine's client: what tensor_file.py reads."""

from __future__ import annotations

import msgspec


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a tensor lies: `offset` bytes into the POSIX shared memory named `segment`, dense. `dtype` is torch's name for it."""

    name: str
    dtype: str
    shape: list[int]
    segment: str
    offset: int = 0
