"""POST /handover: computes a prompt for another server, and answers with the ticket by which that one gets its blocks.

For routers (vnext/gateway). The answer is worth nothing by itself: a server without the cluster's secret gets no blocks.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from vnext.server.answers.handed_over import handed_over
from vnext.server.context.errors import RoutesClosed
from vnext.server.context.identity import answer_id, client_of
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.bodies import read_body


class HandoverBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as POST /tokenize says its tokens."""

    model: str | None = None
    tokens: list[int]
    cache_salt: str | None = None


_handover = msgspec.json.Decoder(HandoverBody)


async def hand_over(request: web.Request) -> web.Response:
    """POST /handover: {"ticket", "cached_tokens"}; the ticket is "" where there are no blocks to hand over."""
    context, client = request.app[SERVER_CONTEXT], client_of(request)
    if context.settings.role != "prefill":
        raise RoutesClosed("This server computes no prompts for others: start it with --role prefill.")
    body = await read_body(request, _handover, HandoverBody)
    model = context.model_name(body.model, client)
    context.check_tokens(body.tokens, "tokens", context.listed_tokens_max)
    with context.limiter.enter(1, client):
        name, salt = answer_id(request, "handover"), context.keys.salt(client, body.cache_salt or "")
        ticket, cached = await handed_over(context, name, client, body.tokens, salt, model)
    return web.json_response({"ticket": ticket, "cached_tokens": cached})
