"""Asked: what the router reads of a request, body and prompt, and which headers pass.

The server judges a body: one that is wrong passes, and gets its sentence there. A body is not encoded again: a seed is put behind
its members, and an id is replaced, in the bytes as they came. The router has no tokenizer: one of the servers converts a text. A
prompt whose tokens are not known stands for itself by its text: 16 numbers for each piece of it, equal where texts are, so that
what is on its way counts all the same. Hop-by-hop headers end here (RFC 9110, 7.6.1), as do those that only this hop can know,
cookies, and what a browser says of its page, which the router has judged; a client's key passes only where the router has none of
its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from vnext.gateway.continuing import SHOWN
from vnext.routing.approximate import BYTES_PER_TOKEN, piece_hashes
from vnext.routing.prompts import Prompt
from vnext.server.context.identity import SHOWING_PATHS, model_of
from vnext.server.http.event_ids import HEADER
from vnext.state.events import pack_tokens, unpack_tokens

SEED_HEADER = "X-Vnext-Seed"
SEED_MAX = 2**31
KEY_BYTES = 256
"""Of a prompt, if nothing else says which requests `consistent_hash` keeps together: the beginning of a conversation."""
TIMEOUT_S = 0.5
TEXT_BYTES_MIN = 256
"""A shorter prompt has no prefix worth knowing."""
CHAT, OLLAMA = "/v1/chat/completions", "/api/"
SHOWING = b'"image_url"', b'"input_image"', b'"image"', b'"images"', b'"video_url"', b'"audio_url"', b'"input_audio"'
FIELDS = {
    CHAT: (
        "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    ),
    "/v1/completions": ("model", "prompt", "add_special_tokens"),
}  # fmt: skip
"""Path -> the members of its body that /tokenize takes."""
Pairs = list[tuple[str, str]]

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_OF_REQUESTS = frozenset(
    "host content-length content-encoding accept-encoding expect cookie origin referer forwarded x-forwarded-for "
    "sec-fetch-site sec-fetch-mode sec-fetch-dest sec-fetch-user access-control-request-method "
    "access-control-request-headers x-vnext-handover x-vnext-inputs".split()
)
"""Tickets too: this router gives them out, and a client's would make ranks connect where it says."""
_KEYS = frozenset({"authorization", "x-api-key"})
_OF_ANSWERS = frozenset(
    "content-length date set-cookie access-control-allow-origin access-control-allow-credentials access-control-expose-headers "
    "access-control-allow-methods access-control-allow-headers access-control-max-age".split()
)


class _Body(msgspec.Struct):
    """The members that matter here, of any type. Those that make up the prompt are bytes as they came."""

    model: Any = None
    name: Any = None
    """The model of /api/show, as Ollama's older clients write it."""
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
    `shows`: it may have images or sounds: its tokens are not all of its prompt.
    `previous`: the id of the stored response that it continues, "" for none. `salt`: its cache salt."""

    body: bytes
    model: str = ""
    is_stream: bool = False
    hashes: tuple[int, ...] = ()
    tokens: int = 0
    key: bytes = b""
    takes_seed: bool = False
    shows: bool = False
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
        return Asked(body=body, shows=path in SHOWING_PATHS)
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked(body=body)
    named = found.model or found.name if path.startswith(OLLAMA) else found.model
    model, salt = (each if isinstance(each, str) else "" for each in (named, found.cache_salt))
    if path.startswith(OLLAMA):
        model = model_of(model) or ""
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
        shows=path in SHOWING_PATHS and any(each in body for each in SHOWING),
        takes_seed=is_stream and found.seed is None and not found.use_beam_search,
        previous=found.previous_response_id if isinstance(found.previous_response_id, str) else "",
        salt=salt,
    )


class Known(NamedTuple):
    """A request's prompt, and whether its tokens are the engine's, not those that stand for its text."""

    prompt: Prompt
    by_tokens: bool


NOTHING = Known(Prompt(b""), False)
"""Enough where no view is exact."""


def text_prompt(asked: Asked) -> Prompt:
    """The request's prompt by its text."""
    return Prompt(b"".join(each.to_bytes(8, "little") * 8 for each in asked.hashes), asked.salt)


