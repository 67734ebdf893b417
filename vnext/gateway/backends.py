"""Backends: the servers behind the router, what is known of each, which of them a request goes to, and the record of that.

Owns the router's own counts, which stand for a server's load where the server itself shows none, and both views of its cache: the
approximate one and, of a server that can be followed, the exact one of each engine. A place stays with its server for as long as
it is there, so that the policies, which know places, keep a conversation where it is; a server that is added takes the first free
one. A server with several engines chooses among them itself, by the same rule: its candidate is that of the engine which the rule
names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vnext.base.version import __version__
from vnext.gateway.asked import Asked, Known
from vnext.routing.approximate import BYTES_PER_TOKEN, PIECE_BYTES, PrefixTree
from vnext.routing.decision_file import DecisionFile, header_of
from vnext.routing.decisions import NOBODY, Decision, key_digest
from vnext.routing.policies import DEFAULT_POLICY, HIT_WEIGHT, Arriving, Candidate, route
from vnext.routing.prompts import Prompt
from vnext.routing.view import View
from vnext.server.context.errors import ModelUnknown

INVARIANT = "yes"
"""How a vnext server's `batch_invariant` begins where its tokens do not depend on the batch."""
_ABSENT = Candidate(hit_tokens=0, waiting_tokens=0, running=0, waiting=0, free_pages=0, page_count=0, is_ready=False)

log = logging.getLogger("vnext.routing")


class EngineViews:
    """The exact views of one server, as one replica to the policies. `views` has one for each engine, at its number. A request is
    on its way to the engine that the rule names until any of them has it. Mutable."""

    def __init__(self, count: int = 1) -> None:
        self.views: Sequence[View] = [View() for _ in range(count)]
        if count > 1:
            for number, view in enumerate(self.views):
                view.heard = partial(self._arrived, number)

    @property
    def is_exact(self) -> bool:
        """Whether every engine's state is known."""
        return all(view.is_exact for view in self.views)

    def begin_again(self) -> None:
        """New streams follow."""
        for view in self.views:
            view.begin_again()

    def candidate(self, prompt: Prompt, is_ready: bool) -> Candidate:
        """What a policy may know of the server."""
        return self._chosen(prompt, is_ready)[1]

    def routed(self, name: str, prompt: Prompt) -> None:
        """As View.routed, for the engine that the server chooses, as far as one can say from here."""
        self._chosen(prompt, True)[0].routed(name, prompt)

    def done(self, name: str) -> None:
        """As View.done."""
        for view in self.views:
            view.done(name)

    def _chosen(self, prompt: Prompt, is_ready: bool) -> tuple[View, Candidate]:
        found = [view.candidate(prompt, is_ready) for view in self.views]
        if len(found) == 1:
            return self.views[0], found[0]
        arriving = Arriving(tokens=len(prompt), key=b"", sequence=0, hit_weight=HIT_WEIGHT)
        place = route(DEFAULT_POLICY, found, arriving) or 0
        return self.views[place], found[place]

    def _arrived(self, number: int, name: str) -> None:
        """The engine of this number has a request, whichever it was on its way to."""
        for other, view in enumerate(self.views):
            if other != number:
                view.arrived_elsewhere(name)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself. `models`: those it serves, as /v1/models lists them, by name. `version` is that of vnext, ""
    for another server. `fingerprint`: equal for servers that compute the same tokens, "" where tokens depend on the batch.
    `role`: a server that is "prefill" computes prompts for one that is "decode", "encode" encodes what prompts show."""

    models: dict[str, dict[str, Any]]
    version: str = ""
    fingerprint: str = ""
    role: str = "both"

    @property
    def is_vnext(self) -> bool:
        return bool(self.version)


def fingerprint_of(info: Mapping[str, Any]) -> str:
    """What a vnext server's /server_info says: that of `Identity`. Another server may answer there with anything."""
    environment = info.get("environment")
    is_same = isinstance(environment, Mapping) and str(environment.get("batch_invariant", "")).startswith(INVARIANT)
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


class DecisionsUnusable(Exception):
    """Decisions cannot be written where they should: one sentence with the remedy."""


class DecisionLog:
    """Mutable. `name` tells the routers of one folder apart."""

    def __init__(self, folder: str, name: str, policy: str, servers: Sequence[str]) -> None:
        """Raises DecisionsUnusable."""
        try:
            self.file = DecisionFile(Path(folder).expanduser(), header_of(__version__, policy, servers), name)
        except OSError as error:
            why = f"decisions cannot be written to {folder} ({error.strerror}): name another --decisions-dir"
            raise DecisionsUnusable(why) from error

    def add(self, arriving: Arriving, candidates: Sequence[Candidate], place: int | None) -> None:
        """A choice; None: no server was ready."""
        chosen, time_us = NOBODY if place is None else place, self.file.clock_us()
        self.file.write(Decision(arriving=arriving, candidates=tuple(candidates), chosen=chosen, time_us=time_us))


class NoBackend(Exception):
    """No server can take the request: one sentence."""


