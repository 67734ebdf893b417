"""A rank takes its place: threads run where they are bound, pages of its cache lie on its nodes in turn, tokens stay the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vnext import LLM, SamplingParams
from vnext.kernels.cpu import native
from vnext.runtime.processes.launch import StartRefused
from vnext.runtime.processes.thread_plan import here

BOUND = """
import ctypes, os, platform, sys
from vnext.kernels.cpu import memory, native
from vnext.runtime.processes.thread_plan import Place
from vnext.runtime.rank.loading import bind, bind_members

first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
place = Place((first, last), ((first,), (last,), (first,)), (0,))
bind(place)
native.start(3, 0)
bind_members(place)
tasks = sorted(map(int, os.listdir("/proc/self/task")))[:1] + sorted(map(int, os.listdir("/proc/self/task")))[-2:]
assert [os.sched_getaffinity(task) for task in tasks] == [{first}, {last}, {first}], "a thread is not where it belongs"
assert not native.bind_member(3, (first,)) and not native.bind_member(0, (4000,))
pages, policy = memory.spread(memory.huge(4 << 20)), ctypes.c_int(-1)
call = {"x86_64": 239, "aarch64": 236}[platform.machine()]
asked = ctypes.CDLL(None).syscall(
    ctypes.c_long(call), ctypes.byref(policy), None, ctypes.c_long(0), ctypes.c_void_p(pages.ctypes.data + 4096), ctypes.c_long(2)
)
print(policy.value if asked == 0 else "refused")
"""


@pytest.mark.skipif(sys.platform != "linux" or not native.is_built(), reason="only Linux binds threads, and only the kernels' own")
def test_threads_and_pages_go_where_they_are_bound() -> None:
    """In a process of its own, which stays bound."""
    ran = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    if ran.stdout.strip() == "refused":
        pytest.skip("this system does not say where pages lie")
    assert ran.stdout.strip() == "3", "MPOL_INTERLEAVE"


def tokens(**settings: object) -> tuple[list[list[int]], str]:
    with LLM(dtype="float32", log="off", **settings) as llm:
        found = llm.generate(["One", "A page of " * 9], SamplingParams(max_tokens=9, temperature=0.0), use_tqdm=False)
        return [each.outputs[0].token_ids for each in found], llm.ready.environment["cores"]


def test_a_place_changes_no_token_and_is_named() -> None:
    node = here().node_ids[0]
    bound, cores = tokens(numa=str(node), threads=1)
    assert "bound to processor" in cores and cores.startswith(str(here()).partition(" (")[0])
    free, cores = tokens(numa="off", threads=1)
    assert bound == free and cores.endswith("bound to no core")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"threads": 4000}, r"threads is 4000, and this process may use \d+ core.*: more threads than processors .*; take --threads \d+"),
        ({"numa": "99"}, r"numa names node 99, and this machine has cores on node"),
        ({"numa": "all"}, r"numa is 'all': it must be auto, off or a list of nodes such as 0 or 0,2-3"),
    ],
)
def test_what_the_machine_has_not_gets_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(StartRefused, match=sentence):
        LLM(log="off", **settings)
