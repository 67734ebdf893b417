"""The master's end: it listens for the agents of the other hosts, and runs ranks of all hosts as one executor.

Owns the connections, which outlive a set of ranks, and one thread that accepts, reads, and watches them. A host that is silent is
lost, as a rank is that ends; a set of ranks begins when every host is there. Decides nothing else.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import zmq

from vnext.runtime.hosts.frames import (
    BEAT_S,
    SILENCE_S,
    AnyFrame,
    Beat,
    EndRanks,
    FromRank,
    HostHere,
    RanksEnded,
    RingMessage,
    StartRanks,
    decoder,
    encode,
)
from vnext.runtime.hosts.placer import Placer
from vnext.runtime.hosts.wire import Wire, WireBroken, WireRefused, connected, link_key, secret_of, shown
from vnext.runtime.processes.readable import readable
from vnext.runtime.processes.subprocesses import HostLost, RankStartFailed
from vnext.runtime.protocol.messages import RankFailed, RankMessage, RankReady, StepResult
from vnext.runtime.protocol.settings import EngineSettings, RankSettings, SettingsError

if TYPE_CHECKING:
    from vnext.runtime.hosts.frames import LocalRanks

STOP_GRACE_S = 5.0
NEW_SECRET_BYTES = 32
COMERS_MAX = 64  # connections that have not proved the secret; further ones are closed
rank_decoder = msgspec.msgpack.Decoder(RankMessage)
log = logging.getLogger(__name__)
BEAT = encode(Beat())


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Host:
    """The connection to one host's agent."""

    def __init__(self, node: int, address: str, wire: Wire) -> None:
        self.node, self.address, self.wire = node, address, wire
        self.heard_s = time.monotonic()


class MeetingPlace:
    """Where the ranks of one set meet. Mutable: known once all hosts are there. `store`: this host's address and a free port, which
    is held for rank 0 to listen at; `link_key`: what ranks prove to each other."""

    def __init__(self) -> None:
        self._addresses: Sequence[str] = ()
        self._held: socket.socket | None = None
        self.store, self.link_key = "", b""

    def choose(self, addresses: Sequence[str], secret: bytes) -> None:
        """These are the addresses of all hosts, this one's first, and what they all know. Raises OSError."""
        self._addresses = addresses
        self._held = socket.socket(_family(addresses[0]))
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as rank 0 does: of the two only it listens
        self._held.bind((addresses[0], 0))
        self.store = f"{addresses[0]}:{self._held.getsockname()[1]}"
        self.link_key = link_key(secret, self.store)

    def close(self) -> None:
        """Nobody meets here any more. Idempotent."""
        if self._held is not None:
            self._held.close()

    def address_of(self, node: int) -> str:
        """The address of a host, "" while it is not known."""
        return self._addresses[node] if self.store else ""


