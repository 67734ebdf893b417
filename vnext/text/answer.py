"""Answer: turns one request's outputs into text, obeys its stop strings and counts its tokens.

Owns the pipeline: token -> text -> stop strings -> text to emit. Takes tokens one by one, so that the result does not depend
on how outputs were merged in transit; tokens after a stop string are not part of the answer. The API server and the library
share it; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.runtime.protocol.messages import PromptResult, RequestOutput, TokenLogprobs
from vnext.runtime.protocol.sampling_params import UncheckedParams
from vnext.runtime.protocol.stats import CacheMiss
from vnext.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The change that one output made. `finish` is "" while the answer goes on, else "stop", "length" or "abort".

    `tokens` are those whose text is part of the answer, `offsets` the number of characters before each of them (a character
    of several tokens counts from the last token on), `length` that of all characters so far, also of those that may yet prove to
    begin a stop string. `token_ids` are all tokens of the output, a stop token included, `logprobs`
    one entry for each of these, if requested; `token_count` counts the whole answer so far. `stop_reason` is the stop string or the
    token of `stop_token_ids` that ended the answer; the model's own end tokens set none.
    """

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    token_ids: tuple[int, ...]
    token_count: int
    finish: str
    stop_reason: str | int | None = None
    length: int = 0


class Answer:
    """The text of one request that continues the tokens `prompt`. `prompt`, of an answer: what came of its prompt so far. With
    `max_tokens` 0 the answer is empty: the one token that its request samples is dropped."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: UncheckedParams) -> None:
        self._detokenizer = tokenizer.detokenizer(prompt, params.skip_special_tokens)
        self._stops = StopScanner(params.stop_strings(), params.include_stop_str_in_output)
        self._show_stop_token = params.include_stop_str_in_output
        self._stop_token_ids = params.stop_token_ids
        self._min_tokens = params.min_tokens
        self._is_empty = params.max_tokens == 0
        self.prompt: list[PromptResult] = []
        self._length = 0
        self.token_count = 0
        self.cumulative_logprob = 0.0
        self.cached_token_count = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self.retained: tuple[int, int] | None = None
        self.missed: CacheMiss | None = None

    @property
    def is_scanned(self) -> bool:
        """Whether the text is searched for stop strings."""
        return self._stops.is_needed

    @property
    def length(self) -> int:
        """The characters of the answer so far."""
        return self._length

    def plain_text(self, token: int) -> str:
        """Take in one token of an answer that is not scanned and goes on; returns its text. `push` without the delta."""
        self.token_count += 1
        text = self._detokenizer.push(token)
        self._length += len(text)
        return text

    def push(self, output: RequestOutput) -> Delta:
        """Take in an output. If the delta finishes and the output does not, a stop string was found: abort the request."""
        self.cached_token_count = max(self.cached_token_count, output.cached_tokens)
        self.accepted_drafts, self.rejected_drafts = output.accepted_drafts, output.rejected_drafts
        self.retained = output.retained
        self.missed = self.missed or output.missed
        self.prompt += output.prompt
        if self._is_empty:
            finish = "length" if output.finish == "stop" else output.finish
            output = msgspec.structs.replace(output, tokens=b"", logprobs=(), finish=finish, stop_token=-1)
        tokens = memoryview(output.tokens).cast("i").tolist()
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
        taken = tokens if self._stops.found is None else shown[: len(offsets)]
        self.cumulative_logprob += sum(each.logprob for each in output.logprobs[: len(taken)])
        return Delta(
            text="".join(texts),
            tokens=tuple(shown[: len(offsets)]),
            offsets=tuple(offsets),
            logprobs=output.logprobs[: len(taken)],
            token_ids=tuple(taken),
            token_count=self.token_count,
            finish=output.finish if found is None else "stop",
            stop_reason=self._stop_token(output) if found is None else found,
            length=self._length,
        )

    def _take(self, token: int) -> str:
        self.token_count += 1
        text = self._detokenizer.push(token)
        self._length += len(text)
        if self.token_count <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _end(self) -> str:
        rest = self._detokenizer.finish()
        self._length += len(rest)
        return self._stops.push(rest) + self._stops.finish()

    def _stop_token(self, output: RequestOutput) -> int | None:
        return output.stop_token if output.stop_token in self._stop_token_ids else None


# ---- stop strings ------------------------------------------------------------------------------------------------
# Stop strings: find the end of an answer's text, independent of token boundaries.
#
# Owns the text that is held back because it may begin a stop string. The stop string that is completed first ends the text; of
# several that the same character completes, the one that began first. So the result does not depend on the pieces in which the
# text came.


class StopScanner:
    """Searches one text for `stops`. With `include`, the text keeps the found string at its end."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[:1] for stop in stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Take in `text`; returns the text to emit. Once `found` is set, it was the last."""
        if not self._stops:
            return text
        held = self._held + text
        if self._firsts.isdisjoint(held):
            self._held = ""
            return held
        match = min((found for stop in self._stops if (found := _find(held, stop))), default=None)
        if match is not None:
            end, start = match
            self.found, self._held = held[start:end], ""
            return held[:end] if self._include else held[:start]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def finish(self) -> str:
        """The text that is still held back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _find(text: str, stop: str) -> tuple[int, int] | None:
    """(end, start) of the first occurrence."""
    start = text.find(stop)
    return None if start < 0 else (start + len(stop), start)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
