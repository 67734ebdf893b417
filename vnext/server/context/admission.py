"""Admission: bounds the answers that wait or run in this process, and the prompt tokens that wait, in all, per client and per
API key; closes it to new requests.

Owns the counts, the limits of a key, and the closing. A request over a bound is refused, and its client may retry when the measured
throughput (decayed over the last half minute in which there was any) has made room; nothing queues here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, exp

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import Draining, Overloaded, RateLimited
from vnext.server.context.key_counts import KeyCount, alone

CLIENT_SHARE = 3 / 4
REQUEST_SHARE = 1 / 16  # beginning 256 answers takes 20 ms of the event loop
SHARE_MIN = 128  # a smaller share would refuse reasonable single requests
INPUTS_MAX = 2048
"""Inputs of one request, as at OpenAI."""
MEMORY_S = 30.0
RETRY_MIN_S, RETRY_MAX_S = 1, 60


class Throughput:
    """A decayed mean: what ended t seconds ago counts e^(-t / MEMORY_S). Idle time does not count: who has some again, after there
    was none, sets `seen_s`. Mutable."""

    def __init__(self) -> None:
        self._amount = self._seconds = self.seen_s = 0.0

    def ended(self, amount: float, now_s: float) -> None:
        """So much has ended."""
        self._amount, self._seconds = self._until(now_s)
        self._amount += amount
        self.seen_s = now_s

    def per_second(self, now_s: float) -> float:
        """The rate at this moment, 0 if none has ended. A time in which nothing ends lowers it."""
        amount, seconds = self._until(now_s)
        return amount / seconds if seconds > 0 else 0.0

    def _until(self, now_s: float) -> tuple[float, float]:
        passed = exp(-max(0.0, now_s - self.seen_s) / MEMORY_S)
        return self._amount * passed, self._seconds * passed + MEMORY_S * (1 - passed)


def retry_after_s(amount: float, per_second: float) -> int:
    """Whole seconds in which `amount` ends at a rate, within the bounds above; the least where nothing was measured."""
    if per_second <= 0:
        return RETRY_MIN_S
    return max(RETRY_MIN_S, ceil(min(amount / per_second, RETRY_MAX_S)))


def share_of(count_max: int, part: float) -> int:
    """A part of a bound, or all of it where the bound is too small to be shared."""
    return min(count_max, max(SHARE_MIN, int(count_max * part)))


class Budget:
    """An amount a minute: refills steadily up to a minute's, and may be overdrawn by what is known only later. `row` has what is
    spent, and when that was so. Mutable."""

    def __init__(self, per_minute: int, clock: Callable[[], float], row: memoryview[float]) -> None:
        self._per_minute, self._clock, self._row = per_minute, clock, row

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 if it is now."""
        now_s, (spent, seen_s) = self._clock(), self._row
        spent = max(0.0, spent - (now_s - seen_s) * self._per_minute / 60)
        self._row[0], self._row[1] = spent, now_s
        return max(0.0, amount - (self._per_minute - spent)) * 60 / self._per_minute

    def spend(self, amount: float) -> None:
        self._row[0] += amount


