"""Asked: what the router reads of a request's body. The server judges it: a body that is wrong passes, and gets its sentence there.

A body is not encoded again: a seed is put behind its members, and an id is replaced, in the bytes as they came.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from vnext.gateway.continuing import SHOWN
from vnext.routing.approximate import BYTES_PER_TOKEN, piece_hashes
from vnext.server.http.event_ids import HEADER

SEED_HEADER = "X-Vnext-Seed"
SEED_MAX = 2**31
KEY_BYTES = 256
"""Of a prompt, if nothing else says which requests `consistent_hash` keeps together: the beginning of a conversation."""


class _Body(msgspec.Struct):
    """The members that matter here, of any type. Those that make up the prompt are bytes as they came."""

    model: Any = None
    stream: Any = None
    seed: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    use_beam_search: Any = None
    previous_response_id: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_PROMPT = ("tools", "system", "instructions", "messages", "prompt", "input")
"""In the order in which templates write them."""
_decoder = msgspec.json.Decoder(_Body)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `model` is "" where it names none. `is_stream`: it is one with which another server could go on. `hashes`: of
    its prompt's pieces; `tokens`: about its length; `key`: what `consistent_hash` keeps together. `takes_seed`: it has none.
    `previous`: the id of the stored response that it continues, "" for none. `salt`: its cache salt."""

    body: bytes
    model: str = ""
    is_stream: bool = False
    hashes: tuple[int, ...] = ()
    tokens: int = 0
    key: bytes = b""
    takes_seed: bool = False
    previous: str = ""
    salt: str = ""

    def draw_seed(self) -> int | None:
        """A seed for a stream that has none, with which another server can go on with it; None for what takes none."""
        return secrets.randbelow(SEED_MAX) if self.takes_seed else None

    def with_seed(self, seed: int | None) -> bytes:
        """The body with a seed; a decoder takes the last of two members of one name, and one may be null."""
        return self.body if seed is None else b'%b,"seed":%d}' % (self.body.rstrip()[:-1], seed)


def goes_on(names: Iterable[str]) -> bool:
    """Whether the headers of these names say that a client goes on with a stream. Its seed is in the id that it sends."""
    return any(name.lower() == HEADER.lower() for name in names)


def read_asked(path: str, body: bytes, is_json: bool) -> Asked:
    """What a request to `path` asks for."""
    if not (is_json and body):
        return Asked(body=body)
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked(body=body)
    model, salt = (each if isinstance(each, str) else "" for each in (found.model, found.cache_salt))
    text = b"".join(bytes(getattr(found, name)) for name in _PROMPT)
    is_stream = found.stream is True and path in SHOWN
    given = next((each for each in (found.prompt_cache_key, found.user) if isinstance(each, str) and each), None)
    return Asked(
        body=body,
        model=model,
        is_stream=is_stream,
        hashes=tuple(piece_hashes(text, f"{model}\0{salt}".encode(errors="replace"))),
        tokens=len(text) // BYTES_PER_TOKEN + 1,
        key=text[:KEY_BYTES] if given is None else given.encode(errors="replace"),
        takes_seed=is_stream and found.seed is None and not found.use_beam_search,
        previous=found.previous_response_id if isinstance(found.previous_response_id, str) else "",
        salt=salt,
    )
