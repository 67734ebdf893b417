"""Vectors of texts, and scores of pairs of texts, as LLM gives them. Imported by the first call that asks: it needs numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vnext.api.generated import Embedded, Embedding, Score, Scored
from vnext.api.task_maker import TaskMaker
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.protocol.messages import PromptResult
from vnext.runtime.protocol.reasons import SCORES, WRITTEN_PAIRS
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.pairs import pair_prompt
from vnext.text.prompt_arrays import embedding
from vnext.text.prompt_results import embedding_request, shortened, usual_pooling


class Wanted(NamedTuple):
    """The arguments of LLM.embed."""

    pooling: str | None
    dimensions: int | None
    normalize: bool | None
    truncate_prompt_tokens: int | None


def embedded(maker: TaskMaker, client: SyncEngineClient, texts: Sequence[str | list[int]], wanted: Wanted) -> list[Embedded]:
    """As LLM.embed. Raises InvalidRequest, Refused, EngineDead."""
    if SCORES in client.ready.environment:
        raise InvalidRequest("This model scores pairs of texts and makes no vectors: use score().")
    tokens, length = [maker.tokens(prompt) for prompt in texts], client.ready.config.max_model_len
    if wanted.truncate_prompt_tokens is not None:
        frames = (maker.tokenizer.encode("") if isinstance(each, str) else [] for each in texts)
        tokens = [shortened(each, wanted.truncate_prompt_tokens, frame, length) for each, frame in zip(tokens, frames)]
    usual = usual_pooling(client.ready.environment)
    normalize = usual.normalize if wanted.normalize is None else wanted.normalize
    found = _parts(maker, client, tokens, wanted.pooling or usual.pooling)
    vectors = [embedding(parts, wanted.dimensions, normalize).tolist() for parts in found]
    return [Embedded(prompt_token_ids=each, outputs=Embedding(embedding=vector)) for each, vector in zip(tokens, vectors)]


def pair_scores(
    maker: TaskMaker, client: SyncEngineClient, queries: Sequence[str | list[int]], documents: Sequence[str | list[int]]
) -> list[Scored]:
    """How alike each document is to its query, or to the only one. Raises InvalidRequest, Refused, EngineDead."""
    if len(queries) not in (1, len(documents)):
        counts = f"There are {len(queries)} queries and {len(documents)} documents"
        raise InvalidRequest(f"{counts}: give one query, or one for each.", "answers")
    whole = [*queries] * (len(documents) if len(queries) == 1 else 1)
    pairs = [(one, other) for one, other in zip(whole, documents) if isinstance(one, str) and isinstance(other, str)]
    if len(pairs) < len(whole):
        raise InvalidRequest("This model scores pairs of texts: give texts, not token ids.", "prompts")
    ready = client.ready
    template = maker.template if ready.environment[SCORES] == WRITTEN_PAIRS else None
    tokens = [pair_prompt(maker.tokenizer, template, pair, ready.config.max_model_len) for pair in pairs]
    found = _parts(maker, client, tokens, usual_pooling(ready.environment).pooling)
    scores = [float(embedding(parts, None, False)[0]) for parts in found]
    return [Scored(prompt_token_ids=each, outputs=Score(score=score)) for each, score in zip(tokens, scores)]


def _parts(maker: TaskMaker, client: SyncEngineClient, tokens: Sequence[list[int]], kind: str) -> list[list[PromptResult]]:
    """The parts of each prompt's vector. Raises InvalidRequest, Refused, EngineDead."""
    requests = [embedding_request(next(maker.names), each, kind, client.ready.config.max_model_len) for each in tokens]
    found: dict[str, list[PromptResult]] = {request.name: [] for request in requests}
    for output in client.run(requests, whole=True) if requests else ():
        if output.error:
            raise InvalidRequest(f"{output.error.rstrip('.')}.")
        found[output.name] += output.prompt
    return list(found.values())
