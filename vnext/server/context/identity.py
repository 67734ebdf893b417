"""Identity: the id of a request, the client that sent it, the ticket it came with, and the fingerprint of the system that answers
it.

A request's id is the client's X-Request-Id, or is drawn here. Every response, the log lines about the request, the answer's id
and the engine core's names of the answers contain it. A router sends a ticket with a request whose prompt another server has
computed: where ranks look for blocks, never what is in them. Only a server with the role decode and a cluster secret heeds one,
because its ranks know by the secret that a server of the cluster made it; that of vectors of inputs one with the role prefill, too.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import count

import msgspec
from aiohttp import web

from vnext.base.version import __version__
from vnext.runtime.client.engines import AnyEngineClient
from vnext.runtime.protocol.messages import EngineReady, derived_seed

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_ID_HEADER = "Request-Id"
"""The same id under the name that clients of Anthropic's API look for."""
VERSION_HEADER = "anthropic-version"
ENGINES_HEADER = "X-Vnext-Engines"
"""How many engines a server has, each with a stream of events."""
REQUEST_ID = web.RequestKey("request_id", str)
KEY_CLIENT = web.RequestKey("key_client", str)
IRRELEVANT = ("python", "threads", "cores", "token_bytes", "state_bytes", "codes", "folder")
"""Entries of the engine's environment that no token depends on. The entry "sums" says whether the number of ranks counts."""
_IS_OWN = web.RequestKey("request_id_is_own", bool)
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:/+=@-]{0,127}")  # fit for a header, a name in a log and a line of text
TICKET_HEADER, INPUTS_HEADER = "X-Vnext-Handover", "X-Vnext-Inputs"
SHOWING_PATHS = frozenset(
    f"/{path}" for path in "v1/chat/completions v1/messages v1/responses api/chat api/generate".split()
) | {"/v1/audio/transcriptions", "/v1/audio/translations"}
"""Of routes whose bodies may have images or sounds."""
CLIENTS_KNOWN = 1024
STREAMS = 2**62
"""Added to the numbers of streams that bring no seed, which are thereby no request's in an engine."""
STREAMS_MAX = 2**40
"""Of one process."""


def identify(request: web.Request, *given: str | None) -> None:
    """Set the request's id: the header's, else the first sane one of `given`, else a fresh one."""
    for each in (request.headers.get(REQUEST_ID_HEADER), *given):
        if each and _SANE.fullmatch(each):
            request[REQUEST_ID], request[_IS_OWN] = each, False
            return
    if not given:
        request[REQUEST_ID], request[_IS_OWN] = os.urandom(16).hex(), True


def answer_id(request: web.Request, kind: str) -> str:
    """An answer's own id, such as cmpl-ID. An id that the client chose gets random digits appended, because clients repeat
    ids and the engine core needs unique names."""
    unique = "" if request[_IS_OWN] else f"-{secrets.token_hex(16)}"
    return f"{kind}-{request[REQUEST_ID]}{unique}"


def api_of(path: str, headers: Mapping[str, str]) -> str:
    """Whose objects the client of a request looks for: "anthropic", by the path, or by the version for a path that its API has too;
    "ollama" or "openai"."""
    if path.startswith("/v1/messages") or (path.startswith("/v1/models") and VERSION_HEADER in headers):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def model_of(name: str | None) -> str | None:
    """A model's name without the tag that Ollama's clients add."""
    return name.removesuffix(":latest") if name else None


def client_of(request: web.Request) -> str:
    """The client whose share a request takes: its API key, where there are several or it has limits, else its address, or the
    network of an IPv6 address."""
    key: str = request.get(KEY_CLIENT, "")
    if key:
        return key
    address = request.remote or ""
    return ":".join(address.split(":")[:4]) if address.count(":") > 1 and "." not in address else address


def client_number(client: str, secret: bytes) -> int:
    """A client's number for the engine, which takes turns between numbers: equal in all processes of one server, and nothing that a
    log's reader could turn back into a key or an address."""
    digest = hashlib.blake2b(client.encode(errors="surrogateescape"), key=secret, digest_size=8).digest()
    return max(int.from_bytes(digest, "little") >> 1, 1)


class Identity:
    """What a server says of itself: the engine of `client`, since when it runs, and numbers that no other server gives. `number`:
    its own among those of one port. `secret`: that of all of them, in hexadecimal digits, "" for one of its own."""

    def __init__(self, client: AnyEngineClient, number: int, secret: str) -> None:
        self._client = client
        self.started_s = int(time.time())
        self._streams = count(STREAMS + number * STREAMS_MAX)
        self._fingerprinted = client.ready, system_fingerprint(client.ready)
        shared = bytes.fromhex(secret) or secrets.token_bytes(16)
        self.client_number = lru_cache(CLIENTS_KNOWN)(partial(client_number, secret=shared))
        """The number under which the engine knows a client (client_of)."""

    @property
    def fingerprint(self) -> str:
        """That of the present engine, computed once for each."""
        ready = self._client.ready
        if ready is not self._fingerprinted[0]:
            self._fingerprinted = ready, system_fingerprint(ready)
        return self._fingerprinted[1]

    def draw_seed(self) -> int:
        """That of a stream which brings none: known here, so that any server can go on with it."""
        return derived_seed(self._client.ready.root_seed, next(self._streams))


def system_fingerprint(ready: EngineReady) -> str:
    """Equal for engines that give the same tokens for the same request and seed: one version, one model's weights in one
    number type, the same kernels on the same kind of machine."""
    relevant = sorted(pair for pair in ready.environment.items() if pair[0] not in IRRELEVANT)
    ranks = None if "sums" in ready.environment else ready.world_size
    reported = (__version__, ready.model_digest, ranks, relevant)
    return "fp_" + hashlib.blake2b(msgspec.json.encode(reported), digest_size=5).hexdigest()
