"""POST /v1/embeddings, /rerank and /score: vectors of texts, and how alike texts are by them.

Owns the bodies, the requests to the engine that turn tokens into vectors, and the shapes of the answers: OpenAI's for embeddings,
those of Jina, Cohere and vLLM for the others, where a score is the cosine of two embeddings, or what a model says that reads the
two texts together.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.prompts import params_of, prompts_of, tokens_of

if TYPE_CHECKING:
    import numpy as np
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vnext.runtime.protocol.messages import AdapterFiles, PromptResult, RequestOutput, SubmitRequest
from vnext.runtime.protocol.reasons import SCORES, WRITTEN_PAIRS
from vnext.server.answers.generation import admitted
from vnext.server.call import Call, admit
from vnext.server.context.adapters import failed
from vnext.server.context.errors import Aborted, in_names
from vnext.server.context.metrics import Stopwatch
from vnext.server.context.server_context import ServerContext
from vnext.server.context.traces import call_trace
from vnext.server.http.streaming import unhurried
from vnext.text.prompt_results import NO_TEMPLATE, embedding_request, shortened, usual_pooling

if TYPE_CHECKING:
    import numpy as np


ENTRIES_A_TURN = 64  # 20 microseconds each
NUMBERS_A_TURN = 2**14  # a millisecond


class Wanted(NamedTuple):
    """How vectors are made of the states. None: as the model's files say."""

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = True


