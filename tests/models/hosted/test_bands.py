"""Bands: what torch computes in bands of rows is what it computes at once, its work is counted, and stops come at equal shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from vnext.models.hosted import stepping
from vnext.models.hosted.stepping import Bands, Stepped, Work, linear

X, Y, WEIGHT, BIAS = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((2, 50, 12), (2, 12, 30), (20, 12), (20,)))
HEADS, KEYS = X.unflatten(2, (3, 4)).transpose(1, 2), X[:, :40].unflatten(2, (3, 4)).transpose(1, 2)
MASK = torch.rand((2, 1, 50, 40), generator=torch.Generator().manual_seed(4)) > 0.3
CASES: dict[str, tuple[Callable[[], torch.Tensor], Work, int]] = {
    "linear": (lambda: functional.linear(X, WEIGHT, BIAS), Work(100 * 240), 13),
    "operator": (lambda: X @ Y, Work(0, 50 * 2 * 12 * 30), 7),
    "method": (lambda: X.matmul(Y), Work(0, 50 * 2 * 12 * 30), 7),
    "batches": (lambda: torch.bmm(X, Y), Work(0, 50 * 2 * 12 * 30), 7),
    "vector": (lambda: X @ Y[0, :, 0], Work(), 0),
    "attention": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS), Work(0, 50 * 6 * 40 * 8), 7),
    "masked": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS, attn_mask=MASK, scale=0.3), Work(0, 50 * 6 * 40 * 8), 7),
    "one mask": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS, MASK[:, :, :1]), Work(0, 50 * 6 * 40 * 8), 7),
    "causal": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS, is_causal=True), Work(), 0),
    "by name": (lambda: functional.linear(input=X, weight=WEIGHT), Work(), 0),
    "into another": (lambda: torch.matmul(X, Y, out=torch.empty(2, 50, 30)), Work(), 0),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "PART", 2000)
    monkeypatch.setattr(stepping, "ROWS", 8)


@pytest.mark.parametrize("name", CASES)
def test_bands_are_what_torch_computes_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, work, calls = CASES[name]
    expected, counted = compute(), list[slice]()
    cut = Bands._cut

    def noted(self: Bands, each: Callable[[slice], torch.Tensor], rows: int, work: Work) -> torch.Tensor:
        return cut(self, lambda band: each(band) if counted.append(band) is None else each(band), rows, work)

    monkeypatch.setattr(Bands, "_cut", noted)
    with Bands() as bands:
        found = compute()
    assert found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert (bands.work, len(counted)) == (work, calls)


def test_parts_are_of_equal_work_and_a_new_size_is_told_by_the_nearest_one() -> None:
    stepped, done = Stepped(), list[int]()

    def compute(rows: int) -> torch.Tensor:
        found = torch.ones(rows, 12)
        for at in range(10):
            done.append(at)
            found = functional.linear(found, WEIGHT)[:, :12]
        return found @ found.T

    stepped.whole(lambda: compute(16), 16)
    assert stepped._known[16] == Work(10 * 16 * 240, 16 * 12 * 16)
    for rows, parts in ((16, 1 + 20), (32, 1 + 44), (32, 1 + 44)):
        done.clear()
        found, counts, seen = stepped.parts(lambda rows=rows: compute(rows), rows), list[int](), list[int]()
        with pytest.raises(StopIteration) as ended:
            while True:
                counts.append(next(found))
                seen.append(len(done))
        assert set(counts) == {parts} and len(counts) == parts and seen[0] == 0 and seen[-1] == 10
        assert max(b - a for a, b in zip(seen, seen[1:])) == 1
        assert torch.equal(ended.value.value, Stepped().whole(lambda rows=rows: compute(rows), rows))
    assert next(Stepped().parts(lambda: compute(16), 16)) == 1, "one whose work nobody knows is one part"


def test_a_band_of_nothing() -> None:
    with Bands() as bands:
        assert functional.linear(X[:, :0], WEIGHT).shape == (2, 0, 20)
    assert bands.work == Work() and linear(bands._cut, X[:, :0], WEIGHT).shape == (2, 0, 20)
