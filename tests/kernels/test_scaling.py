"""perf.scaling computes what it says: its numbers are those by which linear.cpp cuts a product, and its table follows its formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf import scaling
from perf.scaling import Assumed, Parts, decode_s, prompt_s

PARTS, FREE = Parts(read=(1e9, 2e9), product=(1e12, 2e12), shared_s=0.0), Assumed(memory=1e12, line_s=0.0)


def test_it_cuts_products_as_the_kernels_do(root: Path) -> None:
    source = (root / "vnext/kernels/cpu/src/linear/linear.cpp").read_text()
    assert re.search(r"UNIT_BYTES = 64 \* 1024;", source) and scaling.UNIT_BYTES == 64 * 1024
    assert f"UNITS_FEW = {scaling.UNITS_FEW}, UNITS_MANY = {scaling.UNITS_MANY};" in source


def test_more_threads_share_the_time_until_units_or_memory_end() -> None:
    weight, size = (4096, 4096), 4096 * 4096 * 2
    assert decode_s(weight, PARTS, FREE, 1) == pytest.approx(size / 1e9) and decode_s(weight, PARTS, FREE, 16) == pytest.approx(size / 16e9)
    assert decode_s((64, 4096), PARTS, FREE, 64) == pytest.approx(64 * 4096 * 2 / 2e9), "two panels"
    assert decode_s(weight, PARTS, FREE._replace(memory=4e9), 64) == pytest.approx(size / 4e9)
    assert prompt_s(weight, PARTS, FREE, 8) == pytest.approx(prompt_s(weight, PARTS, FREE, 1) / 8)
    assert prompt_s(weight, PARTS._replace(product=(1e12, 1.5e12)), FREE, 2) == pytest.approx(prompt_s(weight, PARTS, FREE, 2) / 0.75)


def test_each_further_thread_costs_two_lines() -> None:
    parts, assumed = PARTS._replace(shared_s=1e-6), FREE._replace(line_s=1e-7)
    found = [scaling.shared_s(parts, assumed, threads) for threads in (1, 2, 4)]
    assert found == pytest.approx([0.0, 1e-6, 1.4e-6])
    table = scaling.paper(parts, assumed)
    assert set(table) == set(scaling.SHAPES) and all(len(each["decode"]) == len(scaling.THREADS) for each in table.values())
