"""Handed over: a prompt that the engine computes for another server, as the one request that this takes."""

from __future__ import annotations

import time

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.answers.admitted import admitted
from vnext.server.context.errors import Aborted
from vnext.server.context.server_context import ServerContext
from vnext.state.events import pack_tokens
from vnext.state.params import Sampling


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
