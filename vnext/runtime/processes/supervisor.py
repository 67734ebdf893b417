"""Supervisor: starts the engine core again, in the same run directory and at the same address, when its process has ended.

Owns a thread, the count of ends in a row without progress, and the wait before the next start. Clients keep the requests, and give
them to the next engine core themselves. An engine core that ends by its own decision is not started again, nor one that has ended
too often: then clients that ask for it get the reason. Where the settings want it, another one stands by (standby.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.runtime.processes.rank_processes import CORE, start_core
from vnext.runtime.processes.readable import readable
from vnext.runtime.processes.run_dir import LEAVE, PROGRESS, READY, REFUSAL, SUSPECT, CoreNotes
from vnext.runtime.processes.standby import STANDBY, Standby
from vnext.runtime.processes.subprocesses import Child, ChildDied, start_child, terminate_all
from vnext.runtime.protocol.settings import CoreSettings, Predecessor

WELL_S = 5.0
"""A process that has been ready for this long has made progress, even if nobody has asked it for anything."""
BACK_OFF_S, BACK_OFF_MAX_S = 0.1, 10.0
POLL_S, LEAVE_S = 0.5, 10.0
LAST_STATUSES = (DONE, FAILED, REFUSED)
log = logging.getLogger(__name__)


class Restarts:
    """How often a process has ended in a row without progress. Mutable."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def wait_s(self, has_progressed: bool) -> float | None:
        """The process has ended: how long to wait before it is started again, None if it has ended too often."""
        self.in_a_row = 1 if has_progressed else self.in_a_row + 1
        if self.in_a_row > self._limit:
            return None
        return min(BACK_OFF_MAX_S, BACK_OFF_S * 2 ** min(self.in_a_row - 2, 16)) if self.in_a_row > 1 else 0.0


