"""The master's end and an agent, each against the other side by hand: who may come, who is lost, and what of whom counts."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_two_hosts import agent, secret  # noqa: F401  a fixture

from vnext.runtime.hosts import agent as agents, master as masters
from vnext.runtime.hosts.agent import Agent
from vnext.runtime.hosts.frames import EndRanks, FromRank, HostHere, RanksEnded, RingMessage, StartRanks, decoder, encode
from vnext.runtime.hosts.master import HostedExecutor, Hosts, MeetingPlace
from vnext.runtime.hosts.wire import Wire, connected
from vnext.runtime.processes.subprocesses import HostLost, RankStartFailed
from vnext.runtime.protocol.messages import ModelFacts, RankReady, StepResult, encoder
from vnext.runtime.protocol.settings import EngineSettings, RankSettings, SettingsError
from vnext.runtime.transport.collectives.gloo_group import store_of_hosts

WORD = b"a secret of both hosts"
READY = RankReady(
    model=ModelFacts(vocab_size=9, position_count_max=9, eos_token_ids=(), windows=(0,)), rank=0, page_count_max=9, block_bytes=9,
    model_digest="same", environment={},
)  # fmt: skip
RESULT = StepResult(rank=1, step=0, digest=0, token_digest=0, seconds=0.0)


def until(is_so: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + 60
    while not (found := is_so()):
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)
    return found


class LocalTwin:
    """The ranks of a host, by hand."""

    while_full, has_ended, has_results, stalls = staticmethod(lambda: None), True, False, (0, 0.0)

    def __init__(self, *made: Any) -> None:
        self.made, self.did, self.ready, self.came = made, [], None, []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words: self.did.append((name, *words))

    def started(self) -> Any:
        return self.ready

    def receive(self) -> list[Any]:
        came, self.came = self.came, []
        return came


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hands send no beats, and nobody knows how long a busy machine holds them."""
    for module in (masters, agents):
        monkeypatch.setattr(module, "SILENCE_S", 600.0)


@pytest.fixture
def hosts(secret: Path) -> Iterator[Hosts]:  # noqa: F811
    made = Hosts("127.0.0.2", 0, 1, str(secret))
    made.open()
    yield made
    made.close()
    made.close()


def come(hosts: Hosts) -> Wire:
    wire = connected(socket.create_connection((hosts.address, hosts.port)), WORD, "host")
    wire.send(encode(HostHere(node=1, address=wire.own_address)))
    until(hosts.present)
    return wire


def next_of(wire: Wire, kind: type) -> Any:
    found: list[Any] = []
    return until(lambda: found.extend(map(decoder.decode, wire.receive())) or next((each for each in found if isinstance(each, kind)), None))


def executor(hosts: Hosts, generation: int) -> tuple[HostedExecutor, LocalTwin]:
    local, meeting = LocalTwin(), MeetingPlace()
    return HostedExecutor(local, hosts, generation, meeting, EngineSettings(), settings_of), local


def settings_of(rank: int, ring: str, results_address: str, rendezvous: str) -> RankSettings:
    plain = dict(model_path="", dtype="auto", quantization="none", deterministic=None, device="cpu", threads=1, block_size=16)
    return RankSettings(
        rank=rank, world_size=2, ring=ring, results_address=results_address, rendezvous=rendezvous, kv_cache_bytes=0, **plain
    )


def test_ranks_begin_when_all_hosts_are_there_and_old_generations_count_no_more(hosts: Hosts) -> None:
    """A partition that heals: what an old set of ranks still sends, by the old connection or the new one, reaches nobody."""
    ranks, local = executor(hosts, 5)
    ranks.begin()
    assert ranks.started() is None and not local.did
    wire = come(hosts)
    assert ranks.started() is None and local.did == [("begin",)]
    assert next_of(wire, StartRanks).generation == 5
    local.ready = (READY,)
    for generation, digest in ((4, "other"), (5, "same")):
        wire.send(encode(FromRank(generation=generation, data=encoder.encode(replace(READY, rank=1, model_digest=digest)))))
    assert [each.rank for each in until(ranks.started)] == [0, 1]
    ranks.send(b"events")
    assert next_of(wire, RingMessage) == RingMessage(generation=5, data=b"events") and local.did[-1] == ("send", b"events")
    healed = come(hosts)
    with pytest.raises(HostLost, match="host 1 at 127.0.0.1 is lost"):
        until(lambda: ranks.check())
    later, _ = executor(hosts, 6)
    later.begin()
    assert later.started() is None and next_of(healed, StartRanks).generation == 6
    for generation in (5, 6):
        healed.send(encode(FromRank(generation=generation, data=encoder.encode(replace(RESULT, step=generation)))))
    assert [each.step for each in until(later.receive)] == [6]
    healed.send(encode(RanksEnded(generation=6, why="rank 1 was killed")))
    with pytest.raises(HostLost, match="the ranks of host 1 have ended: rank 1 was killed"):
        until(lambda: later.check())
    later.stop()
    assert next_of(healed, EndRanks).generation == 6
    for each in (wire, healed):
        each.close()


