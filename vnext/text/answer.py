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
    """The text of one request that continues the tokens `prompt`. `prompt`, of an answer: what came of its prompt so far.
    `scanner` searches the text for stop strings, None where there are none. `length`: the characters so far. With `max_tokens` 0
    the answer is empty: the one token that its request samples is dropped. Of a `negative` prompt that is longer, what the cache
    held is not the prompt's."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: UncheckedParams, negative: Sequence[int] = ()) -> None:
        self._is_longer = len(prompt) >= len(negative)
        self._detokenizer = tokenizer.detokenizer(prompt, params.skip_special_tokens)
        self.scanner = StopScanner(params.stop_strings(), params.include_stop_str_in_output) if params.stop else None
        self._params = params
        self._min_tokens = params.min_tokens
        self._is_empty = params.max_tokens == 0
        self.prompt: list[PromptResult] = []
        self.length = 0
        self.token_count = 0
        self.cumulative_logprob = 0.0
        self.cached_token_count = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self.retained: tuple[int, int] | None = None
        self.missed: CacheMiss | None = None

    def plain_text(self, token: int) -> str:
        """Take in one token; returns its text. Of an answer that is not scanned and goes on, `push` without the delta."""
        self.token_count += 1
        text = self._detokenizer.push(token)
        self.length += len(text)
        return text

    def push(self, output: RequestOutput) -> Delta:
        """Take in an output. If the delta finishes and the output does not, a stop string was found: abort the request."""
        if self._is_longer:
            self.cached_token_count = max(self.cached_token_count, output.cached_tokens)
        self.accepted_drafts, self.rejected_drafts = output.accepted_drafts, output.rejected_drafts
        self.retained = output.retained
        self.missed = self.missed or output.missed
        self.prompt += output.prompt
        if self._is_empty:
            finish = "length" if output.finish == "stop" else output.finish
            output = msgspec.structs.replace(output, tokens=b"", logprobs=(), finish=finish, stop_token=-1)
        tokens = memoryview(output.tokens).cast("i").tolist()
        hidden = output.stop_token >= 0 and tokens[-1:] == [output.stop_token] and not self._params.include_stop_str_in_output
        shown = tokens[:-1] if hidden else tokens
        scanner, texts, offsets = self.scanner, [], []
        for token in shown:
            if scanner is None or scanner.found is None:
                offsets.append(self.length)
                text = self.plain_text(token)
                texts.append(text if scanner is None or self.token_count <= self._min_tokens else scanner.push(text))
        if scanner is None or scanner.found is None:
            self.token_count += hidden
            if output.finish:
                rest = self._detokenizer.finish()
                self.length += len(rest)
                texts.append(rest if scanner is None else scanner.push(rest) + scanner.finish())
        found = None if scanner is None else scanner.found
        taken = tokens if found is None else shown[: len(offsets)]
        self.cumulative_logprob += sum(each.logprob for each in output.logprobs[: len(taken)])
        return Delta(
            text="".join(texts),
            tokens=tuple(shown[: len(offsets)]),
            offsets=tuple(offsets),
            logprobs=output.logprobs[: len(taken)],
            token_ids=tuple(taken),
            token_count=self.token_count,
            finish=output.finish if found is None else "stop",
            stop_reason=found or (output.stop_token if output.stop_token in self._params.stop_token_ids else None),
            length=self.length,
        )


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

    def push(self, text: str) -> str:
        """Take in `text`; returns the text to emit. Once `found` is set, it was the last."""
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
