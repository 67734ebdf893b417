"""API keys: who may ask, and whose the things are that requests make.

Owns the keys of one API process, from the settings and from a file; `admission` has their limits. Where there are several keys,
each is a tenant: what it makes is its own, and so is what the prefix cache keeps of its prompts. Keys of one name are one tenant.
A key is known by its digest only, which a secret of the process enters, so that the time of a look-up tells nothing of it. Logs
show `shown`, never a key or a whole name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from pathlib import Path

import msgspec

from vnext.base.repeated import repeated_key
from vnext.base.spelling import reason
from vnext.runtime.protocol.messages import SALT_END
from vnext.server.context.admission import KeyLimits
from vnext.server.context.key_counts import shared
from vnext.server.settings import ServerSettings
from vnext.state.params import WEIGHT_MAX

log = logging.getLogger(__name__)

KEYS_MAX = 100_000
SHOWN_CHARACTERS = 4
LOOK_S = 1.0
OWN = "vnext's own"  # the client that this process is where it asks itself for no key


class KeysUnusable(Exception):
    """The file of keys cannot be used: one sentence with the remedy."""


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the file. A limit of 0 is none; one that is left out is the option's. `admin`: what other keys made belongs to
    this one too, and it may use the operator's routes. `weight`: of two keys that wait, one of weight 3 gets three times the tokens
    of one of weight 1."""

    key: str
    name: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_answers: int | None = None
    admin: bool = False
    weight: int = 1


class Tenant(msgspec.Struct, frozen=True):
    """Whom a request is for. `owner`: the mark on what it makes, "" where all share everything."""

    owner: str = ""
    is_admin: bool = True

    def sees(self, owner: str) -> bool:
        """Whether a thing with this mark is the tenant's."""
        return self.is_admin or owner == self.owner


EVERYONE = Tenant()


class ApiKeys:
    """See the module. Mutable only in its budgets and `weights`: of clients in turns of the policy `fair`, 1 where none is here.
    `salts`: how those of a client's prompts in the prefix cache begin, "" where none is here."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises KeysUnusable."""
        found = [*(ApiKey(key) for key in settings.api_keys), *_of_file(settings.api_key_file)]
        folder, servers = settings.shared_dir, settings.api_server_count
        counts = shared(folder, settings.number % servers, servers, len(found)) if folder and servers > 1 and found else []
        self._secret = secrets.token_bytes(32)
        self.salts: dict[str, str] = {}
        self._clients: dict[bytes, str] = {}
        self._limits: dict[str, KeyLimits] = {}
        self.limits = self._limits.get
        """The limits of a client that a key stands for; None for none."""
        self._tenants: dict[str, Tenant] = {}
        self._own: dict[str, str] = {}
        for place, each in enumerate(found, start=1):
            client = f"key {place} {each.name}".rstrip()
            limits = _limits_of(each, settings)
            if any(limits):
                self._limits[client] = KeyLimits(*limits, counts[place - 1] if counts else None)
            if len(found) > 1:
                self._tenants[client] = Tenant(each.name or _nameless(each.key), each.admin)
                if not settings.shared_prefix_cache and (owner := self._tenants[client].owner):
                    self.salts[client] = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest() + SALT_END
            known = client if len(found) > 1 or any(limits) else ""
            self._clients[self._digest(each.key)] = known
            self._add_own(self.tenant(client).owner, known or OWN)
        if found:
            self._add_own("", OWN)
        self._path, self.weights = settings.api_key_file, self._weighed(found)

    def __bool__(self) -> bool:
        return bool(self._clients)

    @property
    def are_tenants(self) -> bool:
        """Whether there are several keys."""
        return bool(self._tenants)

    def client_of(self, *given: str) -> str | None:
        """The client that one of the given keys stands for, "" where its address does; None if no key fits. A single key
        without limits stands for nobody."""
        return next((self._clients[each] for each in map(self._digest, filter(None, given)) if each in self._clients), None)

    def own(self, owner: str) -> str:
        """The key with which this process asks itself for the maker of a thing with this mark, "" where no key is needed. Of a
        maker whose key is gone it opens nothing."""
        return self._own.get(owner, "none") if self._own else ""

    def tenant(self, client: str) -> Tenant:
        """The tenant that a client is: everyone, where there are no several keys."""
        return self._tenants.get(client, EVERYONE)

    async def follow_file(self) -> None:
        """Take the weights of the file of keys anew whenever it has changed; who may ask, and how much, stays. Never returns."""
        seen = _version(self._path)
        while True:
            await asyncio.sleep(LOOK_S)
            if (now := _version(self._path)) == seen:
                continue
            seen = now
            try:
                self.weights = self._weighed(await asyncio.to_thread(_of_file, self._path))
                log.info("The weights of --api-key-file %s are read anew; its other changes wait for a start.", self._path)
            except KeysUnusable as error:
                log.warning("%s Its weights stay as they were.", error)

    def _weighed(self, keys: list[ApiKey]) -> dict[str, int]:
        known = {self._clients.get(self._digest(each.key)): each.weight for each in keys if each.weight != 1}
        return {client: weight for client, weight in known.items() if client}

    def _add_own(self, owner: str, client: str) -> None:
        if owner not in self._own:
            self._own[owner] = secrets.token_hex()
            self._clients[self._digest(self._own[owner])] = client

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(errors="surrogateescape"), key=self._secret).digest()