class Hosts:
    """The agents of the hosts 1 to `count`. One thread of its own; all methods are for the engine core's."""

    def __init__(self, address: str, port: int, count: int, secret_path: str, placer: Placer | None = None) -> None:
        """`open` follows. Port 0 is any free one; a secret of no file is a new one. `placer` starts the agents, None: others do."""
        self.address, self.port, self.count, self._secret_path = address, port, count, secret_path
        self._placer = placer
        self._listener: socket.socket | None = None
        self._present: dict[int, Host] = {}
        self._came: deque[tuple[Host, AnyFrame]] = deque()
        self.news_fd, self._news = os.pipe()  # readable when a frame has come or a host is lost
        os.set_blocking(self.news_fd, False)
        self._is_closed = False
        self._room = threading.BoundedSemaphore(COMERS_MAX)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def open(self) -> None:
        """Listen from now on, and have the agents started. Idempotent. Raises SettingsError, ChildDied, OSError."""
        if self._listener is None:
            self._listen()
        if self._placer is not None:
            self._placer.begin(self.port, self.secret)

    def _listen(self) -> None:
        self.secret = secret_of(self._secret_path) if self._secret_path else secrets.token_bytes(NEW_SECRET_BYTES)
        try:
            self._listener = socket.create_server((self.address, self.port), family=_family(self.address))
            self.port = int(self._listener.getsockname()[1])
        except OSError as error:
            raise SettingsError(
                f"master_addr is {self.address} and master_port {self.port}, where this host cannot listen ({error.strerror}): "
                "give an address of it and a free port"
            ) from error
        self._thread.start()

    def present(self) -> list[Host] | None:
        """All hosts in order; None while some are missing. Raises RankStartFailed or ChildDied if these cannot come."""
        if self.is_blind:
            raise RankStartFailed("the thread that watches the other hosts has ended, see the log: start the engine again")
        found = [host for _, host in sorted(self._present.items()) if host.wire.is_open]
        if len(found) == self.count:
            return found
        if self._placer is not None:
            self._placer.check()
        return None

    @property
    def is_blind(self) -> bool:
        """Whether the thread that watches the hosts has ended by a fault."""
        return self._listener is not None and not self._is_closed and not self._thread.is_alive()

    def came(self) -> list[tuple[Host, AnyFrame]]:
        """What has come since the last call."""
        with suppress(BlockingIOError):
            os.read(self.news_fd, 1 << 16)
        return [self._came.popleft() for _ in range(len(self._came))]

    def close(self) -> None:
        """End all connections. Idempotent."""
        if self._is_closed or self._listener is None:
            return
        self._is_closed = True
        self._thread.join(2 * BEAT_S)
        self._listener.close()
        for host in self._present.values():
            host.wire.close()
        os.close(self.news_fd)
        os.close(self._news)
        if self._placer is not None:
            self._placer.close()

    def _run(self) -> None:
        due_s = 0.0
        while not self._is_closed and (listener := self._listener) is not None:
            hosts = [each for each in list(self._present.values()) if each.wire.is_open]
            try:
                ready = readable((listener, *(host.wire for host in hosts)), BEAT_S / 4)
            except (ValueError, OSError):
                continue  # the engine core has closed one meanwhile
            if listener.fileno() in ready:
                self._accept()
            for host in hosts:
                self._look(host, host.wire.fileno() in ready)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + BEAT_S
                for host in hosts:
                    self._beat(host)

    def _accept(self) -> None:
        assert self._listener is not None, "it is listening"
        try:
            connection, peer = self._listener.accept()
        except OSError as error:  # it has left, or no descriptor is free: the hosts that are here stay
            log.warning("A host that comes cannot be taken in: %s.", error.strerror)
            time.sleep(BEAT_S / 4)
            return
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._meet, args=(connection, peer), name="a host that comes", daemon=True).start()
        else:
            connection.close()

    def _meet(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        try:
            self._take_in(connection, peer)
        finally:
            self._room.release()

    def _take_in(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        """Take a host that comes, in the place of a connection that it had before."""
        wire = None
        try:
            wire = connected(connection, self.secret, "master")
            here = self._first(wire)
        except (WireBroken, WireRefused, ValueError, RecursionError) as error:
            log.warning("A host at %s was turned away: %s.", peer[0], shown(str(error)))
            if wire is not None:
                wire.close()
            return
        if not 1 <= here.node <= self.count:
            log.warning("A host at %s says that it is node %d, and there are nodes 1 to %d.", peer[0], here.node, self.count)
            wire.close()
            return
        before, self._present[here.node] = self._present.get(here.node), Host(here.node, here.address, wire)
        if before is not None:
            before.wire.close()  # last: who sees it lost finds the new one
        self._tell()

    def _first(self, wire: Wire) -> HostHere:
        end_s = time.monotonic() + SILENCE_S
        while time.monotonic() < end_s:
            wire.wait(BEAT_S / 4)
            for payload in wire.receive():
                if isinstance(found := decoder.decode(payload), HostHere):
                    return found
        raise WireBroken("it did not say which host it is")

    def _look(self, host: Host, is_ready: bool) -> None:
        """Read what has come; end a connection that is silent, or carries what no agent sends."""
        try:
            frames = [decoder.decode(payload) for payload in host.wire.receive()] if is_ready else []
        except (WireBroken, ValueError, RecursionError) as error:
            log.warning("Host %d at %s is lost: %s.", host.node, host.address, shown(str(error)))
            host.wire.close()
        else:
            host.heard_s = time.monotonic() if frames else host.heard_s
            self._came.extend((host, frame) for frame in frames if not isinstance(frame, Beat))
            if time.monotonic() - host.heard_s > SILENCE_S:
                log.warning("Host %d at %s has been silent for %.0f s.", host.node, host.address, SILENCE_S)
                host.wire.close()
            elif all(isinstance(frame, Beat) for frame in frames):
                return
        self._tell()

    def _beat(self, host: Host) -> None:
        try:
            host.wire.send(BEAT, is_urgent=False)
        except WireBroken:
            self._tell()

    def _tell(self) -> None:
        os.write(self._news, b"!")


class HostedExecutor:
    """The ranks of this host, by `local`, and those of the others, as one executor (core/executor.py). `settings_of` as MpExecutor
    has it; it knows the `meeting`, which is chosen when all hosts are there."""

    def __init__(
        self,
        local: LocalRanks,
        hosts: Hosts,
        generation: int,
        meeting: MeetingPlace,
        engine: EngineSettings,
        settings_of: Callable[[int, str, str, str], RankSettings],
    ) -> None:
        self._local, self._hosts, self._generation, self._meeting = local, hosts, generation, meeting
        self._engine, self._settings_of = engine, settings_of
        self._mine: list[Host] = []  # connections over which this set of ranks was started
        self._ready: dict[int, RankReady] = {}
        self._own: tuple[RankReady, ...] | None = None
        self._came: list[RankMessage] = []
        self._answered: dict[int, int] = {}
        self._ended: dict[int, RanksEnded] = {}
        self._poller: zmq.Poller | None = None
        self._is_waiting_told = False
        self.while_full: Callable[[], None] = lambda: None

    def start(self) -> tuple[RankReady, ...]:
        self.begin()
        while (ready := self.started()) is None:
            readable((self._hosts.news_fd,), BEAT_S / 4)
        return ready

    def begin(self) -> None:
        """Every host begins when all are there. Raises SettingsError."""
        self._hosts.open()

    def started(self) -> tuple[RankReady, ...] | None:
        self._local.while_full = self.while_full
        if not self._mine and not self._begin():
            return None
        self._take()
        if self._own is None:
            self._own = self._local.started()
        for ended in self._ended.values():
            raise RankStartFailed(ended.why) if ended.refused else HostLost(ended.why)
        self._require_hosts()
        if self._own is None or len(self._ready) < len(self._own) * self._hosts.count:
            return None
        ready = (*self._own, *(self._ready[rank] for rank in sorted(self._ready)))
        for other in ready[1:]:
            if other.model_digest != ready[0].model_digest:
                raise RankStartFailed(
                    f"the model of rank {other.rank}, on another host, has the digest {other.model_digest} and that of this host "
                    f"{ready[0].model_digest}: give all hosts the same files"
                )
        return ready

    def _begin(self) -> bool:
        if (present := self._hosts.present()) is None:
            if not self._is_waiting_told:
                hosts = self._hosts
                log.warning("The engine waits for %d other host(s) at %s:%d.", hosts.count, hosts.address, hosts.port)
            self._is_waiting_told = True
            return False
        self._meeting.choose([present[0].wire.own_address, *(host.address for host in present)], self._hosts.secret)
        self._mine = present
        for host in present:
            self._send(host, encode(self._start_of(host.node)))
        self._local.begin()
        return True

    def _start_of(self, node: int) -> StartRanks:
        size = self._engine.local_world_size
        given = (self._settings_of(rank, "", "", "") for rank in range(node * size, (node + 1) * size))
        ranks = tuple(msgspec.structs.replace(each, link_key=b"") for each in given)  # agents make it themselves
        return StartRanks(generation=self._generation, engine=self._engine, ranks=ranks)

    def send(self, message: bytes) -> None:
        frame = encode(RingMessage(generation=self._generation, data=message))
        for host in self._mine:
            self._send(host, frame)
        self._local.send(message)

    def _send(self, host: Host, frame: bytes) -> None:
        try:
            host.wire.send(frame)
        except WireBroken as error:
            raise HostLost(f"host {host.node} at {host.address} is lost: {error}") from error

    def receive(self) -> list[RankMessage]:
        self._take()
        messages, self._came = [*self._local.receive(), *self._came], []
        return messages

    def _take(self) -> None:
        for host, frame in self._hosts.came():
            if host not in self._mine or getattr(frame, "generation", -1) != self._generation:
                continue  # of ranks that were given up
            if isinstance(frame, RanksEnded):
                self._ended[host.node] = frame
            elif isinstance(frame, FromRank):
                self._take_message(frame.data)

    def _take_message(self, data: bytes) -> None:
        try:
            message = rank_decoder.decode(data)
        except (ValueError, RecursionError) as error:
            log.warning("a message of another host's rank could not be read and was dropped: %s", shown(str(error)))
            return
        if isinstance(message, RankReady):
            self._ready[message.rank] = message
        elif isinstance(message, RankFailed) and self._own is None:
            raise RankStartFailed(message.message)
        else:
            self._came.append(message)
        if isinstance(message, StepResult):
            self._answered[message.rank] = message.step

    def watch(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._local.watch(poller)
        poller.register(self._hosts.news_fd, zmq.POLLIN)

    def check(self, ready: Collection[object] | None = None) -> None:
        self._local.check(ready)
        self._take()
        for node, ended in self._ended.items():
            raise HostLost(f"the ranks of host {node} have ended: {ended.why}")
        self._require_hosts()

    def _require_hosts(self) -> None:
        if self._hosts.is_blind:
            raise HostLost("the thread that watches the other hosts has ended, see the log")
        for host in self._mine:
            if not host.wire.is_open:
                raise HostLost(f"host {host.node} at {host.address} is lost: it has ended, or cannot be reached")

    def why_silent(self, step: int) -> str:
        silent = [f"rank {rank} on another host" for rank in self._ready if self._answered.get(rank, -1) < step]
        return f"{self._local.why_silent(step)}; {', '.join(silent) or 'no other host'} is behind"

    def stacks(self, step: int) -> dict[int, str]:
        return self._local.stacks(step)

    def kill(self) -> None:
        self._local.kill()
        self._end_others()

    def _end_others(self) -> None:
        """Ask the other hosts to end their ranks, once."""
        self._meeting.close()
        if self._poller is not None:
            self._poller.unregister(self._hosts.news_fd)
            self._poller = None
        for host in self._mine:
            with suppress(WireBroken):
                host.wire.send(encode(EndRanks(generation=self._generation)))
        self._mine = []

    @property
    def has_ended(self) -> bool:
        """Of hosts that are lost nothing is known; their agents end ranks by themselves."""
        return self._local.has_ended

    @property
    def has_results(self) -> bool:
        return bool(self._came) or self._local.has_results

    @property
    def stalls(self) -> tuple[int, float]:
        return self._local.stalls

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self._end_others()
        self._local.stop(grace_s)
