"""Which cores an engine computes on, by recorded trees of /sys and /proc of real kinds of machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_trees import machine_tree

from vnext.runtime.processes import thread_plan
from vnext.runtime.processes.cpu_limits import allowed_cpus, cpu_quota, list_of, numbers_of
from vnext.runtime.processes.thread_plan import Place, Topology, chosen, here, places, threads_at_most, topology


def cpus(text: str) -> tuple[int, ...]:
    return numbers_of(text)


@pytest.mark.parametrize(
    ("name", "expected", "nodes", "words"),
    [
        ("xeon_2_sockets", "0-15", (0, 1), "16 cores on 2 NUMA nodes (not on 16 hyperthreads)"),
        ("epyc_nps4", "0-15", (0, 1, 2, 3), "16 cores on 4 NUMA nodes (not on 16 hyperthreads)"),
        ("hybrid_laptop", "0,2,4,6,8,10", (0,), "6 cores (not on 8 processors of slower cores and 6 hyperthreads)"),
        ("container_quota", "0-31", (0,), "1 core (not on 32 hyperthreads; the control group allows the time of 1.5 of 32 cores)"),
        ("pod_quota", "4-19", (0,), "6 cores (the control group allows the time of 6 of 16 cores)"),
        ("arm_big_little", "4-7", (0,), "4 cores (not on 4 processors of slower cores)"),
        ("compact_cores", "0-3", (0,), "4 cores (not on 16 processors of slower cores and 4 hyperthreads)"),
    ],
)
def test_the_cores_of_a_machine(tmp_path: Path, name: str, expected: str, nodes: tuple[int, ...], words: str) -> None:
    found = topology(machine_tree(name, tmp_path))
    assert (found.cpus, found.node_ids, str(found)) == (cpus(expected), nodes, words)


@pytest.mark.parametrize(
    ("name", "allowed", "expected", "words"),
    [
        ("xeon_2_sockets", "8-15,24-31", "8-15", "8 cores (not on 8 hyperthreads)"),
        ("xeon_2_sockets", "16-19", "16-19", "4 cores"),
        ("xeon_2_sockets", "0,7,16,24", "0,7,24", "3 cores on 2 NUMA nodes (not on 1 hyperthread)"),
        ("hybrid_laptop", "12-15", "12-15", "4 cores"),
        ("hybrid_laptop", "3,12-13", "3", "1 core (not on 2 processors of slower cores)"),
        ("arm_big_little", "0-3", "0-3", "4 cores"),
    ],
)
def test_an_affinity_mask_is_respected(tmp_path: Path, name: str, allowed: str, expected: str, words: str) -> None:
    """Second hyperthreads serve where the first ones are not allowed, slow cores where no other is."""
    found = topology(machine_tree(name, tmp_path, proc__self__status=f"Cpus_allowed_list:\t{allowed}"))
    assert (found.cpus, str(found)) == (cpus(expected), words)


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({}, 6.0),
        ({"sys__fs__cgroup__kubepods__pod7__app__cpu.max": "50000 100000"}, 0.5),
        ({"sys__fs__cgroup__kubepods__pod7__cpu.max": "max 100000"}, 32.0),
        ({"sys__fs__cgroup__kubepods__pod7__cpu.max": "nonsense", "sys__fs__cgroup__kubepods__cpu.max": ""}, 0.0),
        ({"proc__self__cgroup": "0::/"}, 0.0),
        ({"proc__self__mountinfo": "1 2 0:3 / /proc rw - proc proc rw"}, 0.0),
    ],
)
def test_the_least_limit_on_the_way_up_counts(tmp_path: Path, limits: dict[str, str], quota: float) -> None:
    assert cpu_quota(machine_tree("pod_quota", tmp_path, **limits)) == quota


def test_a_limit_of_version_1_and_none(tmp_path: Path) -> None:
    assert cpu_quota(machine_tree("container_quota", tmp_path)) == 1.5
    without = {"sys__fs__cgroup__cpu,cpuacct__cpu.cfs_quota_us": "-1"}
    assert cpu_quota(machine_tree("container_quota", tmp_path, **without)) == 0.0


def test_a_machine_that_says_nothing_has_its_processors(tmp_path: Path) -> None:
    found = topology(tmp_path)
    assert found.cpus == allowed_cpus(tmp_path) and found.node_ids == (0,) and not found.quota and found.cores >= 1


def test_lists_of_numbers() -> None:
    for text in ("", "0", "0-3", "0-3,8,10-11"):
        assert list_of(numbers_of(text)) == text
    with pytest.raises(ValueError):
        numbers_of("a-b")


def of(name: str, folder: Path) -> Topology:
    return topology(machine_tree(name, folder))


@pytest.mark.parametrize(
    ("name", "world_size", "threads", "bound"),
    [
        ("xeon_2_sockets", 2, 8, ["0-7", "8-15"]),
        ("xeon_2_sockets", 4, 4, ["0-3", "4-7", "8-11", "12-15"]),
        ("xeon_2_sockets", 3, 5, ["0-4", "5-9", "10-14"]),
        ("epyc_nps4", 4, 4, ["0-3", "4-7", "8-11", "12-15"]),
        ("epyc_nps4", 3, 4, ["0-3", "4-7", "8-15"]),
        ("hybrid_laptop", 1, 6, ["0,2,4,6,8,10"]),
        ("hybrid_laptop", 2, 3, ["0,2,4", "6,8,10"]),
        ("arm_big_little", 4, 1, ["", "", "", ""]),
        ("container_quota", 1, 1, [""]),
        ("pod_quota", 1, 6, [""]),
        ("pod_quota", 2, 3, ["", ""]),
    ],
)
def test_ranks_have_cores_of_their_own_on_as_few_nodes_as_can_be(
    tmp_path: Path, name: str, world_size: int, threads: int, bound: list[str]
) -> None:
    """Not where a limit leaves them less than the cores, nor where a rank would have a single one."""
    found = of(name, tmp_path)
    assert threads_at_most(found, world_size) == threads
    assert [each.cpus for each in places(found, world_size, threads, "auto")] == [cpus(each) for each in bound]
    assert not any(any(each) for each in places(found, world_size, threads, "off"))


def test_a_rank_on_several_nodes_has_threads_on_each_and_its_cache_on_all(tmp_path: Path) -> None:
    """Neighbouring threads on one node: they have neighbouring shares of each weight."""
    (place,) = places(of("epyc_nps4", tmp_path), 1, 16, "auto")
    assert place.cpus == cpus("0-15") and place.nodes == (0, 1, 2, 3)
    assert [list_of(each) for each in place.members] == ["0-3"] * 4 + ["4-7"] * 4 + ["8-11"] * 4 + ["12-15"] * 4
    assert str(place) == "bound to processors 0-15, threads and cache over nodes 0-3"


def test_an_engine_that_does_not_take_all_cores_is_not_bound_unless_asked(tmp_path: Path) -> None:
    found = of("xeon_2_sockets", tmp_path)
    assert places(found, 1, 15, "auto") == (Place(),) and str(Place()) == "bound to no core"
    assert places(found, 1, 3, "1") == (Place(cpus("8-15")),) and threads_at_most(chosen(found, "1"), 1) == 8
    assert places(found, 1, 4, "0-1")[0].members == (cpus("0-7"),) * 2 + (cpus("8-15"),) * 2
    assert [each.cpus for each in places(found, 2, 2, "0")] == [cpus("0-3"), cpus("4-7")]


def test_nodes_that_are_not_there_get_a_sentence(tmp_path: Path) -> None:
    found = of("xeon_2_sockets", tmp_path)
    for numa, sentence in (
        ("2", "numa names node 2, and this machine has cores on nodes 0-1: name some of those, or leave it out"),
        ("both", "numa is 'both': it must be auto, off or a list of nodes such as 0 or 0,2-3"),
        ("", "numa is '': it must be auto, off or a list of nodes such as 0 or 0,2-3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            chosen(found, numa)


@pytest.mark.parametrize(("name", "threads", "world_size"), [("container_quota", 1, 1), ("xeon_2_sockets", 16, 1), ("hybrid_laptop", 3, 2)])
def test_the_default_threads_and_what_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int, world_size: int
) -> None:
    found = of(name, tmp_path)
    monkeypatch.setattr(thread_plan, "here", lambda: found)
    monkeypatch.setattr(thread_plan, "kernels_are_built", lambda: True)
    assert thread_plan.default_threads(world_size) == threads
    assert thread_plan.why_not(None, world_size, "auto") == thread_plan.why_not(found.allowed, world_size, "off") == ""
    said = thread_plan.why_not(found.allowed + 1, world_size, "auto")
    assert said.startswith(f"threads is {found.allowed + 1}, and this process may use {found}: ") and f"--threads {threads}," in said
    assert str(found) in thread_plan.describe(world_size)["cores"]
    monkeypatch.setattr(thread_plan, "kernels_are_built", lambda: False)
    assert thread_plan.default_threads(world_size) == max(1, (found.cores - 1) // world_size)


def test_this_machine_can_be_read() -> None:
    assert 1 <= here().cores <= here().allowed
