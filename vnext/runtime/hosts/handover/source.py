"""The contract of a transport: where a rank reads the blocks of another engine's rank of the same number.

A source gives bytes and promises nothing: its reader checks that they are the block's, by the header and the checksum of a page
file (vnext/runtime/hosts/handover/page_files.py). A transport between GPUs, such as NIXL, would be one more implementation. There
is none so far: `--role` is refused on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

OTHER_PAGES = "the engines differ in what a block's bits depend on: model, version, data types, kernels, block size or ranks"


class HandoverFailed(Exception):
    """The blocks cannot be had: one sentence. The request computes them."""


class BlockSource(Protocol):
    """The blocks of one rank. One thread uses it: `ask` once, then `fetch` each name in that order, as far as wanted."""

    def ask(self, names: Sequence[bytes]) -> None:
        """These blocks will be fetched. Raises HandoverFailed."""

    def fetch(self, name: bytes, buffer: bytearray | memoryview) -> bool:
        """Put a block's file into a buffer of its size. False for one that is not there or of another size. Raises
        HandoverFailed."""

    def close(self) -> None:
        """Nothing more is fetched. Idempotent."""


PORTS = 2**16


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, the host of an IPv6 address in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= PORTS:
        raise ValueError(f"{address!r} is no address: write it as host:port")
    return host.strip("[]"), int(port)
