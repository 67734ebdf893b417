"""The API servers of `vnext serve`: processes that accept from one socket, of which those that end are started again.

Owns the listening socket, which outlives each of them: a connection that waits to be accepted when one dies is another one's. It
listens from the moment at which the first of them is ready.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import msgspec

from vnext.base.exits import REFUSED
from vnext.commands.ready_lines import EVERYWHERE
from vnext.runtime.processes.readable import readable
from vnext.runtime.processes.subprocesses import Child, ChildDied, check_alive, start_child, terminate_all
from vnext.runtime.processes.supervisor import WELL_S, Restarts
from vnext.server.console import write_line
from vnext.server.settings import ServerSettings
from vnext.server.tls import is_tls_error, unverified_context

HEALTH_TIMEOUT_S = 5.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 "
"""A question and the beginning of the answer, without http.client, which takes ssl and 5 MB along."""
SOON_S = 0.5
GRACE_S = 5.0
"""Beyond the drain time: closing sockets and saying goodbye."""


class _Slot:
    """One API server, and after it the next one. `due_s`: when that is started, None while one runs. `number`: of the present one
    among all that the server has had."""

    def __init__(self, name: str, number: int, max_restarts: int) -> None:
        self.name, self.number = name, number
        self.restarts = Restarts(max_restarts)
        self.due_s: float | None = None
        self.began_s = 0.0
        self.child: Child | None = None

    @property
    def started(self) -> Child:
        assert self.child is not None, f"the {self.name} has not been started"
        return self.child


class ApiServers:
    """The processes. `begin` them, `configure` them once, and `look` at them now and then."""

    def __init__(self, listener: socket.socket, count: int, max_restarts: int) -> None:
        """Takes over the socket, which is bound and does not listen."""
        self._listener = listener
        names = [f"API server {number}" for number in range(count)] if count > 1 else ["API server"]
        self._slots = [_Slot(name, number, max_restarts) for number, name in enumerate(names)]
        self.settings = ServerSettings()

    @property
    def children(self) -> list[Child]:
        return [slot.child for slot in self._slots if slot.child is not None]

    @property
    def exit_fds(self) -> list[int]:
        """Each becomes readable when a process that runs has ended."""
        found = (slot.child.exit_fd for slot in self._slots if slot.child is not None and slot.due_s is None)
        return [fd for fd in found if fd is not None]

    def begin(self) -> None:
        """Start the processes, which import what they need."""
        for slot in self._slots:
            self._start(slot)

    def configure(self, settings: ServerSettings) -> None:
        """Hand over the settings. Raises ChildDied."""
        self.settings = msgspec.structs.replace(settings, listener=self._listener.fileno())
        for slot in self._slots:
            self._configure(slot)

    def look(self) -> None:
        """Start those again that have ended, each when its time has come. Raises ChildDied where that has no point."""
        for slot in self._slots:
            try:
                slot.started.check_alive()
            except ChildDied as error:
                self._ended(slot, error)

    def wait_s(self, longest_s: float) -> float:
        """How long to wait before `look` has something to do, at most `longest_s`."""
        due = [slot.due_s - time.monotonic() for slot in self._slots if slot.due_s is not None]
        return max(0.0, min(longest_s, *due, longest_s))

    def check_alive(self) -> None:
        """Raise ChildDied when one has ended."""
        check_alive(self.children)

    def is_healthy(self) -> bool:
        address = EVERYWHERE.get(self.settings.host, self.settings.host), self.settings.port
        try:
            connection = socket.create_connection(address, HEALTH_TIMEOUT_S)
            if self.settings.ssl_certfile:  # whose it is does not matter here: the server is this program's own
                connection = unverified_context().wrap_socket(connection)
            with connection:
                connection.sendall(HEALTH)
                return connection.recv(len(HEALTHY)) == HEALTHY
        except OSError as error:  # of TLS: it asks for a certificate, so it listens, which it does only once the engine is ready
            return bool(self.settings.ssl_certfile) and is_tls_error(error)

    def drain(self, wake: int) -> None:
        """End all of them: they accept nothing more and finish what runs, unless `wake` becomes readable."""
        self._listener.close()
        for child in self.children:
            child.process.terminate()
        began_s, is_said = time.monotonic(), False
        while (running := [child for child in self.children if child.wait(0) is None]) and (
            (passed_s := time.monotonic() - began_s) < self.settings.drain_s + GRACE_S
        ):
            if not is_said and passed_s >= SOON_S:
                write_line("vnext: finishing running requests; once more stops at once")
                is_said = True
            watched = [wake, *(child.exit_fd for child in running if child.exit_fd is not None)]
            if wake in readable(watched, SOON_S):
                break
        self.end()

    def end(self) -> None:
        """End all of them. Idempotent."""
        self._listener.close()
        terminate_all(self.children, GRACE_S)

    def _start(self, slot: _Slot) -> None:
        slot.child = start_child(slot.name, "vnext.server", descriptors=(self._listener.fileno(),))
        slot.due_s, slot.began_s = None, time.monotonic()

    def _configure(self, slot: _Slot) -> None:
        slot.started.send_config(msgspec.json.encode(msgspec.structs.replace(self.settings, number=slot.number)))

    def _ended(self, slot: _Slot, error: ChildDied) -> None:
        if slot.due_s is None:
            wait_s = slot.restarts.wait_s(time.monotonic() - slot.began_s > WELL_S)
            if wait_s is None or error.returncode == REFUSED:
                raise error
            slot.due_s = time.monotonic() + wait_s
        if time.monotonic() < slot.due_s:
            return
        write_line(f"vnext: the {slot.started.end_in_words} and is started again; its requests are lost")
        slot.started.terminate(0.0)
        slot.number += len(self._slots)
        self._start(slot)
        with suppress(ChildDied):  # the next look finds out
            self._configure(slot)
