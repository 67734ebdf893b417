"""The compiled columns are the plain ones: equal on every call of seeded runs, in results and in every array they fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from vnext.sched.sim.scenario import scenario
from vnext.sched.sim.simulator import simulate
from vnext.state import columns, columns_numpy
from vnext.state.rows import FIELD_COUNT, FIELD_NAMES

compiled = columns._columns
NAMES = (
    "expected", "needed", "advance", "write_tables", "oldest", "unsealed", "seal_inputs", "seal_write", "settle",
    "take_tokens",
)  # fmt: skip
SEEDS = range(40)

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled columns are not built here: no C compiler was found")


def both(name: str, calls: Counter[str]) -> Callable[..., object]:
    """A function that calls the two forms on copies of its arguments, compares all they did, and does it for real."""

    def call(*given: object) -> object:
        calls[name] += 1
        copies = [[one.copy() if isinstance(one, np.ndarray) else one for one in given] for _ in range(2)]
        plain, fast = getattr(columns_numpy, name)(*copies[0]), getattr(compiled, name)(*copies[1])
        assert plain == fast, name
        count = filled(name, given, plain)
        for one, other in zip(*copies):
            if isinstance(one, np.ndarray):
                assert np.array_equal(one.reshape(-1)[:count], other.reshape(-1)[:count]), name
        return getattr(compiled, name)(*given)

    return call


def filled(name: str, given: tuple, result: object) -> int | None:
    """How much of the arrays a call has to fill; the rest is left as it came. None: all of it."""
    if name == "settle":
        return 0 if result is None else result[0]
    if name == "take_tokens" and result is False:
        return 0
    return result if name == "unsealed" else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(columns, "kernels", SimpleNamespace(**{name: both(name, counted) for name in NAMES}))
    yield counted


def test_the_two_forms_agree_on_every_call(calls: Counter[str]) -> None:
    for seed in SEEDS:
        simulate(scenario(seed, client_count=12))
    assert set(calls) == set(NAMES) and min(calls.values()) > 100


@pytest.mark.parametrize("form", [columns_numpy, compiled], ids=["numpy", "compiled"])
def test_either_form_serves_alone(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "kernels", form)
    assert len(simulate(scenario(3, client_count=12)).events) > 50


def test_the_layouts_are_one() -> None:
    assert compiled.LAYOUT.split() == list(FIELD_NAMES) and len(FIELD_NAMES) == FIELD_COUNT


def test_the_installed_form_is_the_compiled_one() -> None:
    assert columns.implementation() == "compiled" and columns.kernels is compiled


@pytest.mark.parametrize(
    "wrong",
    [
        lambda cells, short: compiled.expected(cells, short, 9, 0),
        lambda cells, short: compiled.needed(cells, short, short, 4),
        lambda cells, short: compiled.advance(cells, short, short, short),
        lambda cells, short: compiled.unsealed(cells, short, 4, short),
        lambda cells, short: compiled.oldest(np.zeros(2, dtype=np.int32), short, 0, 2, np.zeros(9, dtype=np.int32)),
        lambda cells, short: compiled.write_tables(cells, np.full(6, 5), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)),
        lambda cells, short: compiled.seal_inputs(cells, np.array([99]), short, short, 4),
        lambda cells, short: compiled.seal_inputs(cells, np.array([1]), short.astype(np.int32), short.astype(np.int32), 4),
        lambda cells, short: compiled.seal_write(cells, np.array([1, 2]), b"one key of two"),
        lambda cells, short: compiled.take_tokens(
            cells, cells.copy(), np.array([99]), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
        ),
    ],
)
def test_arrays_that_are_too_short_are_refused(wrong: Callable) -> None:
    """Memory outside an array is never touched, whatever a caller hands in."""
    with pytest.raises(ValueError):
        wrong(np.ones((FIELD_COUNT, 6), dtype=np.int64), np.zeros(2, dtype=np.int64))