def test_a_host_with_other_model_files_is_refused(hosts: Hosts) -> None:
    ranks, local = executor(hosts, 0)
    ranks.begin()
    wire, local.ready = come(hosts), (READY,)
    ranks.started()
    wire.send(encode(FromRank(generation=0, data=encoder.encode(replace(READY, rank=1, model_digest="other")))))
    with pytest.raises(RankStartFailed, match="has the digest other and that of this host same: give all hosts the same files"):
        until(ranks.started)
    wire.close()


def test_nobody_takes_the_port_at_which_ranks_meet_before_they_listen() -> None:
    meeting = MeetingPlace()
    meeting.choose(["127.0.0.2", "127.0.0.1"], WORD)
    address, port = meeting.store.split(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):  # as whoever asks for any port
        other.bind((address, int(port)))
    store_of_hosts(meeting.store, 0, 1).set("word", "said")
    meeting.close()
    meeting.close()


def test_a_silent_host_is_lost(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = come(hosts)
    monkeypatch.setattr(masters, "SILENCE_S", 0.3)
    until(lambda: hosts.present() is None)
    wire.close()


def test_strangers_in_numbers_are_closed_and_a_host_comes_after_them(hosts: Hosts) -> None:
    strangers = [socket.create_connection((hosts.address, hosts.port), 20) for _ in range(masters.COMERS_MAX + 20)]
    assert strangers[-1].recv(1) == b"", "more than may be unproved at once"
    for stranger in strangers:
        stranger.close()
    until(lambda: hosts._room._value == masters.COMERS_MAX)
    come(hosts).close()
    assert not hosts.is_blind


def test_a_host_that_does_not_say_which_it_is_is_closed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "SILENCE_S", 0.2)
    wire = connected(socket.create_connection((hosts.address, hosts.port)), WORD, "host")
    wire._socket.settimeout(60)
    assert wire._socket.recv(1) == b""
    wire.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])
def test_a_failing_accept_loses_no_host(hosts: Hosts, number: int) -> None:
    real, failures = hosts._listener, [OSError(number, "no")] * 2

    class Full:
        fileno, close = real.fileno, real.close

        def accept(self) -> tuple[socket.socket, Any]:
            if failures:
                raise failures.pop()
            return real.accept()

    hosts._listener = Full()
    come(hosts)
    assert not failures and not hosts.is_blind


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_master_whose_thread_has_ended_says_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, (ranks, _) = come(hosts), executor(hosts, 1)
    monkeypatch.setattr(hosts, "_beat", lambda host: 1 / 0)
    until(lambda: hosts.is_blind)
    with pytest.raises(RankStartFailed, match="the thread that watches the other hosts has ended"):
        hosts.present()
    with pytest.raises(HostLost, match="the thread that watches the other hosts has ended"):
        ranks.check()
    wire.close()


def test_where_the_master_cannot_listen_is_one_sentence(hosts: Hosts, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="where this host cannot listen .*: give an address of it and a free port"):
        Hosts(hosts.address, hosts.port, 1, hosts._secret_path).open()
    with pytest.raises(SettingsError, match="cannot be read .*: give a file that all hosts have"):
        Hosts(hosts.address, 1, 1, str(tmp_path / "none")).open()
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(SettingsError, match="has 5 bytes: a secret has at least 16"):
        Hosts(hosts.address, 1, 1, str(tmp_path / "short")).open()


def test_an_agent_serves_one_master_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its ranks when the master is lost, and obeys no message of another generation."""
    monkeypatch.setattr(agents, "start_ranks", lambda engine, ranks: [f"rank {rank}" for rank in ranks])
    made: list[LocalTwin] = []
    served = Agent(1, "a model", tmp_path, lambda *words: made.append(LocalTwin(*words)) or made[-1])
    goes_on = threading.Event()
    with socket.create_server(("127.0.0.2", 0)) as listener:
        thread = threading.Thread(target=served.run, args=(listener.getsockname(), WORD, lambda: not goes_on.is_set()))
        thread.start()
        for turn in range(2):
            wire = connected(listener.accept()[0], WORD, "master")
            assert next_of(wire, HostHere) == HostHere(node=1, address="127.0.0.1")
            wire.send(encode(StartRanks(generation=turn, engine=EngineSettings(), ranks=())))
            until(lambda count=turn + 1: len(made) == count)
            ranks = made[turn]
            ranks.ready = (READY,)
            assert next_of(wire, FromRank).generation == turn
            for generation in (turn + 1, turn):
                wire.send(encode(RingMessage(generation=generation, data=b"%d" % generation)))
            ranks.came = [RESULT]
            assert next_of(wire, FromRank).data == encoder.encode(RESULT)
            until(lambda ranks=ranks: any(did[0] == "send" for did in ranks.did))
            assert [did[1] for did in ranks.did if did[0] == "send"] == [b"%d" % turn]
            wire.close()
            until(lambda ranks=ranks: ("stop", 0.0) in ranks.did)
        goes_on.set()
        listener.close()
        thread.join(60)
    assert not thread.is_alive()


def test_a_wrong_secret_ends_the_agent_with_one_sentence(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another secret of somebody else")
    with agent(tmp_path / "other", hosts.port) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and said.splitlines()[-1].endswith("give --cluster-secret-file the same contents on all hosts")
    assert hosts.present() is None
