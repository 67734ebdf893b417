"""Answer: one request's outputs become text, with its stop strings obeyed and its tokens counted.

Owns the order of things: token -> text -> stop strings -> what may be given out. Tokens are taken one by one, so that
the result does not depend on how outputs were merged on their way; tokens after a stop string are no part of the
answer. Shared by the HTTP edge and the library; sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.runtime.messages import RequestOutput, TokenLogprobs
from vnext.sampling_params import SamplingParams
from vnext.server.text.stops import StopScanner
from vnext.server.text.tokenizer import Tokenizer
from vnext.state.events import unpack_tokens


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one output added. `finish` is "" while the answer goes on, else "stop", "length" or "abort".

    `tokens` are those whose text is part of the answer, `offsets` the characters that the answer had before each (a
    character of several tokens counts from the last one on), `logprobs` one entry for each if they were asked for.
    `token_count` is the whole answer's so far, a stop token included. `stop_reason` is what the request
    asked to be stopped by and was: a string, or a token of `stop_token_ids`; the model's own end tokens are none.
    """

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    token_count: int
    finish: str
    stop_reason: str | int | None = None


class Answer:
    """The text of one request that continues the tokens `prompt`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer(prompt, params.skip_special_tokens)
        self._stops = StopScanner(params.stop_strings(), params.include_stop_str_in_output)
        self._show_stop_token = params.include_stop_str_in_output
        self._stop_token_ids = params.stop_token_ids
        self._min_tokens = params.min_tokens
        self._length = 0
        self.token_count = 0
        self.cached_token_count = 0

    def push(self, output: RequestOutput) -> Delta:
        """Take an output in. A delta that finishes while the output does not: a stop string was found, abort it."""
        self.cached_token_count = max(self.cached_token_count, output.cached_tokens)
        tokens = unpack_tokens(output.tokens).tolist()
        hidden = output.stop_token >= 0 and tokens[-1:] == [output.stop_token] and not self._show_stop_token
        shown = tokens[:-1] if hidden else tokens
        texts, offsets = [], []
        for token in shown:
            if self._stops.found is None:
                offsets.append(self._length)
                texts.append(self._take(token))
        if self._stops.found is None:
            self.token_count += hidden
            texts.append(self._end() if output.finish else "")
        found = self._stops.found
        return Delta(
            text="".join(texts),
            tokens=tuple(shown[: len(offsets)]),
            offsets=tuple(offsets),
            logprobs=output.logprobs[: len(offsets)],
            token_count=self.token_count,
            finish=output.finish if found is None else "stop",
            stop_reason=self._stop_token(output) if found is None else found,
        )

    def _take(self, token: int) -> str:
        self.token_count += 1
        text = self._detokenizer.push(token)
        self._length += len(text)
        if self.token_count <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _end(self) -> str:
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    def _stop_token(self, output: RequestOutput) -> int | None:
        return output.stop_token if output.stop_token in self._stop_token_ids else None
