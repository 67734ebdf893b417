"""Text work: the threads that tokenize texts, decode tokens, compile grammars and render conversations beside the event loop.

Owns the length up to which the loop does the work itself, the bound on characters in work or in the queue, the return of free
memory to the system, and how often Python's collector searches in a process that serves. Long texts have separate threads, so
that short ones never wait for them. Templates run in Python: one thread renders them and yields the interpreter to the loop every
half millisecond.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from vnext.server.context.admission import Quota

Result = TypeVar("Result")

INLINE_CHARACTERS_MAX = 2_000  # more takes milliseconds, in which the loop could send no tokens
QUICK_CHARACTERS_MAX = 2**16  # a tenth of a second
TRIM_CHARACTERS_MIN = 2**18
THREADS = 2  # of each kind that releases the interpreter
SWITCH_INTERVAL_S = 0.0005  # how long the loop waits for a thread that runs Python code
_NICE = 5  # the engine has priority; a higher value makes the loop wait too long while such a thread holds the interpreter
_NEW_OBJECTS_MAX = 5_000
"""Before the collector looks at them, for a millisecond."""


class Shares:
    """How many threads of a pool one client has at once, so that others need not wait for it. One event loop uses it."""

    def __init__(self, each: int) -> None:
        self._each, self._of = each, WeakValueDictionary[str, asyncio.Semaphore]()

    async def submit(self, threads: ThreadPoolExecutor, client: str, work: Callable[[], Result]) -> Future[Result]:
        """Begin the work when the client has a thread left, which it has until the work ends, also when nobody waits any more."""
        if (share := self._of.get(client)) is None:
            share = self._of[client] = asyncio.Semaphore(self._each)
        await share.acquire()
        future, loop = threads.submit(work), asyncio.get_running_loop()
        future.add_done_callback(lambda _: in_loop(loop, share.release))
        return future


class TextWork:
    """Work on up to `characters_max` characters at once, half of them for one client."""

    def __init__(self, characters_max: int) -> None:
        # The library reads this environment variable. Without it, it starts threads on every core for a single text.
        os.putenv("TOKENIZERS_PARALLELISM", "false")
        self._quota = Quota(characters_max, characters_max // 2, "Texts of {} characters are being read")
        self._quick = ThreadPoolExecutor(THREADS, "short texts")
        self._long = ThreadPoolExecutor(THREADS, "long texts", _stand_back)
        self._templates = ThreadPoolExecutor(1, "templates")  # more would only contend for the interpreter
        self._grammars = ThreadPoolExecutor(THREADS, "grammars", _stand_back)
        self._media, self._media_shares = ThreadPoolExecutor(THREADS, "images", _stand_back), Shares(THREADS // 2)
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    @property
    def characters(self) -> int:
        return self._quota.amount

    async def run(self, characters: int, client: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which reads `characters` characters; returns its result. Raises Overloaded and the errors of `work`."""
        if characters <= INLINE_CHARACTERS_MAX:
            return work()
        return await self._run(self._quick if characters <= QUICK_CHARACTERS_MAX else self._long, characters, client, work)

    async def run_template(self, characters: int, client: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which renders `characters` characters in Python. Raises Overloaded and the errors of `work`."""
        return await self._run(self._templates, characters, client, work)

    async def run_grammar(self, characters: int, client: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which compiles a grammar of `characters` characters: a short one may take long too. Raises Overloaded and
        the errors of `work`."""
        return await self._run(self._grammars, characters, client, work)

    async def run_media(self, characters: int, client: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which reads media of so many characters or bytes, for each client one at a time. Raises Overloaded and the
        errors of `work`."""
        self._quota.take(characters, client)
        try:
            future = await self._media_shares.submit(self._media, client, work)
        except BaseException:  # its client has left
            self._quota.give(characters, client)
            raise
        return await self._result(future, characters, client)

    async def _run(
        self, threads: ThreadPoolExecutor, characters: int, client: str, work: Callable[[], Result]
    ) -> Result:
        self._quota.take(characters, client)
        return await self._result(threads.submit(work), characters, client)

    async def _result(self, future: Future[Result], characters: int, client: str) -> Result:
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: in_loop(loop, lambda: self._quota.give(characters, client)))
        try:
            return await asyncio.wrap_future(future)  # a cancelled future does not begin
        finally:
            if characters >= TRIM_CHARACTERS_MIN and not future.cancelled():
                self._quick.submit(trim)

    def close(self) -> None:
        """Start no more work."""
        for threads in (self._quick, self._long, self._templates, self._grammars, self._media):
            threads.shutdown(wait=False, cancel_futures=True)


def in_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Do work in a loop, from any thread, unless the loop is gone."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(work)


def _stand_back() -> None:
    if sys.platform == "linux":  # on other systems a thread has no separate priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def trim() -> None:
    """Return free memory to the system: glibc would keep it. Other C libraries return it themselves."""
    if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):
        give_back(0)


def settle() -> None:
    """Have the collector search for garbage rarely, and never among what lives by now. A request's objects die without it; only
    asyncio's connections are cycles. What reading the tokenizer has freed goes back to the system."""
    gc.collect()
    trim()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS_MAX)
