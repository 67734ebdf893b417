"""Tests of sampled.py: a run takes some cases of each long file, chosen by the seed, and every case of other files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sampled

ITEMS = [SimpleNamespace(nodeid=name) for name in [
    *(f"tests/a/test_long.py::test_one[{case}]" for case in range(9)),
    "tests/a/test_long.py::test_other",
    *(f"tests/a/test_part.py::test_walk[{case}]" for case in range(3)),
    "tests/a/test_part.py::test_quick",
    "tests/a/test_short.py::test_all",
]]  # fmt: skip


def taken(seed: str) -> list[str]:
    chosen, left_out = sampled.sample(ITEMS, seed)
    assert sorted(map(id, chosen + left_out)) == sorted(map(id, ITEMS))
    assert chosen == [item for item in ITEMS if item in chosen], "the order is kept"
    return [item.nodeid for item in chosen]


def test_a_seed_takes_a_share_of_each_entry_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "SHARES", {"tests/a/test_long.py": 4, "tests/a/test_part.py": 2, "tests/a/test_part.py::test_walk": 8})
    samples = [taken(str(seed)) for seed in range(60)]
    for names in samples:
        assert sum("test_one" in name for name in names) in (2, 3), "of each function, so that none with enough cases is left out"
        assert sum("test_walk" in name for name in names) in (0, 1) and "tests/a/test_short.py::test_all" in names
    assert 20 < sum("tests/a/test_part.py::test_quick" in names for names in samples) < 40
    assert sum("test_long" in name for names in samples for name in names) == pytest.approx(60 * 10 / 4, abs=30)
    assert set().union(*samples) == {item.nodeid for item in ITEMS}, "every case has its turn"
    assert taken("7") == taken("7") != taken("8")


def test_functions_of_a_file_share_the_fixtures_of_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [SimpleNamespace(nodeid=f"tests/a/test_long.py::{name}[{case}]") for name in ("test_one", "test_two") for case in ("pipes", "sockets")]
    monkeypatch.setattr(sampled, "SHARES", {"tests/a/test_long.py": 2})
    samples = [[item.nodeid.partition("[")[2] for item in sampled.sample(cases, str(seed))[0]] for seed in range(60)]
    assert {tuple(names) for names in samples} == {("pipes]",) * 2, ("sockets]",) * 2}


def test_cases_with_ranks_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [SimpleNamespace(nodeid=f"tests/a/test_long.py::test_one[{case}-{kind}]") for kind in ("plain", "two ranks", "stages") for case in range(8)]
    others = [SimpleNamespace(nodeid=f"tests/a/test_other.py::test_all[{case}]") for case in ("ranks", "2-stages", "whole")]
    monkeypatch.setattr(sampled, "SHARES", {"tests/a/test_long.py": 2})
    samples = [[item.nodeid for item in sampled.sample([*cases, *others], str(seed))[0]] for seed in range(60)]
    for names in samples:
        assert sum("plain" in name for name in names) == 4 and sum("test_long" in name for name in names) - 4 in (2, 3)
        assert sum("test_other" in name for name in names) == 3, "only of what is sampled"
    assert len(set().union(*samples)) == 27, "every case has its turn"


def test_a_file_with_a_dear_fixture_is_taken_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "WHOLE", {"tests/a/test_part.py": 3})
    counts = [sum("test_part" in name for name in taken(str(seed))) for seed in range(60)]
    assert set(counts) == {0, 4} and counts.count(4) == pytest.approx(20, abs=10)


def test_the_table_names_what_is_there() -> None:
    for entry in sampled.SHARES | sampled.WHOLE:
        file, _, function = entry.partition("::")
        assert f"def {function}(" in (sampled.ROOT / file).read_text() if function else (sampled.ROOT / file).is_file(), entry
