"""POST /handover: computes a prompt for another server, and answers with the ticket by which that one gets its blocks.

For routers (vnext/gateway). The answer is worth nothing by itself: a server without the cluster's secret gets no blocks.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.answers.generation import admitted
from vnext.server.call import Call, admit
from vnext.server.context.errors import Aborted, RoutesClosed
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.state.events import pack_tokens
from vnext.state.params import Sampling


class HandoverBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as POST /tokenize says its tokens."""

    model: str | None = None
    tokens: list[int]
    cache_salt: str | None = None


_handover = msgspec.json.Decoder(HandoverBody)


async def hand_over(request: web.Request) -> web.Response:
    """POST /handover: {"ticket", "cached_tokens"}; the ticket is "" where there are no blocks to hand over."""
    if request.app[SERVER_CONTEXT].settings.role != "prefill":
        raise RoutesClosed("This server computes no prompts for others: start it with --role prefill.")
    call = await admit(request, "handover", _handover)
    context, body = call.context, call.body
    model = context.model_name(body.model, call.client)
    context.check_tokens(body.tokens, "tokens", context.listed_tokens_max)
    with context.limiter.enter(1, call.client):
        ticket, cached = await handed_over(call, model)
    return web.json_response({"ticket": ticket, "cached_tokens": cached})


async def handed_over(call: Call, model: str) -> tuple[str, int]:
    """The ticket, "" where there are no blocks to hand over, and the tokens that the cache had. Raises Refused, EngineDead,
    Aborted, Overloaded, RequestTimedOut."""
    context, body = call.context, call.body
    context.check_engine()
    asked = SubmitRequest(
        name=call.names, prompt=pack_tokens(body.tokens), sampling=Sampling(seed=0, max_tokens=1, temperature=0.0),
        cache_salt=context.keys.salt(call.client, body.cache_salt or ""), hands_over=True,
        adapter=context.adapter(model, call.client), client=context.client_number(call.client),
    )  # fmt: skip
    ticket, cached = "", 0
    async with admitted(call, [body.tokens]), context.client.submit_all([asked]) as stream:
        async for output in stream:
            if output.finish == "abort":
                raise Aborted("The engine ended the request before the prompt was computed: send it again.")
            ticket, cached = output.ticket or ticket, output.cached_tokens or cached
    return ticket, cached
