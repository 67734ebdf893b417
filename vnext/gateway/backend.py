"""Backend: one server behind the router, what is known of it, and the requests that it has from here.

Owns the router's own counts, which stand for a server's load where the server itself shows none, and both views of its cache: the
approximate one and, of a server that can be followed, the exact one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from vnext.gateway.asked import Asked
from vnext.gateway.engines import EngineViews
from vnext.gateway.tokens import Known
from vnext.routing.approximate import BYTES_PER_TOKEN, PIECE_BYTES, PrefixTree
from vnext.routing.policies import Candidate

INVARIANT = "yes"
"""How a vnext server's `batch_invariant` begins where its tokens do not depend on the batch."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself. `models`: those it serves, as /v1/models lists them, by name. `version` is that of vnext, ""
    for another server. `fingerprint`: equal for servers that compute the same tokens, "" where tokens depend on the batch.
    `role`: a server that is "prefill" computes prompts for one that is "decode"."""

    models: dict[str, dict[str, Any]]
    version: str = ""
    fingerprint: str = ""
    role: str = "both"

    @property
    def is_vnext(self) -> bool:
        return bool(self.version)


def fingerprint_of(info: Mapping[str, Any]) -> str:
    """What a vnext server's /server_info says: that of `Identity`."""
    is_same = str((info.get("environment") or {}).get("batch_invariant", "")).startswith(INVARIANT)
    return info["system_fingerprint"] if is_same else ""


class Live:
    """One request at a server: from its sending until its end. Mutable."""

    def __init__(self, backend: Backend, waiting_tokens: int) -> None:
        self._backend, self._tokens = backend, waiting_tokens
        backend.waiting_tokens += waiting_tokens
        backend.waiting += 1
        backend.idle.clear()
        self._has_begun = False

    def begun(self) -> None:
        """The first bytes of its answer have come."""
        if not self._has_begun:
            self._has_begun = True
            self._backend.waiting_tokens -= self._tokens
            self._backend.waiting -= 1
            self._backend.running += 1

    def end(self) -> None:
        self.begun()
        self._backend.running -= 1
        if self._backend.live == 0:
            self._backend.idle.set()


class Backend:
    """See the module. `trouble`: why it gets no requests, "" if it does; `asked`: it has been looked at once; `exact`: the views of
    its engines, if it shows their events. Mutable."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.identity = Identity(models={})
        self.trouble = "it has not answered yet"
        self.is_draining = False
        self.asked, self.look_now = asyncio.Event(), asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = self.waiting = self.waiting_tokens = 0
        self.tree = PrefixTree()
        self.exact: EngineViews | None = None

    @property
    def live(self) -> int:
        """Requests that wait or run."""
        return self.running + self.waiting

    @property
    def is_ready(self) -> bool:
        return not self.trouble and not self.is_draining

    @property
    def view(self) -> str:
        """How well its cache and its queue are known."""
        return "exact" if self.is_exact else "approximate"

    @property
    def is_exact(self) -> bool:
        return self.exact is not None and self.exact.is_exact

    def serves(self, model: str) -> bool:
        """Whether it has the model; "" stands for any."""
        return not model or model in self.identity.models

    def knows_tokens(self, model: str) -> bool:
        """Whether it converts texts to the tokens of this model. An adapter's blocks have names that its digest makes."""
        return self.serves(model) and not self.identity.models.get(model, {}).get("parent")

    def failed(self, sentence: str) -> None:
        """It refuses connections or has broken one: it is out until it has answered a look, which comes at once."""
        self.trouble = sentence
        self.look_now.set()

    def candidate(self, asked: Asked, known: Known, may_serve: bool) -> Candidate:
        """What the policies are given."""
        if self.exact is not None and self.exact.is_exact:
            found = self.exact.candidate(known.prompt, may_serve)
            hits = found.hit_tokens if known.by_tokens else max(found.hit_tokens, self._hit_tokens(asked))
            return msgspec.structs.replace(found, hit_tokens=hits)
        return Candidate(
            hit_tokens=self._hit_tokens(asked),
            waiting_tokens=self.waiting_tokens,
            running=self.running,
            waiting=self.waiting,
            free_pages=0,
            page_count=0,
            is_ready=may_serve,
        )

    @contextmanager
    def serving(self, asked: Asked, known: Known, name: str) -> Iterator[Live]:
        """It has the request until the block ends. `name`: how its engine's names of the request begin."""
        live, exact = Live(self, max(0, asked.tokens - self._hit_tokens(asked))), self.exact
        self.tree.insert(asked.hashes)
        if exact is not None:
            exact.routed(name, known.prompt)
        try:
            yield live
        finally:
            live.end()
            if exact is not None:
                exact.done(name)

    def _hit_tokens(self, asked: Asked) -> int:
        return self.tree.matched(asked.hashes) * PIECE_BYTES // BYTES_PER_TOKEN
