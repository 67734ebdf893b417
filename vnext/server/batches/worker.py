"""Worker: runs the batches of a store, those of one owner one after the other, each with several requests at once.

Owns their course: check, run, finish, expire, cancel. An owner whose limits make a batch wait delays nobody else's. Results are
appended as they come, so that a batch goes on where it stood when a server ended. Live requests go first: a batch starts a
request only while the engine keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

import msgspec

from vnext.base.spelling import reason
from vnext.server.batches.lines import Answer, LineBounds, Request, answered, body_of, faults_of, requests_of, result_line
from vnext.server.batches.store import (
    LIVE,
    Batch,
    Counts,
    Faults,
    Spent,
    Status,
    Store,
    Usage,
    append,
    new_id,
    spent_by,
    spent_in,
    writing,
)
from vnext.server.context.errors import StoreUnusable

PAUSE_S = 0.05
RETRY_S, WRITE_PAUSE_S = 1.0, 10.0
RETRIED = (408, 429, 503)
"""Statuses that say to try again later."""
TRIES_MAX = 3
"""Of a request on which the server fails for another reason."""

Ask = Callable[[str, bytes], Awaitable[Answer]]
"""Sends a body to a path of the server."""
Keep = Callable[[Request, Answer], None]
log = logging.getLogger("vnext.server")


async def run_requests(requests: Iterable[Request], ask: Ask, keep: Keep, width: int, is_free: Callable[[], bool]) -> None:
    """Ask for the answers to `requests`, `width` at once, while `is_free`; `keep` gets each, a fault of the server only after
    TRIES_MAX of them. Cancelling it ends them, and so does an error of `is_free`. `requests` are read in a thread."""
    running: set[asyncio.Task[None]] = set()

    async def one(request: Request, body: bytes) -> None:
        tries = 0
        while (answer := await ask(request.url, body)).status in RETRIED or (answer.is_fault and (tries := tries + 1) < TRIES_MAX):
            await asyncio.sleep(RETRY_S)
        keep(request, answer)

    try:
        reader = ((request, body_of(request)) for request in requests)
        while (read := await asyncio.to_thread(next, reader, None)) is not None:
            while len(running) >= width or not is_free():
                running = await _unfinished(running, PAUSE_S)
            running |= {asyncio.create_task(one(*read))}
        while running:
            is_free()  # where nobody answers any more it raises, and those that try again would do so for ever
            running = await _unfinished(running, RETRY_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _unfinished(tasks: set[asyncio.Task[None]], timeout_s: float) -> set[asyncio.Task[None]]:
    """Those that are left once one has ended or the time is over. Raises the error of one that failed."""
    if not tasks:
        await asyncio.sleep(timeout_s)
        return tasks
    done, left = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left


class Worker:
    """Runs until cancelled. `news` is set when a batch was added or cancelled; `asker` gives what asks for an owner; `bounds` are
    those of a line."""

    def __init__(
        self, store: Store, asker: Callable[[str], Ask], width: int, is_free: Callable[[], bool], bounds: LineBounds
    ) -> None:
        self._store, self._asker, self._width, self._is_free, self._bounds = store, asker, width, is_free, bounds
        self.news = asyncio.Event()
        self._current: dict[str, tuple[str, asyncio.Task[None]] | None] = {}

    async def run(self) -> None:
        """Take the oldest live batch of each owner, again and again."""
        async with asyncio.TaskGroup() as owners:
            while True:
                self.news.clear()
                for owner in {each.owner or "" for each in self._store.batches.values() if each.status in LIVE}:
                    if owner not in self._current:
                        self._current[owner] = None
                        owners.create_task(self._run_owner(owner))
                await self.news.wait()

    async def _run_owner(self, owner: str) -> None:
        """Run the live batches of an owner, the oldest first, until none is left."""
        while batch := next(
            (each for each in self._store.batches.values() if each.status in LIVE and (each.owner or "") == owner), None
        ):
            task = asyncio.create_task(self._run(batch))
            self._current[owner] = batch.id, task
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self._current[owner] = None
            try:
                self._after(batch.id, task)
            except StoreUnusable as error:
                log.warning("the batch %s waits until its folder can be written (%s)", batch.id, reason(error.__cause__ or error))
                await asyncio.sleep(WRITE_PAUSE_S)
        del self._current[owner]

    def cancel(self, batch: Batch) -> Batch:
        """Begin to cancel a batch; one that has ended stays as it is."""
        if batch.status not in LIVE:
            return batch
        batch = self._store.turn(batch.id, "cancelling")
        for id_, task in filter(None, self._current.values()):
            if id_ == batch.id:
                task.cancel()
        self.news.set()
        return batch

    def _after(self, id_: str, task: asyncio.Task[None]) -> None:
        """What became of a batch whose task has ended. Raises StoreUnusable; it may be run again then."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreUnusable):
            raise error
        if self._store.batches[id_].status == "cancelling":
            self._finish(id_, "cancelled")
        elif error is not None:
            log.error("the batch %s failed", id_, exc_info=error)
            self._store.turn(id_, "failed", errors=Faults(data=[]))

    async def _run(self, batch: Batch) -> None:
        if batch.status == "cancelling":
            return
        if batch.output_file_id or batch.error_file_id:  # a server ended while it finished this one
            self._finish(batch.id, "completed")
            return
        path = self._store.content(batch.input_file_id)
        count, faults = await asyncio.to_thread(faults_of, path, self._bounds, batch.endpoint)
        if faults:
            self._store.turn(batch.id, "failed", errors=Faults(data=faults))
            return
        good, bad = self._store.results(batch.id)
        with writing():  # a torn line is cut off
            done_good, done_bad = await asyncio.to_thread(lambda: (answered(good), answered(bad)))
            spent = await asyncio.to_thread(spent_in, good)
        counts = Counts(total=count, completed=len(done_good), failed=len(done_bad))
        self._store.turn(batch.id, "in_progress", request_counts=counts, usage=spent.usage, model=spent.model)
        done, found = done_good | done_bad, requests_of(path, self._bounds)
        left = (each for each in found if isinstance(each, Request) and each.custom_id not in done)

        def keep(request: Request, answer: Answer) -> None:
            append(good if answer.is_good else bad, result_line(request.custom_id, answer))
            self._count(batch.id, answer)

        await run_requests(_until(left, batch.expires_at), self._asker(batch.owner or ""), keep, self._width, self._is_free)
        counts = self._store.batches[batch.id].request_counts
        is_whole = counts.completed + counts.failed == counts.total
        self._store.turn(batch.id, "finalizing")
        self._finish(batch.id, "completed" if is_whole else "expired")

    def _count(self, id_: str, answer: Answer) -> None:
        """In memory only: a restart counts the results' lines."""
        batch = self._store.batches[id_]
        counts, spent = batch.request_counts, spent_by(answer.body) if answer.is_good else Spent()
        more = {"completed": counts.completed + 1} if answer.is_good else {"failed": counts.failed + 1}
        self._store.batches[id_] = msgspec.structs.replace(
            batch,
            request_counts=msgspec.structs.replace(counts, **more),
            usage=(batch.usage or Usage()) + spent.usage,
            model=batch.model or spent.model,
        )

    def _finish(self, id_: str, status: Status) -> None:
        """The results become files, and the batch has ended. Their ids are kept first: a restart in between finds them."""
        batch, paths = self._store.batches[id_], self._store.results(id_)
        ids = batch.output_file_id, batch.error_file_id
        if ids == (None, None):
            output, error = (new_id("file") if path.is_file() and path.stat().st_size else None for path in paths)
            ids = output, error
            self._store.put(msgspec.structs.replace(batch, output_file_id=output, error_file_id=error))
        for path, name, file_id in zip(paths, ("output", "error"), ids):
            if file_id is None:
                path.unlink(missing_ok=True)
            else:
                self._store.add_file(path, f"{id_}_{name}.jsonl", "batch_output", file_id, batch.owner)
        self._store.turn(id_, status)


def _until(requests: Iterable[Request], expires_at: float) -> Iterator[Request]:
    """The requests that begin before the batch expires."""
    for request in requests:
        if time.time() >= expires_at:
            return
        yield request
