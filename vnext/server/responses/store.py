"""Store: complete responses by id, with the items of the conversation that each belongs to, in this process's memory and in a
folder, from which the process that follows it takes them.

Owns the bound. It keeps bytes, whose number is known; the same as objects would be ten times as much. Of the tenant that has most
of them the responses asked for least recently are dropped first, so that none drops what others have within equal shares. What a
response holds of earlier ones counts again, so the bound holds whatever is dropped in between.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vnext.base.spelling import reason
from vnext.server.context.api_keys import EVERYONE, Tenant
from vnext.server.responses.bodies import Item
from vnext.server.responses.translation import PASSED_OVER

COUNT_MAX = 10_000


class Stored(msgspec.Struct, frozen=True):
    """A response as its client saw it (JSON), and the conversation that it ends (JSON): the `earlier` one, and its own
    items, of which the first `input_count` are its input. `owner`: the mark of the tenant that made it. `events`: those of its
    stream, where it may be picked up again (MessagePack), b"" for none. `ended`: False for one in progress, of which only a folder
    knows."""

    response: bytes
    earlier: bytes
    own: bytes
    input_count: int
    owner: str
    events: bytes = b""
    ended: bool = True

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.earlier) + len(self.own) + len(self.events)

    def frames(self) -> list[bytes]:
        """The events of its stream."""
        return msgspec.msgpack.decode(self.events, type=list[bytes])

    def failed(self) -> Stored:
        """The same response, whose process has ended before it."""
        fault = {"code": "server_error", "message": "The API server that made this response ended: create it again."}
        shown = msgspec.json.decode(self.response) | {"status": "failed", "error": fault}
        return msgspec.structs.replace(self, response=msgspec.json.encode(shown), ended=True)

    def own_items(self) -> tuple[Item, ...]:
        return _items.decode(self.own)

    def input(self) -> tuple[Item, ...]:
        """What the request itself sent."""
        return self.own_items()[: self.input_count]

    def conversation(self) -> tuple[Item, ...]:
        return _items.decode(self.earlier) + self.own_items()


_items = msgspec.json.Decoder(tuple[Item, ...])  # an argument may be a number beyond 64 bits, which MessagePack has not
_encode = msgspec.json.Encoder().encode


def _kept(item: Item) -> Item:
    """An item without what no chat reads: megabytes of it would cost no token, and each later request would carry them along."""
    if item.kind not in PASSED_OVER:
        return item
    return Item(type=item.type, id=item.id, status=item.status, call_id=item.call_id)


class ResponseStore:
    """Mutable; only the event loop uses it."""

    def __init__(self, bytes_max: int, path: Path | None = None) -> None:
        """0 keeps nothing. `path`: the folder, None for memory alone; what it has is kept."""
        self._bytes_max, self._folder = bytes_max, Folder(path)
        self._kept: dict[str, Stored] = {}
        self._of_owner: dict[str, dict[str, int]] = {}  # ids and sizes, those asked for last at the end
        self._of_item: dict[str, str] = {}  # a response's id by that of an item of its output
        self.size_bytes = 0
        for id_, found in self._folder.read(Stored):
            self._take(id_, found if found.ended else found.failed())

    def get(self, id_: str, tenant: Tenant = EVERYONE) -> Stored | None:
        """The response, if the tenant sees it; it becomes the one that is dropped last."""
        found = self._kept.get(id_)
        if found is None or not tenant.sees(found.owner):
            return None
        own = self._of_owner[found.owner]
        own[id_] = own.pop(id_)
        return found

    def holder(self, id_: str, tenant: Tenant = EVERYONE) -> str:
        """The id of the response which has this id, or an item of it; "" for none that the tenant sees."""
        found = (id_, self._of_item.get(id_, ""), id_.rpartition("_")[0])
        return next((each for each in found if self.get(each, tenant) is not None), "")

    def finder(self, tenant: Tenant = EVERYONE) -> Callable[[str], Item | None]:
        """A function that finds an item of a stored response which the tenant sees: of its output by its id, of its input by the
        id RESPONSE_PLACE that its list shows. Each response is decoded once for all items."""
        read: dict[str, tuple[Item, ...]] = {}

        def items_of(id_: str) -> tuple[Item, ...]:
            if id_ not in read:
                found = self.get(id_, tenant)
                read[id_] = found.own_items() if found else ()
            return read[id_]

        def find(id_: str) -> Item | None:
            if (owner := self._of_item.get(id_)) is not None:
                return next((each for each in items_of(owner) if each.id == id_), None)
            response_id, _, place = id_.rpartition("_")
            found = self.get(response_id, tenant) if place.isdecimal() else None
            return items_of(response_id)[int(place)] if found and int(place[:9]) < found.input_count else None

        return find

    @property
    def keeps(self) -> bool:
        """Whether it has room for any response."""
        return self._bytes_max > 0

    def put(
        self, response: dict[str, Any], given: Sequence[Item], earlier: Sequence[Item], owner: str = "",
        events: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        """Keep a complete response to the input `given`, which followed the conversation `earlier`; without its events where these
        are too large."""
        output = msgspec.convert(response["output"], list[Item])
        own = _encode((*map(_kept, given), *output))
        kept = msgspec.msgpack.encode(events) if events else b""
        found = Stored(msgspec.json.encode(response), _encode(tuple(earlier)), own, len(given), owner, kept)
        self.keep(response["id"], found)

    def begin(self, response: Mapping[str, object], given: Sequence[Item], owner: str) -> None:
        """Let the process that follows this one know of a response that it makes, to the input `given`."""
        own = _encode(tuple(map(_kept, given)))
        self._folder.write(str(response["id"]), Stored(msgspec.json.encode(response), b"[]", own, len(given), owner, ended=False))

    def keep(self, id_: str, found: Stored) -> None:
        """Keep a response of another store, or an own one; see `put`."""
        if found.size_bytes > self._bytes_max:
            found = msgspec.structs.replace(found, events=b"")
        if found.size_bytes > self._bytes_max:
            return self._folder.remove(id_)
        self._folder.write(id_, found)
        self._take(id_, found)

    def _take(self, id_: str, found: Stored) -> None:
        if id_ in self._kept:
            self._forget(id_)
        self._kept[id_] = found
        self._of_owner.setdefault(found.owner, {})[id_] = found.size_bytes
        self._of_item |= {item.id: id_ for item in found.own_items()[found.input_count :] if item.id}
        self.size_bytes += found.size_bytes
        while self.size_bytes > self._bytes_max or len(self._kept) > COUNT_MAX:
            widest = max(self._of_owner.values(), key=self._share)
            self._drop(next(iter(widest)))

    def _share(self, own: dict[str, int]) -> int:
        """What part of the two bounds a tenant takes."""
        return max(sum(own.values()) * COUNT_MAX, len(own) * self._bytes_max)

    def delete(self, id_: str, tenant: Tenant = EVERYONE) -> bool:
        """Whether the response was there for the tenant."""
        if self.get(id_, tenant) is None:
            return False
        self._drop(id_)
        return True

    def _drop(self, id_: str) -> None:
        self._folder.remove(id_)
        self._forget(id_)

    def _forget(self, id_: str) -> None:
        found = self._kept.pop(id_)
        own = self._of_owner[found.owner]
        del own[id_]
        if not own:
            del self._of_owner[found.owner]
        self.size_bytes -= found.size_bytes
        for item in found.own_items()[found.input_count :]:
            self._of_item.pop(item.id or "", None)


# ---- a folder of responses -----------------------------------------------------------------------------------------
# Folder: what a store of responses holds, one file for each, for the API server that follows one which is killed.
# Owns the files of one place among the API servers of a port. They lie in the run directory, which its server's start makes and
# its end removes: no text outlives the server. A process that ends at any moment leaves each file whole or absent.

Entry = TypeVar("Entry")
log = logging.getLogger("vnext.server")


class Folder:
    """See the module. `path` None: no files. Nothing raises: what cannot be written is lost with the process."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._is_writable = path, True

    def read(self, kind: type[Entry]) -> Iterator[tuple[str, Entry]]:
        """The ids and entries that earlier processes have left, the oldest first."""
        if self._path is None or not self._path.is_dir():
            return
        for path in sorted(self._path.iterdir(), key=lambda each: each.stat().st_mtime_ns):
            try:
                if path.suffix != ".draft":
                    yield path.name, msgspec.msgpack.decode(path.read_bytes(), type=kind)
                    continue
            except (ValueError, RecursionError, OSError) as error:
                log.warning("the stored response %s cannot be read: %s", path.name, reason(error))
            with suppress(OSError):
                path.unlink()

    def write(self, id_: str, entry: msgspec.Struct) -> None:
        if self._path is None:
            return
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            draft = self._path / f"{id_}.draft"
            with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.msgpack.encode(entry))
            os.replace(draft, self._path / id_)
        except OSError as error:
            self.remove(id_)
            if self._is_writable:
                log.warning("an API server that ends loses its responses: %s cannot be written (%s)", self._path, reason(error))
            self._is_writable = False

    def remove(self, id_: str) -> None:
        """Delete an entry, whether or not it is there."""
        for path in (self._path / id_, self._path / f"{id_}.draft") if self._path is not None else ():
            with suppress(OSError):
                path.unlink()
