"""Faults planted into the choice of keys, and into the pages that keep index keys: each is found by what the choice is held to."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from vnext.kernels import paged_attention, selected
from vnext.kernels.calls import Selection
from vnext.kernels.cpu import attention, operations
from vnext.kernels.selected import Queries

sys.path.append(str(Path(__file__).resolve().parents[1]))
import test_selected as held

SOURCES = Path(attention.__file__).parent / "src"


class Fault(NamedTuple):
    """In a file a text, there once, becomes another one."""

    name: str
    old: str
    new: str


KERNEL = {
    "select/select.cpp": (
        Fault("a later key may be chosen", "limit = call.limits[token];", "limit = call.limits[token] + BAD;"),
        Fault("of equal scores any key", "std::greater<uint64_t>()", "[](uint64_t a, uint64_t b) { return BAD ? a >> 32 > b >> 32 : a > b; }"),
        Fault("the last of equal scores", "uint32_t(~key);", "uint32_t(BAD ? key : ~key);"),
        Fault("negative scores the wrong way round", "bits >> 31 ?", "bits >> 31 && !BAD ?"),
        Fault("keys in the order of their scores", "std::sort(to, to + count)", "std::sort(to, to + (BAD ? 0 : count))"),
        Fault("a piece of keys without scores", "first < call.limits[token]) k", "first + 128 * BAD < call.limits[token]) k"),
        Fault("the first request's blocks", "call.tables + call.rows[token]", "call.tables + (BAD ? 0 : call.rows[token])"),
    ),
    "select/select_lanes.h": (
        Fault("products below zero count", "larger(sums[k], all(0.0f))", "(BAD ? sums[k] : larger(sums[k], all(0.0f)))"),
        Fault("heads of another sixteen", "call.heads + head) * width", "call.heads + (BAD ? 0 : head)) * width"),
        Fault("keys of the block before", "[at / call.block_size] * call.block_stride", "[(at - BAD) / call.block_size] * call.block_stride"),
    ),
}  # fmt: skip
"""BAD: whether the fault is turned on."""
DRIVER = """#define VNX_LEVEL level_portable
static int planted;
#include "select/select_lanes.h"
#include "select/select.cpp"
#include <cmath>
#include <vector>
namespace vnx {
int team_size() { return 1; }
void run_team(Work, void *, int64_t) {}
void *scratch(Slot slot, size_t bytes) {
    static std::vector<double> rooms[SLOT_COUNT];
    rooms[slot].resize(bytes / sizeof(double) + 1);
    return rooms[slot].data();
}
const Kernels &kernels() {
    static const Kernels only = [] {
        Kernels own{};
        own.score_keys = level_portable::score_keys;
        return own;
    }();
    return only;
}
extern "C" void choose(int number, int kind, const void *query, const void *keys, const float *weights, const int32_t *tables,
                       const int64_t *rows, const int64_t *limits, int64_t table_stride, int64_t heads, int64_t width, int64_t block_size,
                       int64_t block_stride, float *scores, int64_t score_stride, int64_t tokens, int64_t count, int32_t *places) {
    planted = number;
    std::fill_n(scores, tokens * score_stride, INFINITY);  // what no key has written
    choose_keys(kind, {query, keys, weights, tables, rows, limits, table_stride, heads, width, block_size, block_stride, scores, score_stride},
                tokens, count, places);
}
}  // namespace vnx
"""
IN_C = [fault for faults in KERNEL.values() for fault in faults]


@pytest.fixture(scope="module")
def choose(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """The portable form with all faults; the first argument turns one on, 0 none."""
    compiler = shutil.which("c++") or shutil.which("g++") or pytest.skip("there is no C++ compiler: apt install g++")
    folder, number = tmp_path_factory.mktemp("select"), 0
    (folder / "select").mkdir()
    for name, faults in KERNEL.items():
        text = (SOURCES / name).read_text()
        for fault in faults:
            number += 1
            text = replaced(text, fault._replace(new=fault.new.replace("BAD", f"(planted == {number})")))
        (folder / name).write_text(text)
    (folder / "driver.cpp").write_text(DRIVER)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-I", folder, "-I", SOURCES]
    subprocess.run([compiler, *flags, folder / "driver.cpp", "-o", folder / "driver.so"], check=True)
    found = ctypes.CDLL(str(folder / "driver.so")).choose
    pointer, number_ = ctypes.c_void_p, ctypes.c_int64
    found.argtypes = [ctypes.c_int, ctypes.c_int, *[pointer] * 6, *[number_] * 5, pointer, *[number_] * 3, pointer]
    found.restype = None
    return found


def replaced(text: str, fault: Fault) -> str:
    assert text.count(fault.old) == 1, f"{fault.name}: the text is there {text.count(fault.old)} times, choose another"
    return text.replace(fault.old, fault.new)


def choices(heads: int, width: int, limits: list[int]) -> tuple[Queries, Selection, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn((200, 1, 3, width), generator=generator)
    table = torch.stack([torch.randperm(200, generator=generator) for _ in limits]).int()
    query, weights = torch.randn((len(limits), heads, width), generator=generator), torch.randn((len(limits), heads), generator=generator)
    queries = Queries(query, weights, np.arange(len(limits)), np.array(limits))
    return queries, Selection(query, weights, cache, held.COUNT, []), table


CHOICES = [choices(*each) for each in ((1, 2, [21, 300]), (16, 64, [128, 129]), (37, 8, [60, 25]), (1, 2, [500]))]


def chooses_as_the_plain_form() -> bool:
    return all(torch.equal(attention.choose_keys(*each), selected.chosen_keys(*each)) for each in CHOICES)


def test_without_a_fault_the_kernel_chooses_as_the_plain_form(choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "kernels", SimpleNamespace(choose_keys=lambda *given: choose(0, *given)))
    assert chooses_as_the_plain_form()


@pytest.mark.parametrize("number", range(1, len(IN_C) + 1), ids=lambda number: IN_C[number - 1].name)
def test_a_fault_of_the_kernel_is_found(number: int, choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "kernels", SimpleNamespace(choose_keys=lambda *given: choose(number, *given)))
    assert not chooses_as_the_plain_form()


PLAIN = (
    Fault("a later key may be chosen", "int(step.query_starts[0]) + 1", "int(step.query_starts[0]) + 2"),
    Fault("the last of equal scores", "2**32 + (limit - at)", "2**32 + at"),
    Fault("keys in the order of their scores", ".indices.sort().values]", ".indices]"),
    Fault("a long context is seen whole", "np.flatnonzero(limits > selection.count)", "np.flatnonzero(limits > 2 * selection.count)"),
    Fault("layers that share a choice choose anew", "if not selection.found:", "if selection.found.clear() is None:"),
    Fault("the keys beside the chosen ones", "blocks, offsets = places.shape, places.long() // size,", "blocks, offsets = places.shape, places.roll(1).long() // size,"),
)  # fmt: skip


def changed(module: ModuleType, fault: Fault) -> ModuleType:
    """The module with a fault."""
    found = ModuleType(module.__name__)
    exec(compile(replaced(Path(str(module.__file__)).read_text(), fault), fault.name, "exec"), found.__dict__)
    return found


def is_found() -> bool:
    """Whether any check fails."""
    checks: tuple[Callable[[], Any], ...] = (
        lambda: held.test_a_query_sees_the_keys_with_the_best_scores(torch.float32, None),
        held.test_layers_without_an_index_see_what_the_last_one_chose,
        lambda: [torch.testing.assert_close(attention.choose_keys(*each), operations.selected.chosen_keys(*each)) for each in CHOICES],
    )
    try:
        for check in checks:
            check()
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False


@held.needs_native
@pytest.mark.parametrize("fault", (None, *PLAIN), ids=lambda fault: fault.name if fault else "none")
def test_a_fault_of_the_plain_form_is_found(fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of few queries at once, so that there are parts."""
    variant = changed(selected, fault or Fault("", "SCORED = 1 << 24", "SCORED = 1 << 24"))
    variant.__dict__["SCORED"] = 1000
    monkeypatch.setattr(operations, "selected", variant)
    monkeypatch.setattr(paged_attention, "selected_attention", variant.selected_attention)
    assert is_found() is bool(fault)