class KeyLimits:
    """The limits of one key. A request needs a request's budget and one token of it; its tokens are spent as they become known,
    so a budget of tokens may be overdrawn by the answers in progress, and the next request waits longer. Mutable."""

    def __init__(
        self,
        requests: int,
        tokens: int,
        answers_max: int,
        count: KeyCount | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count`: what several processes count together; the clock is then one for all of them."""
        self._count = count or alone()
        self._requests = Budget(requests, clock, self._count.row[:2]) if requests else None
        self._tokens = Budget(tokens, clock, self._count.row[2:4]) if tokens else None
        self._answers_max = answers_max

    def enter(self, answers: int) -> None:
        """Begin a request of so many answers. Raises RateLimited, and has spent nothing then."""
        with self._count.lock:
            self._enter(answers)

    def _enter(self, answers: int) -> None:
        held = self._count.answers
        if self._answers_max and held + answers > self._answers_max:
            sentence = f"This key has {held} answers in progress and {answers} more would pass its bound"
            raise RateLimited(f"{sentence} of {self._answers_max}: try again later.")
        for budget, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if budget is not None and (wait_s := budget.wait_s(1)):
                seconds = min(RETRY_MAX_S, max(RETRY_MIN_S, int(wait_s + 1)))
                raise RateLimited(f"This key has used its {what} of a minute: try again in {wait_s:.0f} s.", seconds)
        if self._requests is not None:
            self._requests.spend(1)
        self._count.add_answers(answers)

    def leave(self, answers: int) -> None:
        self._count.add_answers(-answers)

    def spend(self, tokens: int) -> None:
        """Tokens of a prompt or of an answer."""
        if self._tokens is not None:
            with self._count.lock:
                self._tokens.spend(tokens)


class Quota:
    """A bounded amount, of which one client may hold `share_max`. `words` begin the refusal: "{} bytes are being read".
    `first_is_free`: a client that holds nothing may pass its own bound, and anyone the bound of all while nothing is held, so
    that no amount is refused for ever. Mutable."""

    def __init__(
        self,
        amount_max: int,
        share_max: int,
        words: str,
        first_is_free: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.amount_max = amount_max
        self.amount = 0
        self._share_max = share_max
        self._words = words
        self._first_is_free = first_is_free
        self._clock = clock
        self._held: dict[str, int] = {}
        self._throughput = Throughput()

    def take(self, amount: int, client: str) -> None:
        """Take an amount. On Overloaded, nothing is taken."""
        mine = self._held.get(client, 0)
        for held, bound, whose in ((mine, self._share_max, "your "), (self.amount, self.amount_max, "the ")):
            if held + amount > bound and (held or not self._first_is_free):
                words = self._words.format(held)
                sentence = f"{words} and {amount} more would pass {whose}bound of {bound}: try again later."
                raise Overloaded(sentence, self._retry_after_s(held + amount - bound, held))
        if not self.amount:
            self._throughput.seen_s = self._clock()
        self._held[client] = mine + amount
        self.amount += amount

    def give(self, amount: int, client: str) -> None:
        """Return an amount that was taken."""
        self.amount -= amount
        self._throughput.ended(amount, self._clock())
        self._held[client] = self._held.get(client, 0) - amount
        if not self._held[client]:
            del self._held[client]

    def _retry_after_s(self, surplus: int, held: int) -> int:
        """When `surplus` of what is held has ended, at its part of the throughput."""
        part = held / self.amount if self.amount else 1.0
        return retry_after_s(surplus, part * self._throughput.per_second(self._clock()))


class WaitingPrompts:
    """The prompt tokens of one call, from its admission until each answer's first token. Mutable."""

    def __init__(self, quota: Quota, client: str, amount: int) -> None:
        self._quota, self._client, self._left = quota, client, amount

    def begun(self, amount: int) -> None:
        """An answer with a prompt of so many tokens has begun."""
        amount = min(amount, self._left)
        self._left -= amount
        self._quota.give(amount, self._client)

    def end(self) -> None:
        self.begun(self._left)


class RequestLimiter:
    """Counts live answers, up to `count_max` in all and up to a share of it for one request or one client, and the prompt tokens
    of answers that have not begun, up to `waiting_tokens_max` (0: no bound). `limits_of` gives a client's limits by its key. A
    request with more answers than `request_max` has them in waves of so many."""

    def __init__(
        self,
        count_max: int,
        request_max: int = 0,
        client_max: int = 0,
        waiting_tokens_max: int = 0,
        limits_of: Callable[[str], KeyLimits | None] = lambda client: None,
    ) -> None:
        """Shares of 0 follow `count_max`: a sixteenth at a time for a request, three quarters for a client."""
        self.request_max = min(count_max, request_max or share_of(count_max, REQUEST_SHARE))
        self.inputs_max = self.request_max if request_max else INPUTS_MAX
        client_max = min(count_max, client_max or share_of(count_max, CLIENT_SHARE))
        self._quota = Quota(count_max, client_max, "{} answers are in progress")
        share = int(waiting_tokens_max * CLIENT_SHARE)
        words = "{} tokens of prompts are waiting"
        self._tokens = Quota(waiting_tokens_max, share, words, first_is_free=True) if waiting_tokens_max else None
        self._limits_of = limits_of
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def live_count(self) -> int:
        """Answers that wait or run."""
        return self._quota.amount

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of answers that have not begun; 0 where they have no bound."""
        return self._tokens.amount if self._tokens else 0

    def check_inputs(self, count: int, param: str) -> None:
        """Raise InvalidRequest for more entries of the field `param` than one request may have."""
        if count > self.inputs_max:
            sentence = f"{param} has {count} entries: at most {self.inputs_max} are allowed, send several requests."
            raise InvalidRequest(sentence, param)

    @contextmanager
    def enter(self, count: int, client: str = "", in_waves: bool = False) -> Iterator[None]:
        """Reserve `count` answers; `in_waves`: those that are in progress at a time. Raises Draining, Overloaded, RateLimited,
        InvalidRequest (over the bound of one request)."""
        if self._closed:
            self.check_open()
        count_max = self.inputs_max if in_waves else self.request_max
        if count > count_max:
            raise InvalidRequest(
                f"The request asks for {count} answers: at most {count_max} are allowed, send several requests.", "n"
            )
        count = min(count, self.request_max)
        self._quota.take(count, client)
        self._empty.clear()
        entered = None
        try:
            if (limits := self._limits_of(client)) is not None:
                limits.enter(count)
                entered = limits
            yield
        finally:
            if entered is not None:
                entered.leave(count)
            self._quota.give(count, client)
            if self._quota.amount == 0:
                self._empty.set()

    def prompts(self, tokens: int, client: str) -> WaitingPrompts | None:
        """Reserve the tokens of a call's prompts, until `end`; None where those that wait have no bound. Raises Overloaded."""
        if self._tokens is not None:
            self._tokens.take(tokens, client)
        self.spend(tokens, client)
        return None if self._tokens is None else WaitingPrompts(self._tokens, client, tokens)

    def spend(self, tokens: int, client: str) -> None:
        """Count tokens of a prompt or an answer towards the limits of the client's key."""
        if (limits := self._limits_of(client)) is not None:
            limits.spend(tokens)

    def check_open(self) -> None:
        """Raise Draining once the limiter is closed."""
        if self._closed:
            raise Draining("The server is shutting down: send the request to another one.")

    def close(self) -> None:
        self._closed = True

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait for all answers to end; returns whether they did within `timeout_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