def shown(client: str) -> str:
    """A key's name for logs: its number, and the beginning of the name that the file gives it."""
    place, _, name = client.removeprefix("key ").partition(" ")
    return f"{place} {name[:SHOWN_CHARACTERS]}...".replace(" ...", "") if place.isdigit() else ""


def _limits_of(key: ApiKey, settings: ServerSettings) -> tuple[int, int, int]:
    def own(value: int | None, usual: int) -> int:
        return usual if value is None else value

    return (
        own(key.requests_per_minute, settings.key_requests_per_minute),
        own(key.tokens_per_minute, settings.key_tokens_per_minute),
        own(key.max_answers, settings.key_answers_max),
    )


def _nameless(key: str) -> str:
    """The mark of a key without a name: the same after a restart, and no way back to the key."""
    return "key-" + hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=12, person=b"vnext owner").hexdigest()


def _of_file(path: str) -> list[ApiKey]:
    if not path:
        return []
    try:
        data = Path(path).expanduser().read_bytes()
        found = msgspec.yaml.decode(data, type=list[ApiKey])
    except (OSError, RuntimeError) as error:
        raise KeysUnusable(f"--api-key-file {path} cannot be read ({reason(error)}): give a YAML file of keys.") from error
    except (ValueError, RecursionError) as error:
        raise KeysUnusable(f"--api-key-file {path} is no list of keys: {_where(error, data)}.") from error
    if twice := repeated_key(data):
        raise KeysUnusable(f"--api-key-file {path} says a field of one key twice, in {twice.where()}: leave one of them out.")
    if not 0 < len(found) <= KEYS_MAX:
        raise KeysUnusable(f"--api-key-file {path} has {len(found)} keys: it must have between 1 and {KEYS_MAX}.")
    for place, each in enumerate(found, start=1):
        limits = each.requests_per_minute, each.tokens_per_minute, each.max_answers
        if not each.key.strip() or each.key != each.key.strip() or any((value or 0) < 0 for value in limits):
            raise KeysUnusable(f"--api-key-file {path}: key {place} is empty, has blanks around it, or has a negative limit.")
        if not 1 <= each.weight <= WEIGHT_MAX:
            line, given = _line(data, place - 1, "weight"), f"{each.weight:.3g}" if abs(each.weight) > 10**6 else each.weight
            raise KeysUnusable(f"--api-key-file {path}, line {line}: the weight is {given}, and must be 1 to {WEIGHT_MAX}.")
    if len({each.key for each in found}) < len(found):
        raise KeysUnusable(f"--api-key-file {path} has a key twice: leave one of the two out.")
    return found


def _where(error: Exception, data: bytes) -> str:
    """What is wrong and where, without a value, which might be a key."""
    if isinstance(error, msgspec.ValidationError):
        found = re.search(r"`\$\[(\d+)\](?:\.(\w+))?`", str(error))
        line = f", line {_line(data, int(found[1]), found[2] or '')}" if found else ""
        return str(error).replace("`$", "`keys") + line
    return "it is no YAML; write `- key: ...` and its limits below"


def _line(data: bytes, place: int, field: str) -> int:
    """The line of a field of an entry of the file, or of the entry, from 1."""
    import yaml  # only for a file that is wrong

    entry = yaml.compose(data, Loader=yaml.SafeLoader).value[place]
    fields = {name.value: name for name, _ in entry.value} if isinstance(entry, yaml.MappingNode) else {}
    return int(fields.get(field, entry).start_mark.line) + 1


def _version(path: str) -> tuple[int, ...]:
    """What is another where a file has changed; empty where there is none."""
    try:
        found = Path(path).expanduser().stat()
    except (OSError, RuntimeError):
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
