"""Homes: which server has stored a response of the Responses API.

A response is stored by the server that computed it, under an id that nobody can guess. The router remembers the ids that it saw;
of others, as after a restart, it asks one server after the other. A stream that went on elsewhere is stored there under another
id, which takes the place of the client's in requests. Mutable.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

from vnext.gateway.asked import Asked
from vnext.gateway.backend import Backend
from vnext.gateway.continuing import Shown, ShownResponse

KNOWN_MAX = 2**16
BEGINNING_BYTES = 512
"""Of an answer, in which its id stands."""
PREFIX = "/v1/responses/"
_ID = re.compile(rb'"id":\s?"(resp_\w+)"')


class Home(NamedTuple):
    """Where a response is stored, and under which id."""

    backend: Backend
    id: str


class Homes:
    """See the module."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def of(self, path: str, asked: Asked) -> Backend | None:
        """The server that has the response which a request is about, None if that is not known."""
        home = self._homes.get(_id_in(path, asked))
        return home.backend if home else None

    def learn(self, backend: Backend, answer: bytes) -> None:
        """Take in an answer, or its beginning."""
        if found := _ID.search(answer[:BEGINNING_BYTES]):
            id_ = found[1].decode()
            self._put(id_, Home(backend, id_))

    def rename(self, backend: Backend, shown: Shown) -> None:
        """A stream has ended at a server that went on with it: the client knows its response by the first one's id."""
        for id_, known in shown.names.items() if isinstance(shown, ShownResponse) else ():
            if known.startswith("resp_"):
                self._put(known, Home(backend, id_))

    def renamed(self, backend: Backend, path: str, body: bytes, previous: str) -> tuple[str, bytes]:
        """Path and body of a request with the id that the server itself gave."""
        known = previous or path.removeprefix(PREFIX).split("/")[0].split("?")[0]
        home = self._homes.get(known)
        if home is None or home.id == known or home.backend is not backend:
            return path, body
        return path.replace(known, home.id), body.replace(known.encode(), home.id.encode())

    @staticmethod
    def is_elsewhere(path: str, asked: Asked, status: int) -> bool:
        """Whether an answer may mean that another server has the response."""
        return status == 404 if path.startswith(PREFIX) else status == 400 and bool(asked.previous)

    def _put(self, id_: str, home: Home) -> None:
        self._homes[id_] = home
        self._homes.move_to_end(id_)
        if len(self._homes) > KNOWN_MAX:
            self._homes.popitem(last=False)


def _id_in(path: str, asked: Asked) -> str:
    return asked.previous or (path.removeprefix(PREFIX).split("/")[0] if path.startswith(PREFIX) else "")