class Supervisor:
    """Watches the engine core `child`, which was started with `core`; `new_log_dir` makes the folder of the next one's log. `child`
    and `core` are those of the present one, and `end` is why there will be none any more. `end_fd` becomes readable then."""

    def __init__(self, child: Child, core: CoreSettings, new_log_dir: Callable[[], str]) -> None:
        self.child, self.core = child, core
        self.end: ChildDied | None = None
        self._new_log_dir = new_log_dir
        self._wanted: CoreSettings | None = None
        self._before: CoreSettings | None = None  # until the one that replaces it is ready
        self.refusal = ""
        self._notes = CoreNotes(core.run_dir)
        self._restarts = Restarts(core.engine.max_restarts)
        self._standby = Standby(self._started_ahead)
        self._prepare()
        self.end_fd, self._end_writer = os.pipe()
        self._wake, self._waker = os.pipe()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self, grace_s: float) -> int:
        """End the engine core and watch no more; returns its return code. Idempotent."""
        if self._thread is not None:
            os.write(self._waker, b"!")
            self._thread.join()
            self._thread = None
            for fd in (self.end_fd, self._end_writer, self._wake, self._waker):
                os.close(fd)
        self._standby.close()
        return self.child.terminate(grace_s)

    def replace(self, core: CoreSettings) -> None:
        """End the engine core in order and start one with these settings in its place. If that one cannot start, one with the
        present settings is started again, and `refusal` says why."""
        self.refusal, self._wanted = "", core
        self._notes.erase(READY)
        self.child.process.send_signal(LEAVE)
        late = threading.Timer(LEAVE_S, self.child.process.kill)
        late.daemon = True
        late.start()

    @property
    def is_ready(self) -> bool:
        """Whether the present engine core has said that it is ready."""
        return self._wanted is None and self._notes.text(READY) is not None

    def _run(self) -> None:
        try:
            while self._has_ended():
                if (wait_s := self._next_wait_s()) is None:
                    break
                if readable((self._wake,), wait_s):
                    return
                self._start_next()
            else:
                return
        except Exception as error:  # no process, folder or memory to be had: those that wait must hear of it
            log.error("The engine core cannot be started again: %s", error)
        self._give_up()

    def _has_ended(self) -> bool:
        """Wait until the engine core has ended (True) or `stop` is called (False)."""
        watched = [fd for fd in (self._wake, self.child.exit_fd) if fd is not None]
        timeout_s = POLL_S if self.child.exit_fd is None else None
        while True:
            if self._wake in readable(watched, timeout_s):
                return False
            if self.child.process.poll() is not None:
                return True

    def _next_wait_s(self) -> float | None:
        """How long to wait before the next start; None if there is none."""
        notes = self._notes
        if self._wanted is not None:
            return 0.0
        if notes.text(READY) is not None:
            self._before = None
        if self._before is not None:
            self.refusal = notes.text(REFUSAL) or f"the {self.child.end_in_words}"
            self._wanted, self._before = self._before, None
            return 0.0
        has_progressed = notes.text(PROGRESS) is not None or notes.age_s(READY) > WELL_S
        if self.child.process.returncode in LAST_STATUSES:
            return None
        return self._restarts.wait_s(has_progressed)

    def _start_next(self) -> None:
        before, cause, blamed = self.core, self.child.end_in_words, self._notes.text(SUSPECT) or ""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            cause, blamed = "engine core was replaced by its operator", ""
            self._before = None if self.refusal else before
        log_dir = wanted.log_dir if wanted is not None and self.refusal else before.log_dir
        for name in (READY, PROGRESS, SUSPECT, REFUSAL):
            self._notes.erase(name)
        number = 0 if before.predecessor is None else before.predecessor.number + 1
        self.core = msgspec.structs.replace(
            wanted or before,
            log_dir=self._new_log_dir(),
            predecessor=Predecessor(cause=cause, log=log_dir, blamed=blamed, number=number, replaced=wanted is not None),
        )
        log.warning("The %s and is started again; its log is in %s", cause, log_dir or "no folder: it was off")
        Path(self.core.ranks_dir).mkdir(exist_ok=True)
        self.child.terminate(0.0)
        ahead = self._standby.take()
        if wanted is not None:  # settings that it does not have, and perhaps newer code
            terminate_all(ahead, grace_s=0.0)
            ahead = []
        self.child = ahead[0] if ahead else start_core(self.core.name, self.core.engine)
        self._prepare()
        try:
            self.child.send_config(msgspec.msgpack.encode(self.core))
        except ChildDied:
            pass  # killed already: the next look finds it

    def _prepare(self) -> None:
        if self.core.engine.is_held_ready:
            self._standby.prepare()

    def _started_ahead(self) -> list[Child]:
        """An engine core that imports, has its ranks import, and waits for the settings that it is to have."""
        child = start_child(self.core.name, CORE, (STANDBY,))
        try:
            child.send_config(msgspec.msgpack.encode(self.core))
        except ChildDied:
            return []
        return [child]

    def _give_up(self) -> None:
        """Tell why to the one who started the engine and, until `stop` is called, to clients that ask."""
        self._standby.close()
        try:
            self.child.check_alive()
        except ChildDied as error:
            self.end = error
        os.write(self._end_writer, b"!")
        if self.core.engine.max_restarts:
            where = f" The log that led to it is in {self.core.log_dir}." if self.core.log_dir else ""
            self._answer(f"The {self.child.end_in_words} and is not started again.{where}")

    def _answer(self, sentence: str) -> None:
        import zmq

        from vnext.runtime.protocol.messages import EngineDied, encoder

        with zmq.Context() as context, context.socket(zmq.ROUTER) as front:
            front.set(zmq.LINGER, 0)
            front.bind(self.core.address)
            poller = zmq.Poller()
            poller.register(front, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            while self._wake not in dict(poller.poll()):
                front.send_multipart((front.recv_multipart()[0], encoder.encode(EngineDied(message=sentence))))
