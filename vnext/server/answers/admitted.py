"""Admitted: one call between its admission and its end: the tokens it waits with, its time, and what its key pays.

Owns the order of the three. Both text generation and embeddings ask the engine within it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from vnext.server.context.admission import WaitingPrompts
from vnext.server.context.errors import RequestTimedOut
from vnext.server.context.server_context import ServerContext


@asynccontextmanager
async def admitted(
    context: ServerContext, client: str, prompts: Sequence[list[int]], started_s: float
) -> AsyncIterator[WaitingPrompts]:
    """Reserve the tokens of `prompts`, and end the body when the time since `started_s` (monotonic) is over. Raises Overloaded,
    RequestTimedOut."""
    limit_s = context.settings.request_timeout_s
    left_s = started_s + limit_s - time.monotonic() if limit_s else None
    with context.limiter.prompts(sum(map(len, prompts)), client) as waiting:
        try:
            async with asyncio.timeout(left_s):
                yield waiting
        except TimeoutError:
            sentence = f"The answer was not complete within {limit_s:g} s, which is this server's --request-timeout"
            raise RequestTimedOut(f"{sentence}: ask for fewer tokens, or later.") from None
