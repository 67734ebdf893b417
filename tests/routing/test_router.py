"""The router: who is chosen when views are renewed, what counts, decisions that can be made again, their files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from core_drive import Engine, started_with
from msgspec.structs import replace

from vnext.log.codec import seal
from vnext.log.stream import EventStreams
from vnext.routing.decision_file import DecisionFile, files_of
from vnext.routing.decisions import (
    FORMAT_VERSION,
    NOBODY,
    Decision,
    Header,
    NoDecisions,
    decide_again,
    encode_decision,
    encode_header,
    read,
)
from vnext.routing.policies import Arriving, Candidate
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.state.events import pack_tokens

HEADER = Header(format_version=FORMAT_VERSION, code_version="0", policy="prefix", replicas=("a", "b"), started_ns=0)
PROMPT = Prompt(pack_tokens(list(range(1, 17))))


def router_of(count: int, exact: tuple[int, ...], record: list[Decision]) -> Router:
    """With fresh engines at the `exact` places, and no stream from the others."""
    router = Router(count, record=record.append, clock_us=lambda: 5)
    for place in exact:
        state = Engine().state
        router.views[place].feed(EventStreams(started_with(state.config), "0").begin("view", state))
    return router


def test_what_was_routed_weighs_in_the_next_decision() -> None:
    record: list[Decision] = []
    router = router_of(3, (0, 1, 2), record)
    others = [Prompt(pack_tokens([20 + number] * 9)) for number in range(6)]
    chosen = [router.choose(f"r{number}", prompt, [True] * 3) for number, prompt in enumerate(others)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [0, 1, 2]
    assert [each.arriving.sequence for each in record] == list(range(6)) and record[0].time_us == 5
    for number in (3, 4, 5):
        router.done(f"r{number}")
    assert router.choose("again", others[0], [True] * 3) == chosen[0], "its prefix is promised there"


def test_a_request_that_is_routed_again_counts_once() -> None:
    record: list[Decision] = []
    router = router_of(2, (0, 1), record)
    assert router.choose("r", PROMPT, [True, False]) == 0
    assert router.choose("r", PROMPT, [False, True]) == 1
    assert [view.candidate(PROMPT).waiting for view in router.views] == [0, 1]


def test_a_replica_without_a_view_waits_for_it_unless_all_do() -> None:
    record: list[Decision] = []
    router = router_of(2, (1,), record)
    assert [router.choose(f"r{number}", PROMPT, [True, True]) for number in range(3)] == [1, 1, 1]
    assert router.choose("r3", PROMPT, [True, False]) == 0, "blindly, rather than not at all"
    assert router.choose("r4", PROMPT, [False, False]) is None
    blind = router_of(2, (), record)
    assert [blind.choose(f"r{number}", PROMPT, [True, True]) for number in range(4)] == [0, 1, 0, 1]


def test_every_decision_can_be_made_again_from_its_record() -> None:
    record: list[Decision] = []
    router = router_of(3, (0, 2), record)
    for number in range(8):
        router.choose(f"r{number}", Prompt(pack_tokens([number % 3 + 1] * 9)), [number % 2 == 0, number != 5, number > 6], key=b"user 7")
    again = read(encode_header(HEADER) + b"".join(map(encode_decision, record)))
    assert again.header == HEADER and again.decisions == record and not again.ended
    assert [decide_again("prefix", each) for each in again.decisions] == [each.chosen for each in record]
    assert NOBODY in [each.chosen for each in record] and b"user 7" not in record[0].arriving.key


def test_decisions_of_format_1_weigh_a_hit_as_a_token_of_wait() -> None:
    """They have no weight."""
    header = encode_header(replace(HEADER, format_version=1))
    known = [[0, 0, 0, 0, 9, 9, True], [100, 150, 0, 0, 9, 9, True]]
    old = seal(msgspec.msgpack.encode([[200, b"", 0], known, 0, 7, [1, 1]]))
    [one] = read(header + old).decisions
    assert one.arriving.hit_weight == 1 and decide_again("prefix", one) == 0
    assert decide_again("prefix", replace(one, arriving=replace(one.arriving, hit_weight=2.0))) == 1
    with pytest.raises(NoDecisions, match="format 3 of decisions is newer than 2"):
        read(encode_header(replace(HEADER, format_version=FORMAT_VERSION + 1)))


def test_damaged_decisions_end_where_they_are() -> None:
    candidate = Candidate(hit_tokens=1, waiting_tokens=2, running=3, waiting=4, free_pages=5, page_count=6)
    one = Decision(arriving=Arriving(tokens=1, key=b"", sequence=0), candidates=(candidate,), chosen=0, time_us=0)
    data = encode_header(HEADER) + encode_decision(one) * 3
    assert "ends inside a record behind decision 2" in read(data[:-1]).ended
    assert "wrong checksum behind decision 2" in read(data[:-1] + b"\xff").ended
    assert len(read(data + bytes(3)).decisions) == 3
    with pytest.raises(NoDecisions, match="no file of a router's decisions"):
        read(b"vnextLOG")
    with pytest.raises(NoDecisions, match="damaged or cut short"):
        read(encode_header(HEADER)[:-1])


def test_files_are_bounded_and_each_can_be_read(tmp_path: Path) -> None:
    candidate = Candidate(hit_tokens=1, waiting_tokens=2, running=3, waiting=4, free_pages=5, page_count=6)
    file = DecisionFile(tmp_path, HEADER, "3", file_bytes_max=400, files_max=3)
    for sequence in range(60):
        file.write(Decision(arriving=Arriving(tokens=1, key=b"", sequence=sequence), candidates=(candidate,), chosen=0, time_us=0))
    file.close()
    found = [read(path.read_bytes()) for path in files_of(tmp_path)]
    assert len(found) == 3 and not any(each.ended for each in found)
    sequences = [each.arriving.sequence for part in found for each in part.decisions]
    assert sequences == list(range(sequences[0], 60)) and sequences[0] > 0
    assert [part.header.index for part in found] == list(range(found[0].header.index, found[0].header.index + 3))


def test_a_disk_that_is_full_costs_decisions_and_nothing_else(tmp_path: Path) -> None:
    file = DecisionFile(tmp_path, HEADER)
    real, file._fd = file._fd, -5
    one = Decision(arriving=Arriving(tokens=1, key=b"", sequence=0), candidates=(), chosen=NOBODY, time_us=0)
    file.write(one)
    file._fd = real
    file.write(one)
    file.close()
    assert file.lost == 1 and file.failure and len(read(files_of(tmp_path)[0].read_bytes()).decisions) == 1
