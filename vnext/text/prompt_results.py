"""Prompt results: what the engine computed of a prompt, put together from the parts that its steps sent.

Owns the requests whose results are an embedding or the score of a given answer. A part may come twice, after a preemption, with
the same bits. What becomes an array is prompt_arrays.py's: most programs need no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vnext.runtime.protocol.messages import AdapterFiles, PromptResult, RequestOutput, SubmitRequest, TokenLogprobs
from vnext.runtime.protocol.reasons import NORMALIZED
from vnext.runtime.protocol.sampling_params import InvalidRequest, context_exceeded
from vnext.state.events import pack_tokens
from vnext.state.params import POOLINGS, Constraint, Sampling

if TYPE_CHECKING:
    from vnext.text.template import ChatTemplate
    from vnext.text.tokenizer import Tokenizer

EMBEDDING_TOKENS = 1
"""An embedding's request asks for one token, which is dropped: a request of the engine ends with a sample."""


def prompt_logprobs(parts: Iterable[PromptResult], prompt_length: int) -> list[TokenLogprobs | None]:
    """One entry per token of the prompt, None for the first, which follows nothing."""
    entries: list[TokenLogprobs | None] = [None] * prompt_length
    for part in parts:
        logprobs, ranks = memoryview(part.logprobs).cast("f"), memoryview(part.ranks).cast("i")
        tokens, tops = memoryview(part.top_tokens).cast("i").tolist(), memoryview(part.top_logprobs).cast("f").tolist()
        width = len(tokens) // max(len(ranks), 1)
        for place, (logprob, rank) in enumerate(zip(logprobs, ranks)):
            own = slice(place * width, (place + 1) * width)
            entries[part.first + place] = TokenLogprobs(logprob=logprob, rank=rank, top=tuple(zip(tokens[own], tops[own])))
    return entries


class Pooled(NamedTuple):
    """How states become a vector: one of POOLINGS, and whether its length is 1."""

    pooling: str
    normalize: bool


def usual_pooling(environment: Mapping[str, str]) -> Pooled:
    """That of requests that say nothing, by the engine's environment."""
    named = environment.get("pooling", "last" + NORMALIZED)
    return Pooled(named.removesuffix(NORMALIZED), named.endswith(NORMALIZED))


def shortened(prompt: list[int], asked: int, frame: list[int], model_length: int) -> list[int]:
    """The first `asked` tokens of a text, -1 for as many as the model takes. `frame`: the tokens of an empty text; those of its end
    stay at the end. Raises InvalidRequest."""
    room = model_length - EMBEDDING_TOKENS
    if asked != -1 and not 1 <= asked <= room:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}: it must lie between 1 and the model's {room} tokens, or be -1.",
            "truncate_prompt_tokens",
        )
    count = room if asked == -1 else asked
    if len(prompt) <= count:
        return prompt
    begun = next((at for at, pair in enumerate(zip(prompt, frame)) if pair[0] != pair[1]), len(frame))
    end = frame[begun:][-count:]
    return [*prompt[: count - len(end)], *end]


def embedding_request(name: str, prompt: list[int], pooling: str, model_length: int) -> SubmitRequest:
    """The request whose result is the embedding of `prompt`. Raises InvalidRequest for an unknown pooling or a prompt that is
    too long."""
    if pooling not in POOLINGS[1:]:
        raise InvalidRequest(f"pooling is {pooling!r}: it must be one of {', '.join(POOLINGS[1:])}.", "pooling")
    room = model_length - EMBEDDING_TOKENS
    if len(prompt) > room:
        raise context_exceeded(room, f"the input has {len(prompt)} tokens", "input", "input")
    sampling = Sampling(seed=0, max_tokens=EMBEDDING_TOKENS, temperature=0.0, pooling=POOLINGS.index(pooling))
    return SubmitRequest(name=name, prompt=pack_tokens(prompt), sampling=sampling)


class Scoring:
    """The score of one answer: its request, and what is read of the outputs.

    The prompt and all of the answer but its last token are a prompt whose tokens are scored. The last token is the only one that
    the request may sample, so it takes no room beyond its own. Penalties, temperature and limits do not change what is reported.
    """

    def __init__(
        self, name: str, prompt: list[int], answer: list[int], model_length: int, adapter: AdapterFiles | None = None
    ) -> None:
        """`answer` has a token at least. Raises InvalidRequest for more than `model_length` tokens together."""
        if (count := len(prompt) + len(answer)) > model_length:
            raise context_exceeded(model_length, f"prompt and answer have {count} tokens", "answer", "answers")
        self._first, self._scored = len(prompt), [*prompt, *answer[:-1]]
        only = Constraint(allowed=(answer[-1],))
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=0, prompt_logprobs=0, constraint=only, ignore_eos=True)
        self.request = SubmitRequest(name=name, prompt=pack_tokens(self._scored), sampling=sampling, adapter=adapter)

    def logprobs(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Those of the answer's tokens, by all outputs of the request."""
        parts = (part for output in outputs for part in output.prompt)
        last = (entry for output in outputs for entry in output.logprobs)
        entries = [*prompt_logprobs(parts, len(self._scored))[self._first :], *last]
        return [entry.logprob for entry in entries if entry is not None]


NO_TEMPLATE = "This model's chat template writes the pairs that it scores, and its folder has none: add chat_template.jinja to it."


def pair_prompt(
    tokenizer: Tokenizer, template: ChatTemplate | None, pair: tuple[str, str], model_length: int, asked: int | None = None
) -> list[int]:
    """The tokens of a query and a document. `template` writes them, as messages of these roles; where it is None the tokenizer
    joins them, and the pair is `shortened` to `asked` tokens, at the document's end. Raises InvalidRequest."""
    if template is not None:
        if asked is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens would cut off what the chat template writes behind the document: shorten the document.",
                "truncate_prompt_tokens",
            )
        written = template.render([{"role": role, "content": text} for role, text in zip(("query", "document"), pair)], {})
        return tokenizer.encode(written, add_special_tokens=False)
    tokens = tokenizer.encode_pair(*pair)
    return tokens if asked is None else shortened(tokens, asked, tokenizer.encode(""), model_length)
