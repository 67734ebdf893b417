"""Waiting: how long a request waited in milliseconds, for what, and whose tokens the engine computed meanwhile.

Owns the clock of one request's life: the time from one plan to the next belongs to what the request waited for in the first.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from vnext.state.state import State, StepInFlight

MAIN_SHARE = 0.5
"""A client with this share of the tokens computed meanwhile is named, and a request with half of this share."""
IN_TIME_MS = 10.0
NOTICED_MS = 50.0
"""A request that waits less for the step that takes it has not waited."""
WORDS = {
    "sequences": "sequences (--max-num-seqs)", "budget": "the token budget (--max-num-batched-tokens)", "blocks": "free blocks",
    "order": "requests before it", "step": "a step to be planned", "pause": "the end of a pause", "recovery": "new ranks",
    "adapter": "a slot for its adapter", "disk": "blocks on disk", "room": "free blocks", "preempted": "free blocks",
    "preemption": "its turn after a preemption", "caution": "requests that come back one by one",
    "microbatch": "its part's turn", "states": "free state pages",
    "inputs": "images and sounds before it",
}  # fmt: skip


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in ms, None where the log has none: from the arrival to the first token, to the end and, of a request without a token,
    to where the log last left it out; and by what it waited for, longest first. While it waited, `client` (hexadecimal, "" for none
    known) and `request` (-1 for none) had most of the computed tokens, these shares of them."""

    first_ms: float | None = None
    whole_ms: float | None = None
    tokenless_ms: float | None = None
    by_reason: dict[str, float] = {}
    client: str = ""
    client_share: float = 0.0
    request: int = -1
    request_share: float = 0.0

    @property
    def line(self) -> str:
        """The answer in one line, "" where no time is known."""
        if self.first_ms is not None:
            whole = f"first token after {self.first_ms:,.0f} ms" + (f", end after {self.whole_ms:,.0f} ms" if self.whole_ms else "")
        elif self.tokenless_ms:
            whole = f"no token in {self.tokenless_ms:,.0f} ms"
        else:
            return ""
        reason, ms = next(iter(self.by_reason.items()), ("", 0.0))
        if ms < (NOTICED_MS if reason == "step" else 1.0):
            return f"{whole}: it did not wait"
        return f"{whole}: {ms:,.0f} ms waited for {WORDS.get(reason, reason)}{self._who()}"

    def _who(self) -> str:
        if self.client and self.client_share >= MAIN_SHARE:
            return f", while client {self.client[:8]} had {self.client_share:.0%} of the tokens (most for request {self.request})"
        if self.request_share >= MAIN_SHARE / 2:
            return f", while request {self.request} had {self.request_share:.0%} of the tokens"
        return ""


class WaitClock:
    """The waits of one request while the log is folded; times are microseconds, None where unknown. Mutable."""

    def __init__(self) -> None:
        self._came_us: float | None = None
        self._first_us: float | None = None
        self._last_us: float | None = None
        self._since_us: float | None = None
        self._reason = ""
        self._by_reason: dict[str, float] = {}
        self._tokens: Counter[int] = Counter()  # by request
        self._clients: Counter[int] = Counter()

    def arrive(self, us: float | None, reason: str) -> None:
        """The request arrives, and waits for `reason` until a step is planned."""
        self._came_us = self._since_us = us
        self._reason = reason

    def wait(self, reason: str, us: float | None, during: StepInFlight | None = None, state: State | None = None) -> None:
        """From now on the request waits for `reason`, "" if it does not; `during` is the step that leaves it out."""
        if us is not None and self._since_us is not None and self._reason:
            self._by_reason[self._reason] = self._by_reason.get(self._reason, 0.0) + max(us - self._since_us, 0.0)
        self._since_us, self._reason = us, reason
        if during is not None and state is not None:
            for id_, count in zip(during.ids.tolist(), during.counts.tolist()):
                self._tokens[id_] += count
                self._clients[state.requests[id_].client] += count

    def sample(self, us: float | None) -> None:
        """The request gets a token."""
        self._first_us = us if self._first_us is None else self._first_us
        self._last_us = us

    def waits(self) -> Waits:
        """What is known at the end."""
        everyone = sum(self._tokens.values()) or 1
        (client, of_client), (request, of_request) = (
            max(counts.items(), key=lambda pair: (pair[1], -pair[0]), default=(none, 0))
            for counts, none in ((self._clients, 0), (self._tokens, -1))
        )  # fmt: skip
        longest = sorted(self._by_reason.items(), key=lambda pair: -pair[1])
        return Waits(
            first_ms=self._passed(self._first_us), whole_ms=self._passed(self._last_us),
            tokenless_ms=self._passed(self._since_us) if self._first_us is None else None,
            by_reason={why: us / 1e3 for why, us in longest},
            client=f"{client:016x}" if client else "", client_share=of_client / everyone, request=request,
            request_share=of_request / everyone,
        )  # fmt: skip

    def _passed(self, us: float | None) -> float | None:
        return None if us is None or self._came_us is None else (us - self._came_us) / 1e3


def in_time(reason_ms: dict[str, float]) -> str:
    return ", ".join(f"{why} {ms:,.0f} ms" for why, ms in reason_ms.items() if ms >= IN_TIME_MS)

