"""The receivers: choose, for one rank, the transport by which the blocks, or the vectors of inputs, of a ticket come.

Shared memory where the ticket's folder is on this host, TCP otherwise. An address that has just failed is not tried again at once,
so that the requests behind it need not wait for it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

from vnext.runtime.hosts.handover.source import OTHER_PAGES, BlockSource, HandoverFailed
from vnext.runtime.hosts.handover.tcp import TcpSource
from vnext.runtime.hosts.handover.tickets import decode_ticket

RETRY_S = 5.0


class Pages(BlockSource, Protocol):
    """The folder of one rank's pages, and their format (vnext/runtime/hosts/handover/page_files.py)."""

    identity: bytes

    def is_right(self, name: bytes, buffer: bytes | bytearray | memoryview) -> bool: ...


class Peers:
    """The addresses at which other engines serve. Mutable; one thread uses it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._failed_s: dict[str, float] = {}  # until when an address is not tried again

    def source(self, address: str, identity: bytes) -> TcpSource:
        """What an address serves of an identity. Raises HandoverFailed."""
        if time.monotonic() < self._failed_s.get(address, 0.0):
            raise HandoverFailed(f"nothing comes from {address}, which has just failed")
        return TcpSource(address, self._secret, identity, lambda: self._note(address))

    def _note(self, address: str) -> None:
        now_s = time.monotonic()
        recent = {each: end_s for each, end_s in self._failed_s.items() if end_s > now_s}
        self._failed_s = recent | {address: now_s + RETRY_S}


class Receiver:
    """Mutable; one thread uses it. `pages_at` gives the pages of this rank in a folder; `secret` as in tickets.py."""

    def __init__(self, rank: int, secret: bytes, pages_at: Callable[[str], Pages]) -> None:
        self._rank, self._secret, self._pages_at, self._peers = rank, secret, pages_at, Peers(secret)

    def source(self, text: str) -> tuple[BlockSource, Pages]:
        """Where the blocks of a ticket are, and their format. Raises HandoverFailed."""
        ticket = decode_ticket(text, self._secret)
        pages = self._pages_at(ticket.folder)
        if ticket.folder and Path(ticket.folder).is_dir():
            return pages, pages
        if not ticket.addresses:
            raise HandoverFailed(
                "blocks are in the memory of another host, which serves none: give prefill engines a --handover-address"
            )
        if self._rank >= len(ticket.addresses):
            raise HandoverFailed(f"no blocks come from {ticket.addresses[0]}: {OTHER_PAGES}")
        return self._peers.source(ticket.addresses[self._rank], pages.identity), pages


class VectorReceiver:
    """The files of vectors of one identity, which engines that encode have. Mutable; one thread uses it."""

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._secret, self._identity, self._peers = secret, identity, Peers(secret)

    def files(self, text: str, digests: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """(digest, file) of those inputs whose vectors a ticket's engine has, as far as they come. Raises HandoverFailed."""
        ticket = decode_ticket(text, self._secret)
        here = {each: path for each in digests if ticket.folder and (path := Path(ticket.folder) / each.hex()).is_file()}
        for digest, path in here.items():
            with suppress(OSError):  # it has just left
                yield digest, path.read_bytes()
        if ticket.addresses and (elsewhere := [each for each in digests if each not in here]):
            with closing(self._peers.source(ticket.addresses[0], self._identity)) as source:
                source.ask(elsewhere)
                for digest in elsewhere:
                    yield digest, source.next()
