"""Links between stages on different hosts: a writer and its readers, as a ring has them, over connections that both sides prove.

A writer listens at its host's address and says where, at the store where the ranks of all hosts meet; readers connect. Messages
are frames of hosts/wire.py, which are authenticated and not encrypted. A writer blocks while a reader is behind, however long. The
end of either is noticed by the other, and a host that vanishes by the engine core, which ends all ranks.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress

from vnext.base.spelling import reason
from vnext.runtime.hosts.wire import Wire, WireBroken, WireRefused, connected
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.collectives.meeting import Words

MEETING_S = 300.0
COMERS_MAX = 16
"""Connections beside the readers that are still to come which may be without a proof at once."""
RETRY_S = 0.25
NOBODY_CAME = (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED)  # no descriptor is free, or the comer has left
log = logging.getLogger(__name__)


class HostLinks:
    """Makes one rank's ends. Holds the store, whose server is rank 0."""

    def __init__(self, settings: RankSettings) -> None:
        """Raises RankLost if the ranks do not meet."""
        from vnext.runtime.transport.collectives.gloo_group import store_of_hosts  # torch, which ranks of one host do without

        self._address, self._key = settings.host_address, settings.link_key
        self._words: Words = store_of_hosts(settings.store, settings.rank, settings.world_size)

    def writer(self, topic: str, reader_count: int) -> HostWriter:
        """A new link's writer, for so many readers. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, 0), family=family, backlog=reader_count)
        self._words.set(topic, f"{self._address} {listener.getsockname()[1]}")
        return HostWriter(listener, self._key, reader_count)

    def reader(self, topic: str) -> HostReader:
        """A reader of the link of this name, once there is one. Raises RankLost."""
        try:
            host, port = self._words.get(topic).decode().split(" ")
            connection = socket.create_connection((host, int(port)), timeout=MEETING_S)
            return HostReader(connected(connection, self._key, "host", MEETING_S, send_timeout_s=0.0))
        except (RuntimeError, OSError, WireBroken, WireRefused) as error:  # torch's DistNetworkError is a RuntimeError
            raise RankLost(f"the stage that makes {topic} cannot be reached ({reason(error).partition('. ')[0]})") from error


class HostWriter:
    """Takes over a socket that listens. One thread writes; another takes readers in meanwhile."""

    def __init__(self, listener: socket.socket, key: bytes, reader_count: int) -> None:
        self._listener, self._key, self._count = listener, key, reader_count
        self._readers: list[Wire] = []
        self._room = threading.BoundedSemaphore(reader_count + COMERS_MAX)
        self._thread = threading.Thread(target=self._take_in, name="readers that come", daemon=True)
        self._thread.start()

    def write(self, message: bytes) -> None:
        """Send a message to all readers, once they have come. Raises WireBroken."""
        self._thread.join()
        if len(self._readers) < self._count:
            raise WireBroken(f"not all of {self._count} ranks have come within {MEETING_S:.0f} s")
        for reader in self._readers:
            reader.send(message)

    def close(self) -> None:
        """Readers get what was sent, and WireBroken behind it. Idempotent."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for readers
        self._listener.close()
        for reader in self._readers:
            reader.close()

    def _take_in(self) -> None:
        end_s = time.monotonic() + MEETING_S
        while len(self._readers) < self._count and (left_s := end_s - time.monotonic()) > 0:
            try:
                self._listener.settimeout(left_s)
                connection, peer = self._listener.accept()
            except OSError as error:
                if error.errno in NOBODY_CAME:
                    time.sleep(RETRY_S)
                    continue
                break  # MEETING_S are over, all have come, or the rank has left
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection, peer[0]), name="a reader that comes", daemon=True).start()
            else:
                connection.close()
        self._listener.close()

    def _meet(self, connection: socket.socket, peer: str) -> None:
        """Take a reader in, beside others who may say nothing."""
        try:
            self._readers.append(connected(connection, self._key, "master", send_timeout_s=0.0))
        except (WireBroken, WireRefused) as error:
            log.warning("A connection from %s to a stage was turned away: %s.", peer, error)
        finally:
            self._room.release()
        if len(self._readers) == self._count:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)


class HostReader:
    """The other end of a writer's connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._came: deque[bytes] = deque()

    def read(self) -> bytes:
        """The next message; waits for it. Raises WireBroken."""
        while not self._came:
            self._wire.wait(MEETING_S)
            self._came.extend(self._wire.receive())
        return self._came.popleft()

    def close(self) -> None:
        """The writer gets WireBroken. Idempotent."""
        self._wire.close()
