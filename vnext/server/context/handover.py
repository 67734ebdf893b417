"""Hand-over between servers: the ticket with which a router sends a request whose prompt another server has computed.

A ticket says where ranks look for blocks, never what is in them. Only a server with the role decode and a cluster secret heeds one,
because its ranks know by the secret that a server of the cluster made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from vnext.server.settings import ServerSettings

TICKET_HEADER = "X-Vnext-Handover"
_TICKET: ContextVar[str] = ContextVar("ticket", default="")


def accept_ticket(headers: Mapping[str, str], settings: ServerSettings) -> None:
    """A request with these headers begins in this task. A ticket is ASCII; other bytes cannot be sent to the engine."""
    if settings.takes_tickets and (ticket := headers.get(TICKET_HEADER, "")).isascii() and ticket:
        _TICKET.set(ticket)


def ticket() -> str:
    """That of the request in whose task this is asked, "" for none."""
    return _TICKET.get()
