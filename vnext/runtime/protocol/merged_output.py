"""Merged outputs: all outputs of one request that were not passed on yet, in one entry however many tokens they hold."""

from __future__ import annotations

import time
from typing import Any

from vnext.runtime.protocol.messages import PromptResult, RequestOutput, TokenLogprobs
from vnext.runtime.protocol.stats import CacheMiss


class TakenOutput(RequestOutput, frozen=True, kw_only=True, array_like=True):
    """An output as its client takes it: when its first token and its finish came to this process, in seconds since the epoch; 0
    where neither is in it. A token that came alone has no time of its own."""

    first_s: float = 0.0
    finish_s: float = 0.0


class MergedOutput:
    """The outputs of one request, merged in order. Mutable."""

    __slots__ = (
        "accepted_drafts", "cached_tokens", "error", "finish", "finish_s", "first_s", "logprobs", "missed", "prompt",
        "queue_seconds", "rejected_drafts", "retained", "stop_token", "ticket", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.logprobs: list[TokenLogprobs] = []
        self.prompt: list[PromptResult] = []
        self.finish, self.error, self.stop_token, self.cached_tokens, self.queue_seconds = "", "", -1, 0, 0.0
        self.accepted_drafts = self.rejected_drafts = 0
        self.retained: tuple[int, int] | None = None
        self.ticket = ""
        self.missed: CacheMiss | None = None
        self.first_s = self.finish_s = 0.0

    def add(self, output: RequestOutput) -> None:
        if output.tokens and not self.tokens:
            self.first_s = time.time()
        if output.finish:
            self.finish_s = time.time()
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt += output.prompt
        self.finish, self.error, self.stop_token = output.finish, output.error, output.stop_token
        self.accepted_drafts, self.rejected_drafts = output.accepted_drafts, output.rejected_drafts
        self.retained = output.retained
        self.ticket = output.ticket
        self.missed = self.missed or output.missed
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.queue_seconds = max(self.queue_seconds, output.queue_seconds)

    def merged(self, name: str, number: int = -1) -> RequestOutput:
        return RequestOutput(**self._fields(name, number))

    def taken(self, name: str) -> TakenOutput:
        """`merged`, with its times."""
        return TakenOutput(first_s=self.first_s, finish_s=self.finish_s, **self._fields(name, -1))

    def _fields(self, name: str, number: int) -> dict[str, Any]:
        return {
            "name": name,
            "tokens": bytes(self.tokens),
            "finish": self.finish,
            "stop_token": self.stop_token,
            "cached_tokens": self.cached_tokens,
            "logprobs": tuple(self.logprobs),
            "number": number,
            "queue_seconds": self.queue_seconds,
            "error": self.error,
            "prompt": tuple(self.prompt),
            "accepted_drafts": self.accepted_drafts,
            "rejected_drafts": self.rejected_drafts,
            "retained": self.retained,
            "ticket": self.ticket,
            "missed": self.missed,
        }