class BackendRefused(ValueError):
    """A URL cannot be that of a server behind this router: one sentence with the remedy."""


class Fleet:
    """See the module. Mutable."""

    def __init__(self, urls: Collection[str], policy: str) -> None:
        """Raises BackendRefused."""
        self.policy = policy
        self._places: list[Backend | None] = []
        self._sequence = 0
        self._warned: set[tuple[str, ...]] = set()
        self._decisions: DecisionLog | None = None
        self.changed = asyncio.Event()
        for url in urls:
            self.add(url)

    def __iter__(self) -> Iterator[Backend]:
        return (each for each in self._places if each is not None)

    def add(self, url: str) -> Backend:
        """A server at the first free place. Raises BackendRefused."""
        url = normal_url(url)
        if any(each.url == url for each in self):
            raise BackendRefused(f"{url} is a backend already: name each server once")
        backend = Backend(url)
        place = next((at for at, each in enumerate(self._places) if each is None), len(self._places))
        self._places[place : place + 1] = [backend]
        self._renew()
        return backend

    def remove(self, backend: Backend) -> None:
        self._places[self._places.index(backend)] = None
        self._renew()

    def record_in(self, folder: str, name: str) -> None:
        """Record every decision from now on. `name`: of this router in the folder. Raises DecisionsUnusable."""
        self._decisions = DecisionLog(folder, name, self.policy, self._urls())

    def close(self) -> None:
        if self._decisions is not None:
            self._decisions.file.close()

    def named(self, url: str) -> Backend:
        """The server of a URL. Raises BackendRefused."""
        found = next((each for each in self if each.url == normal_url(url)), None)
        if found is None:
            raise BackendRefused(f"{url[:200]} is no backend of this router: GET /router/backends lists them")
        return found

    def choose(self, asked: Asked, known: Known, may_serve: Callable[[Backend], bool]) -> Backend:
        """The server for a request, among those that are ready, have its model and fulfil a condition. Raises NoBackend,
        ModelUnknown."""
        candidates = [
            _ABSENT
            if each is None
            else each.candidate(asked, known, each.is_ready and each.serves(asked.model) and may_serve(each))
            for each in self._places
        ]
        tokens = len(known.prompt) if known.by_tokens else asked.tokens
        arriving = Arriving(tokens=tokens, key=key_digest(asked.key), sequence=self._sequence, hit_weight=HIT_WEIGHT)
        place = route(self.policy, candidates, arriving)
        if self._decisions is not None:
            self._decisions.add(arriving, candidates, place)
        self._sequence += 1
        found = None if place is None else self._places[place]
        if found is None:
            raise self._why_none(asked.model)
        return found

    def models(self) -> dict[str, dict[str, Any]]:
        """What the ready servers serve together, by name."""
        return {name: model for each in reversed(list(self)) if each.is_ready for name, model in each.identity.models.items()}

    def news(self) -> None:
        """A server's state has changed: wake who waits for one, and look whether two disagree."""
        self.changed.set()
        self.changed = asyncio.Event()
        by_model: dict[str, dict[str, str]] = {}
        for each in self:
            for name in each.identity.models if each.identity.fingerprint and each.identity.role != "encode" else ():
                by_model.setdefault(name, {}).setdefault(each.identity.fingerprint, each.url)
        differing: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, urls in by_model.items():
            differing.setdefault(tuple(sorted(urls.items())), []).append(name)
        for pairs, names in differing.items():
            if len(pairs) > 1 and (prints := tuple(fingerprint for fingerprint, _ in pairs)) not in self._warned:
                self._warned.add(prints)
                servers = " and ".join(f"{url} ({fingerprint})" for fingerprint, url in pairs)
                words = "%s serve %s with other weights or kernels: no stream of one goes on at the other"
                log.warning(words, servers, ", ".join(names))

    def _urls(self) -> list[str]:
        """By place, "" where no server is."""
        return ["" if each is None else each.url for each in self._places]

    def _renew(self) -> None:
        if self._decisions is not None:
            self._decisions.file.renew(self._urls())

    def _why_none(self, model: str) -> NoBackend | ModelUnknown:
        known = {name for each in self for name in each.identity.models}
        if model and known and model not in known:
            return ModelUnknown(f"There is no model {model[:200]!r} here: GET /v1/models lists the models.")
        what = f"serves {model!r} at this moment" if model in known and model else "is ready"
        troubles = "; ".join(f"{each.url}: {each.trouble or 'it is being drained'}" for each in self if not each.is_ready)
        log.info("no server %s%s", what, f" ({troubles})" if troubles else "")
        return NoBackend(f"No server behind this router {what}: try again later.")


def normal_url(given: str) -> str:
    """A server's URL without the path of the API. Raises BackendRefused."""
    url = given.strip() if "://" in given else f"http://{given.strip()}"
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine or parts.query or parts.fragment:
        raise BackendRefused(f"{given[:200]!r} is no URL of a server: write http://HOST:PORT")
    if "@" in parts.netloc:
        raise BackendRefused(f"the URL of {parts.hostname} holds a password: give the servers' key with --backend-api-key")
    return url
