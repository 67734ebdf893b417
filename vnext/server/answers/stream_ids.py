"""Stream ids: what a stream's events say of the request that it began with, and whether a client goes on with the same one."""

from __future__ import annotations

import hashlib

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.generation import Generation
from vnext.server.answers.resuming import Call, EventIds
from vnext.server.context.errors import OtherSystem
from vnext.server.context.server_context import SERVER_CONTEXT, tenant_of
from vnext.server.http.event_ids import CHOICES_MAX, HEADER, LastEvent, Origin, reads_ids

SEEDS = 2**64
_encode = msgspec.json.Encoder().encode


def event_ids(
    request: web.Request, call: Call, generation: Generation, body: msgspec.Struct, by_token: bool = False
) -> EventIds | None:
    """Those of a stream; None where the client reads none, and where no server could go on, as where tokens depend on the batch.
    Raises InvalidRequest and OtherSystem where the client goes on with another stream."""
    context, last = request.app[SERVER_CONTEXT], call.last
    if last is None and not reads_ids(request.headers):
        return None
    is_invariant = context.client.ready.environment.get("batch_invariant", "yes").startswith("yes")
    if len(generation.choices) > CHOICES_MAX or not is_invariant:
        if last is not None:
            raise InvalidRequest(f"{HEADER}: this stream cannot be picked up again, leave the header out to begin anew.", HEADER)
        return None
    given = getattr(body, "seed", None)
    seed = call.seed if given is None else given % SEEDS
    origin = Origin(
        answer=call.id.partition("-")[2], created_s=call.created_s, seed=seed or 0, cached_tokens=0,
        fingerprint=int(context.fingerprint[3:], 16), digest=_digest(request, generation, body),
    )  # fmt: skip
    if last is not None:
        _check(origin, last, len(generation.choices))
    return EventIds(origin, generation.choices, last, by_token)


def _check(origin: Origin, last: LastEvent, count: int) -> None:
    if origin.fingerprint != last.origin.fingerprint:
        raise OtherSystem(
            f"{HEADER} is of a stream of the system {last.origin.system_fingerprint}, and this one is {origin.system_fingerprint}, "
            "whose text may differ: ask a server like the first, or leave the header out to begin anew."
        )
    if (origin.digest, origin.seed) != (last.origin.digest, last.origin.seed) or count != len(last.choices):
        sentence = f"{HEADER} is of a stream that began with another request: send that one's body and key again"
        raise InvalidRequest(f"{sentence}, or leave the header out to begin anew.", HEADER)


def _digest(request: web.Request, generation: Generation, body: msgspec.Struct) -> int:
    """Equal for the same body with the same key, as prompts and parameters that this server has made of it."""
    context = request.app[SERVER_CONTEXT]
    given = msgspec.structs.replace(body, seed=None) if hasattr(body, "seed") else body
    shown = generation.id.partition("-")[0], tenant_of(request).owner, generation.model
    parsers = type(context.dialect).__name__, context.marks and (context.marks.open, context.marks.close)
    found = hashlib.blake2b(_encode((given, shown, parsers)), digest_size=8)
    for part in generation.computed():
        found.update(part)
    return int.from_bytes(found.digest(), "big")
