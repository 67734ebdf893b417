"""POST /handover: computes a prompt for another server, and answers with the ticket by which that one gets its blocks.

For routers (vnext/gateway). The answer is worth nothing by itself: a server without the cluster's secret gets no blocks.
"""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.answers.generation import admitted
from vnext.server.context.errors import Aborted, RoutesClosed
from vnext.server.context.identity import answer_id, client_of
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext
from vnext.server.http.bodies import read_body
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


async def handed_over(
    context: ServerContext, name: str, client: str, prompt: list[int], cache_salt: str, model: str
) -> tuple[str, int]:
    """The ticket, "" where there are no blocks to hand over, and the tokens that the cache had. Raises Refused, EngineDead,
    Aborted, Overloaded, RequestTimedOut."""
    context.check_engine()
    asked = SubmitRequest(
        name=name, prompt=pack_tokens(prompt), sampling=Sampling(seed=0, max_tokens=1, temperature=0.0), cache_salt=cache_salt,
        adapter=context.adapters.files(model), hands_over=True, client=context.client_number(client),
    )  # fmt: skip
    ticket, cached = "", 0
    async with admitted(context, client, [prompt], time.monotonic()), context.client.submit_all([asked]) as stream:
        async for output in stream:
            if output.finish == "abort":
                raise Aborted("The engine ended the request before the prompt was computed: send it again.")
            ticket, cached = output.ticket or ticket, output.cached_tokens or cached
    return ticket, cached
