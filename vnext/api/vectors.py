"""Vectors of texts, and scores of given answers and of pairs of texts, as LLM and AsyncLLM give them.

Owns the requests for them, and what becomes of their outputs. Imported by the first call that asks: it needs numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from vnext.api.generated import Embedded, Embedding, Score, Scored
from vnext.api.program_input import ReadPrompt, as_adapters, of_each
from vnext.api.task_maker import TaskMaker
from vnext.runtime.protocol.lora_request import AdapterChoice
from vnext.runtime.protocol.messages import EngineReady, PromptResult, RequestOutput, SubmitRequest
from vnext.runtime.protocol.reasons import SCORES, WRITTEN_PAIRS
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.prompt_arrays import embedding
from vnext.text.prompt_results import Scoring, embedding_request, pair_prompt, shortened, usual_pooling

Texts = Sequence[ReadPrompt]
Result = TypeVar("Result")


class Wanted(NamedTuple):
    """The arguments of LLM.embed."""

    pooling: str | None
    dimensions: int | None
    normalize: bool | None
    truncate_prompt_tokens: int | None


class Asked(Generic[Result]):
    """Requests, and the results that their outputs become. Mutable."""

    def __init__(self, requests: Sequence[SubmitRequest], made: Callable[[list[list[RequestOutput]]], list[Result]]) -> None:
        """`made` gets the outputs of each request."""
        self.requests, self._made = requests, made
        self._outputs: dict[str, list[RequestOutput]] = {request.name: [] for request in requests}

    def push(self, output: RequestOutput) -> None:
        """Take in an output. Raises InvalidRequest for an adapter that cannot be read."""
        if output.error:
            raise InvalidRequest(f"{output.error.rstrip('.')}.")
        self._outputs[output.name].append(output)

    def results(self) -> list[Result]:
        """One for each request, once all have ended."""
        return self._made(list(self._outputs.values()))


def embeddings(maker: TaskMaker, ready: EngineReady, texts: Texts, wanted: Wanted, lora: AdapterChoice) -> Asked[Embedded]:
    """As LLM.embed. Raises InvalidRequest."""
    if SCORES in ready.environment:
        raise InvalidRequest("This model scores pairs of texts and makes no vectors: use score().")
    tokens, length = of_each(maker.tokens, [(prompt,) for prompt in texts]), ready.config.max_model_len
    if wanted.truncate_prompt_tokens is not None:
        frames = (maker.tokenizer.encode("") if isinstance(each, str) else [] for each in texts)
        tokens = [shortened(each, wanted.truncate_prompt_tokens, frame, length) for each, frame in zip(tokens, frames)]
    usual = usual_pooling(ready.environment)
    normalize = usual.normalize if wanted.normalize is None else wanted.normalize

    def made(found: list[list[RequestOutput]]) -> list[Embedded]:
        vectors = [embedding(_parts(each), wanted.dimensions, normalize).tolist() for each in found]
        return [Embedded(prompt_token_ids=each, outputs=Embedding(embedding=vector)) for each, vector in zip(tokens, vectors)]

    return Asked(_pooled(maker, ready, tokens, wanted.pooling or usual.pooling, lora), made)


def scores(maker: TaskMaker, ready: EngineReady, prompts: Texts, answers: Texts, lora: AdapterChoice) -> Asked[Scored]:
    """As LLM.score. Raises InvalidRequest."""
    if SCORES in ready.environment:
        return _pair_scores(maker, ready, prompts, answers, lora)
    if len(prompts) != len(answers):
        counts = f"There are {len(prompts)} prompts and {len(answers)} answers"
        raise InvalidRequest(f"{counts}: give one for each; to compare texts, see embed.", "answers")
    adapters = maker.adapters.of(len(prompts), as_adapters(lora))
    asked = of_each(maker.tokens, [(prompt,) for prompt in prompts])
    pairs = [*zip(asked, of_each(maker.tokens, [(answer, False) for answer in answers], "answer"))]
    scorings = [Scoring(next(maker.names), *pair, maker.max_model_len, adapter) for pair, adapter in zip(pairs, adapters)]

    def made(found: list[list[RequestOutput]]) -> list[Scored]:
        logprobs = [scoring.logprobs(outputs) for scoring, outputs in zip(scorings, found)]
        return [
            Scored(prompt_token_ids=prompt, token_ids=answer, logprobs=each, cumulative_logprob=sum(each))
            for (prompt, answer), each in zip(pairs, logprobs)
        ]

    return Asked([each.request for each in scorings], made)


def _pair_scores(maker: TaskMaker, ready: EngineReady, queries: Texts, documents: Texts, lora: AdapterChoice) -> Asked[Scored]:
    """How alike each document is to its query, or to the only one. Raises InvalidRequest."""
    if len(queries) not in (1, len(documents)):
        counts = f"There are {len(queries)} queries and {len(documents)} documents"
        raise InvalidRequest(f"{counts}: give one query, or one for each.", "answers")
    whole = [*queries] * (len(documents) if len(queries) == 1 else 1)
    pairs = [(one, other) for one, other in zip(whole, documents) if isinstance(one, str) and isinstance(other, str)]
    if len(pairs) < len(whole):
        raise InvalidRequest("This model scores pairs of texts: give texts, not token ids.", "prompts")
    template = maker.template if ready.environment[SCORES] == WRITTEN_PAIRS else None
    tokens = [pair_prompt(maker.tokenizer, template, pair, ready.config.max_model_len) for pair in pairs]

    def made(found: list[list[RequestOutput]]) -> list[Scored]:
        likeness = [float(embedding(_parts(each), None, False)[0]) for each in found]
        return [Scored(prompt_token_ids=each, outputs=Score(score=score)) for each, score in zip(tokens, likeness)]

    return Asked(_pooled(maker, ready, tokens, usual_pooling(ready.environment).pooling, lora), made)


def _pooled(
    maker: TaskMaker, ready: EngineReady, tokens: Sequence[list[int]], kind: str, lora: AdapterChoice
) -> list[SubmitRequest]:
    """The requests for the prompts' vectors. Raises InvalidRequest."""
    adapters, length = maker.adapters.of(len(tokens), as_adapters(lora)), ready.config.max_model_len
    pairs = zip(tokens, adapters)
    return [replace(embedding_request(next(maker.names), each, kind, length), adapter=adapter) for each, adapter in pairs]


def _parts(outputs: list[RequestOutput]) -> list[PromptResult]:
    return [part for output in outputs for part in output.prompt]
