"""Tickets: where the blocks of a prompt are, as text that a client carries from one engine to another.

A ticket names no blocks: the engine that gets it knows their names from the prompt, and has no use for others. One that passes
through a client of another process is sealed with the secret that both engines' hosts share, so that nobody else can make ranks
connect somewhere.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

import msgspec

from vnext.runtime.hosts.handover.source import HandoverFailed

SEAL_BYTES = 16
TICKET_BYTES_MAX = 4096


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """`folder`: in shared memory, "" for none. `addresses` (host:port) of the ranks, in their order, () for none."""

    folder: str = ""
    addresses: tuple[str, ...] = ()
    seal: str = ""


def encode_ticket(ticket: Ticket, secret: bytes) -> str:
    """The ticket as JSON, sealed with the secret, b"" for engines of one server."""
    return msgspec.json.encode(msgspec.structs.replace(ticket, seal=_seal(ticket, secret))).decode()


def decode_ticket(text: str, secret: bytes) -> Ticket:
    """The inverse. Raises HandoverFailed."""
    try:
        ticket = msgspec.json.decode(text[:TICKET_BYTES_MAX], type=Ticket)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HandoverFailed(f"a hand-over's ticket cannot be read ({error})") from error
    if not hmac.compare_digest(ticket.seal.encode(), _seal(ticket, secret).encode()):
        remedy = "give --cluster-secret-file the same contents on all hosts"
        raise HandoverFailed(f"a hand-over's ticket is of an engine with another secret: {remedy}")
    return ticket


def _seal(ticket: Ticket, secret: bytes) -> str:
    text = msgspec.json.encode((ticket.folder, ticket.addresses))
    return blake2b(text, key=secret[:64], person=b"vnext ticket", digest_size=SEAL_BYTES).hexdigest() if secret else ""