async def token_prompt(
    session: aiohttp.ClientSession, url: str, path: str, asked: Asked, headers: Iterable[tuple[str, str]]
) -> Prompt | None:
    """The request's prompt by its tokens, which the server at `url` is asked for; None where it does not say."""
    try:
        members = msgspec.json.decode(asked.body, type=dict[str, msgspec.Raw])
        if path == "/v1/completions" and bytes(members["prompt"]).startswith(b"["):
            return Prompt(pack_tokens(msgspec.json.decode(members["prompt"], type=list[int])), asked.salt)
        body = msgspec.json.encode({name: members[name] for name in FIELDS[path] if name in members})
        async with asyncio.timeout(TIMEOUT_S), session.post(f"{url}/tokenize", data=body, headers=headers) as response:
            if response.status != 200:
                return None
            answer = msgspec.json.decode(await response.read(), type=_Answer)
            return Prompt(pack_tokens(answer.tokens), asked.salt)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError, LookupError, OverflowError):
        return None


async def ticket_from(
    session: aiohttp.ClientSession, url: str, asked: Asked, prompt: Prompt | None, headers: Iterable[tuple[str, str]]
) -> str:
    """What the server at `url` says when it has computed a prompt for another one, None for that of a chat's whole body; "" where
    it has not."""
    what = {"chat": msgspec.Raw(asked.body)} if prompt is None else {"tokens": unpack_tokens(prompt.tokens).tolist()}
    data = msgspec.json.encode(what | {"cache_salt": asked.salt} | ({"model": asked.model} if asked.model else {}))
    return await _ticket(session, URL(f"{url}/handover"), data, headers)


async def inputs_ticket_from(
    session: aiohttp.ClientSession, url: str, asked: Asked, path: str, headers: Iterable[tuple[str, str]], limit_s: float
) -> str:
    """What the server at `url` says when it has encoded what a request to `path` shows or plays; "" where it has not within
    `limit_s`."""
    return await _ticket(session, URL(f"{url}/handover").with_query(path=path), asked.body, headers, limit_s)


async def _ticket(
    session: aiohttp.ClientSession, url: URL, data: bytes, headers: Iterable[tuple[str, str]], limit_s: float | None = None
) -> str:
    try:
        async with asyncio.timeout(limit_s), session.post(url, data=data, headers=headers) as response:
            return msgspec.json.decode(await response.read(), type=_Ticket).ticket if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError):
        return ""


class _Answer(msgspec.Struct):
    tokens: list[int]


class _Ticket(msgspec.Struct):
    ticket: str


def to_server(headers: Mapping[str, str], client: str, own: Mapping[str, str], key: str, has_keys: bool) -> Pairs:
    """The headers of a request on its way to a server. `client`: its address. `own`: the router's. `key`: the server's, "" for
    none. `has_keys`: the router asked for the client's."""
    dropped = _OF_REQUESTS | (_KEYS if key or has_keys else frozenset())
    passed = [pair for pair in _passing(headers, dropped) if pair[0].lower() not in map(str.lower, own)]
    passed.append(("X-Forwarded-For", ", ".join(filter(None, (headers.get("X-Forwarded-For", ""), client)))))
    passed.append(("Accept-Encoding", "identity"))  # an answer is read here where its stream may have to go on
    if key:
        passed.append(("Authorization", f"Bearer {key}"))
    return [*passed, *own.items()]


def to_client(headers: Mapping[str, str]) -> Pairs:
    """The headers of an answer on its way to its client."""
    return _passing(headers, _OF_ANSWERS)


def _passing(headers: Mapping[str, str], dropped: frozenset[str]) -> Pairs:
    named = (value.split(",") for name, value in headers.items() if name.lower() == "connection")
    ended = HOP_BY_HOP | dropped | {name.strip().lower() for names in named for name in names}
    return [(name, value) for name, value in headers.items() if name.lower() not in ended]
