"""The links between a pipeline's stages: who has which stage, whole messages in order, and ends that are noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.run.ports import held_port
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.stage_links import StageLinks, StagePlace, stage_place
from vnext.runtime.transport.collectives.errors import RankLost


def settings(rank: int, world_size: int, stages: int, meeting: Path | str = "") -> RankSettings:
    plain = dict(ring="", results_address="", model_path="", dtype="auto", quantization="none", deterministic=None, device="cpu")
    sizes = dict(threads=1, block_size=16, kv_cache_bytes=0, world_size=world_size, pipeline_parallel_size=stages)
    return RankSettings(rank=rank, rendezvous=str(meeting), **plain, **sizes)


def linked(folder: Path, world_size: int, stages: int) -> list[StageLinks]:
    """All ranks' links."""
    return joined([settings(rank, world_size, stages, folder / "meeting") for rank in range(world_size)])


def joined(ranks: list[RankSettings]) -> list[StageLinks]:
    """The links of ranks that meet as threads."""
    made: dict[int, StageLinks] = {}
    threads = [threading.Thread(target=lambda each: made.update({each.rank: StageLinks(each)}), args=(each,)) for each in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return [made[each.rank] for each in ranks]


def test_rank_0_is_of_the_last_stage() -> None:
    places = [stage_place(settings(rank, 6, 3)) for rank in range(6)]
    assert places == [StagePlace(stage, rank, 2) for stage in (2, 1, 0) for rank in (0, 1)]


def test_states_go_to_the_stage_behind_and_tokens_to_all_before(tmp_path: Path) -> None:
    """Three stages of two ranks: several steps ahead, each rank to the one of its own number."""
    links = linked(tmp_path, 6, 3)
    steps = [np.arange(size, dtype=np.float32) for size in (3, 1, 900_000)]
    for rank in (4, 5, 2, 3):
        thread = threading.Thread(target=lambda send, number: [send(each + number) for each in steps], args=(links[rank].send_states, rank))
        thread.start()
        for each in steps:  # the last one is sent in parts, as there is room
            assert np.array_equal(np.frombuffer(links[rank - 2].states(), np.float32), each + rank)
        thread.join(60)
    links[1].send_tokens(np.array([9, 9]))  # which is not rank 0, and has nobody to tell
    for tokens in ([5, 2**31 - 1], [], [7]):
        links[0].send_tokens(np.array(tokens, dtype=np.int64))
    for rank in range(2, 6):
        assert [links[rank].tokens().tolist() for _ in range(3)] == [[5, 2**31 - 1], [], [7]]
    for each in links:
        each.close()
        each.close()


def on_hosts(folder: Path, world_size: int, stages: int, keys: dict[int, bytes] = {}) -> list[RankSettings]:  # noqa: B006
    """Of two hosts, each with a folder and an address of its own."""
    store, here = f"127.0.0.1:{held_port()}", world_size // 2
    found = []
    for rank in range(world_size):
        host = rank // here
        (folder / str(host)).mkdir(exist_ok=True)
        plain = settings(rank, world_size, stages, folder / str(host) / "meeting")
        more = {"store": store, "host_address": f"127.0.0.{1 + host}", "link_key": keys.get(rank, b"key")}
        found.append(replace(plain, nnodes=2, **more))
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), (4, 2), (4, 4)])
def test_stages_of_two_hosts_are_linked_as_those_of_one(tmp_path: Path, world_size: int, stages: int) -> None:
    """States of many megabytes pass, several steps ahead; whoever connects without the key changes nothing."""
    links, size = joined(on_hosts(tmp_path, world_size, stages)), world_size // stages
    steps = [np.arange(count, dtype=np.float32) for count in (3, 1, 4_000_000)]
    for rank in range(size, world_size):
        thread = threading.Thread(target=lambda at: [links[at].send_states(each + at) for each in steps], args=(rank,))
        thread.start()
        for each in steps:
            assert np.array_equal(np.frombuffer(links[rank - size].states(), np.float32), each + rank)
        thread.join(60)
    for tokens in ([5, 2**31 - 1], [], [7]):
        links[0].send_tokens(np.array(tokens, dtype=np.int64))
    for rank in range(size, world_size):
        assert [links[rank].tokens().tolist() for _ in range(3)] == [[5, 2**31 - 1], [], [7]]
    links[-1].close()
    with pytest.raises(RankLost, match="has ended or left the pipeline"):
        links[-1 - size].states()
    for each in links:
        each.close()
        each.close()


def test_a_rank_without_the_key_is_turned_away(tmp_path: Path) -> None:
    first, last = on_hosts(tmp_path, 2, 2, {1: b"another key"})
    made = {}
    thread = threading.Thread(target=lambda: made.update(last=pytest.raises(RankLost, StageLinks, last)))
    thread.start()
    with pytest.raises(RankLost, match="the two hosts have different secrets") as refused:  # holds the store, where the other asks
        StageLinks(first)
    thread.join(60)
    del refused
    assert "the two hosts have different secrets" in str(made["last"].value)


def test_a_rank_that_waits_for_one_that_has_left_is_told(tmp_path: Path) -> None:
    last, first = linked(tmp_path, 2, 2)
    first.send_states(np.ones(4, np.float32))
    first.close()
    assert len(last.states()) == 16  # what was sent before still arrives
    with pytest.raises(RankLost, match="has ended or left the pipeline"):
        last.states()
    last.close()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_stage_links import StageLinks, settings
links = StageLinks(settings(1, 2, 2, Path(sys.argv[2])))
links.tokens()
"""


def test_a_killed_stage_is_noticed(tmp_path: Path) -> None:
    """By the one that waits for its states, and by the one that has no room left for its tokens."""
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path / "meeting")]
    with subprocess.Popen(command, env={**os.environ}) as child:
        last = StageLinks(settings(0, 2, 2, tmp_path / "meeting"))
        threading.Timer(0.2, child.send_signal, (signal.SIGKILL,)).start()
        with pytest.raises(RankLost, match="has ended or left the pipeline"):
            last.states()
    with pytest.raises(RankLost):
        for _ in range(4):
            last.send_tokens(np.zeros(2**19, np.int64))
    last.close()