async def embeddings_of(call: Call, prompts: list[list[int]], params: Sequence[str], wanted: Wanted) -> list[np.ndarray]:
    """One float32 vector per prompt; `params` are the names of the prompts. Aborts the live requests when cancelled. Raises
    InvalidRequest, Refused, EngineDead, Aborted, Overloaded, RequestTimedOut."""
    context, client = call.context, call.client
    context.check_engine()
    model = context.model_name(call.body.model, client)
    whose = {"client": context.identity.client_number(client), "weight": context.keys.weights.get(client, 1)}
    given = {"adapter": context.adapter(model, client), "cache_salt": context.keys.salts.get(client, ""), **whose}
    requests, usual = [], usual_pooling(context.client.ready.environment)
    async for place, (prompt, name) in unhurried(enumerate(zip(prompts, params)), ENTRIES_A_TURN):
        with in_names([("the input", name), ("input", name)]):
            asked = embedding_request(f"{call.names}-{place}", prompt, wanted.pooling or usual.pooling, context.bounds.model_length)
        requests.append(replace(asked, **given))
    watches = {each.name: Stopwatch(context.metrics, call.started_s, len(each.prompt) // 4) for each in requests}
    found: dict[str, list[PromptResult]] = {request.name: [] for request in requests}
    attributes = {"gen_ai.response.id": call.id, "gen_ai.usage.input_tokens": sum(map(len, prompts))}
    with call_trace(context.traces, "embeddings", model, call.started_s, attributes):
        try:
            async with admitted(call, prompts):
                async for output in _outputs(context, requests):
                    found[output.name] += output.prompt
                    if output.finish:
                        watches.pop(output.name).end("length")
        finally:
            for watch in watches.values():
                watch.end("abort")
    from vnext.text.prompt_arrays import embedding

    normalize = usual.normalize if wanted.normalize is None else wanted.normalize
    entries = unhurried(found.values(), ENTRIES_A_TURN)
    return [embedding(parts, wanted.dimensions, normalize) async for parts in entries]


async def _outputs(context: ServerContext, requests: Sequence[SubmitRequest]) -> AsyncIterator[RequestOutput]:
    """Raises as `_check` and the client do."""
    wave = context.limiter.request_max
    for start in range(0, len(requests), wave):
        with closing(context.client.submit_all(requests[start : start + wave])) as stream:
            async for output in stream:
                _check(output, requests[0].adapter)
                yield output


def _check(output: RequestOutput, adapter: AdapterFiles | None) -> None:
    """Raise InvalidRequest or Aborted for one that has failed."""
    if output.error:
        raise failed(output.error, adapter)
    if output.finish == "abort":
        raise Aborted("The engine ended the request before its answer was complete: send it again.")


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that these routes share. `pooling`: "last", "mean", "cls" or "max".
    `truncate_prompt_tokens`: a text keeps so many of its first ones, -1: as many as the model takes."""

    model: str | None = None
    pooling: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    request_id: str | None = None


class EmbeddingBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. `input` is one text, one token list, or a list of either."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class RerankBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /score and /v1/score: one text against one or many, or as many against as many."""

    text_1: str | list[str]
    text_2: str | list[str]


_embedding, _rerank, _score = (msgspec.json.Decoder(kind) for kind in (EmbeddingBody, RerankBody, ScoreBody))


async def create_embeddings(request: web.Request) -> web.Response:
    call = await admit(request, "embd", _embedding)
    body: EmbeddingBody = call.body
    wanted = Wanted(body.pooling, body.dimensions, body.normalize)
    vectors, count = await vectors_of(call, {"input": body.input}, wanted)
    shown = await written(vectors, body.encoding_format == "base64")
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
    return _answer(call, count, {"object": "list", "data": data})


async def written(vectors: Sequence[np.ndarray], as_base64: bool = False) -> list[msgspec.Raw]:
    """float32 vectors of one length as JSON: a vector takes a tenth of a millisecond, and 2,048 of them a long turn."""
    a_turn = max(1, NUMBERS_A_TURN // max(1, len(vectors[0]))) if vectors else 1
    return [
        msgspec.Raw(msgspec.json.encode(base64.b64encode(each.tobytes()).decode() if as_base64 else each.tolist()))
        async for each in unhurried(vectors, a_turn)
    ]


async def rerank(request: web.Request) -> web.Response:
    """POST /rerank: the documents, the likest to the query first."""
    call = await admit(request, "embd", _rerank)
    body: RerankBody = call.body
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest(f"top_n is {body.top_n}: it must be at least 1.", "top_n")
    scores, count = await scores_of(call, {"query": [body.query], "documents": texts})
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    results = [
        {"index": place, "relevance_score": scores[place]}
        | ({} if body.return_documents is False else {"document": {"text": texts[place]}})
        for place in best
    ]
    return _answer(call, count, {"results": results})


async def score(request: web.Request) -> web.Response:
    """POST /score: how alike each pair of texts is."""
    call = await admit(request, "embd", _score)
    body: ScoreBody = call.body
    one, other = ([texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2))
    if len(one) not in (1, len(other)):
        raise InvalidRequest(f"text_1 has {len(one)} texts and text_2 {len(other)}: give one, or as many as text_2.", "text_1")
    scores, count = await scores_of(call, {"text_1": one, "text_2": other})
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    return _answer(call, count, {"object": "list", "data": data})


async def scores_of(call: Call, inputs: dict[str, list[str]]) -> tuple[list[float], int]:
    """How alike each text of the second field is to that of the first, or to the only one there, and the number of tokens."""
    context, (ones, others) = call.context, inputs.values()
    if how := context.client.ready.environment.get(SCORES):
        return await _pair_scores(call, inputs, how)
    vectors, count = await vectors_of(call, inputs, Wanted(call.body.pooling))
    left = vectors[: len(ones)] * (len(others) // len(ones))
    pairs = unhurried(zip(left, vectors[len(ones) :], strict=True), ENTRIES_A_TURN)
    return [_cosine(*pair) async for pair in pairs], count


async def _pair_scores(call: Call, inputs: dict[str, list[str]], how: str) -> tuple[list[float], int]:
    """As `scores_of`, by a model that reads both texts together."""
    context, client, asked = call.context, call.client, call.body.truncate_prompt_tokens
    if call.body.pooling is not None:
        raise InvalidRequest("This model's own head scores a pair: leave pooling out.", "pooling")
    context.model_name(call.body.model, client)
    for name, given in inputs.items():
        prompts_of(given, name)
        context.limiter.check_inputs(len(given), name)
    template = context.template if how == WRITTEN_PAIRS else None
    if how == WRITTEN_PAIRS and template is None:
        raise InvalidRequest(NO_TEMPLATE, "model")
    (ones, others), (_, name) = inputs.values(), inputs
    pairs, params = list(zip(ones * (len(others) // len(ones)), others)), params_of(name, len(others))
    with context.limiter.enter(min(context.limiter.inputs_max, len(pairs)), client, in_waves=True):
        tokens = await context.encode_pairs(pairs, template, client, params, asked)
        vectors = await embeddings_of(call, tokens, params, Wanted(normalize=None))
    return [float(vector[0]) for vector in vectors], sum(map(len, tokens))


async def vectors_of(call: Call, inputs: dict[str, Any], wanted: Wanted) -> tuple[list[np.ndarray], int]:
    """The vectors of all inputs (by field) in order, and the number of their tokens."""
    context, client = call.context, call.client
    context.model_name(call.body.model, client)
    if SCORES in context.client.ready.environment:
        raise InvalidRequest("This model scores pairs of texts and makes no vectors: ask /rerank or /score.", "model")
    prompts = {name: prompts_of(given, name) for name, given in inputs.items()}
    for name, given in prompts.items():
        context.limiter.check_inputs(len(given), name)
    special, count = call.body.add_special_tokens is not False, min(context.limiter.inputs_max, sum(map(len, prompts.values())))
    with context.limiter.enter(count, client, in_waves=True):
        asked = call.body.truncate_prompt_tokens
        most = 0 if asked is None else context.bounds.listed_tokens_max
        tokens = [each for name, given in prompts.items() for each in await tokens_of(context, given, special, client, name, most)]
        if asked is not None:
            are_texts = [isinstance(each, str) for given in prompts.values() for each in given]
            frame = context.tokenizer.encode("") if special else []
            tokens = [
                shortened(each, asked, frame if is_text else [], context.bounds.model_length)
                for each, is_text in zip(tokens, are_texts)
            ]
        params = [param for name, given in prompts.items() for param in params_of(name, len(given))]
        vectors = await embeddings_of(call, tokens, params, wanted)
    return vectors, sum(map(len, tokens))


def _answer(call: Call, count: int, content: dict[str, Any]) -> web.Response:
    model, usage = call.context.model_name(call.body.model, call.client), {"prompt_tokens": count, "total_tokens": count}
    shown = {"id": call.id, "created": int(time.time()), "model": model} | content | {"usage": usage}
    return web.json_response(body=msgspec.json.encode(shown))


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Of vectors of length 1."""
    return float(one.astype("float64").dot(other.astype("float64")))
