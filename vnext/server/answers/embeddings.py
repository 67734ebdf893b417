"""Embeddings: turns tokens into vectors by the engine, for the routes that embed, rerank and score."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vnext.runtime.protocol.messages import AdapterFiles, PromptResult, RequestOutput, SubmitRequest
from vnext.server.answers.admitted import admitted
from vnext.server.context.adapters import failed
from vnext.server.context.errors import Aborted
from vnext.server.context.renaming import in_names
from vnext.server.context.server_context import ServerContext
from vnext.server.context.stopwatch import Stopwatch
from vnext.server.context.traces import call_trace
from vnext.text.prompt_results import embedding_request

if TYPE_CHECKING:
    import numpy as np

DEFAULT_POOLING = "last"


async def embeddings_of(
    context: ServerContext,
    call_id: str,
    client: str,
    prompts: list[list[int]],
    pooling: str | None = None,
    dimensions: int | None = None,
    normalize: bool = True,
    *,
    model: str = "",
    params: Sequence[str] = (),
) -> list[np.ndarray]:
    """One float32 vector per prompt; `params` are the names of the prompts. Aborts the live requests when cancelled. Raises
    InvalidRequest, Refused, EngineDead, Aborted, Overloaded, RequestTimedOut."""
    context.check_engine()
    adapter, pooling = context.adapters.files(model), pooling or DEFAULT_POOLING
    given = {"adapter": adapter, "cache_salt": context.keys.salt(client, ""), "client": context.client_number(client)}
    requests = []
    for place, prompt in enumerate(prompts):
        name = params[place] if params else "input"
        with in_names([("the input", name), ("input", name)]):
            asked = embedding_request(f"{call_id}-{place}", prompt, pooling, context.model_length)
        requests.append(replace(asked, **given))
    started_s = time.monotonic()
    watches = {each.name: Stopwatch(context.metrics, started_s, len(each.prompt) // 4) for each in requests}
    found: dict[str, list[PromptResult]] = {request.name: [] for request in requests}
    attributes = {"gen_ai.response.id": call_id, "gen_ai.usage.input_tokens": sum(map(len, prompts))}
    with call_trace(context.traces, "embeddings", model, started_s, attributes):
        try:
            async with admitted(context, client, prompts, started_s):
                async for output in _outputs(context, requests):
                    found[output.name] += output.prompt
                    if output.finish:
                        watches.pop(output.name).end("length")
        finally:
            for watch in watches.values():
                watch.end("abort")
    from vnext.text.prompt_arrays import embedding

    return [embedding(parts, dimensions, normalize) for parts in found.values()]


async def _outputs(context: ServerContext, requests: Sequence[SubmitRequest]) -> AsyncIterator[RequestOutput]:
    """Raises as `_check` and the client do."""
    for wave in context.limiter.waves(requests):
        async with context.client.submit_all(wave) as stream:
            async for output in stream:
                _check(output, wave[0].adapter)
                yield output


def _check(output: RequestOutput, adapter: AdapterFiles | None) -> None:
    """Raise InvalidRequest or Aborted for one that has failed."""
    if output.error:
        raise failed(output.error, adapter)
    if output.finish == "abort":
        raise Aborted("The engine ended the request before its answer was complete: send it again.")
