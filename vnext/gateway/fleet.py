"""Fleet: the servers behind the router. Owns their places, which of them a request goes to, and what they serve together.

A place stays with its server for as long as it is there, so that the policies, which know places, keep a conversation where it
is; a server that is added takes the first free one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from vnext.gateway.asked import Asked
from vnext.gateway.backend import Backend
from vnext.gateway.decision_log import DecisionLog
from vnext.gateway.tokens import Known
from vnext.routing.decisions import key_digest
from vnext.routing.policies import HIT_WEIGHT, Arriving, Candidate, route
from vnext.server.context.errors import ModelUnknown

_ABSENT = Candidate(hit_tokens=0, waiting_tokens=0, running=0, waiting=0, free_pages=0, page_count=0, is_ready=False)

log = logging.getLogger("vnext.routing")


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
        """No decision follows."""
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
            for name in each.identity.models if each.identity.fingerprint else ():
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
