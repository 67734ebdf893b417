"""Bands: what torch computes in bands of rows is what it computes at once, its work is counted, and stops come at equal shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from vnext.models.hosted import stepping
from vnext.models.hosted.stepping import BENT, READ, SCORE, Bands, Stepped, Work, linear

X, Y, WEIGHT, BIAS = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((2, 50, 12), (2, 12, 30), (20, 12), (20,)))
HEADS, KEYS = X.unflatten(2, (3, 4)).transpose(1, 2), X[:, :40].unflatten(2, (3, 4)).transpose(1, 2)
MASK = torch.rand((2, 1, 50, 40), generator=torch.Generator().manual_seed(4)) > 0.3
IMAGES, LINE = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in ((2, 3, 8, 12), (20, 12, 3)))
PATCHES = torch.nn.Conv2d(3, 20, 4, 4).requires_grad_(False)
CASES: dict[str, tuple[Callable[[], torch.Tensor], Work, int]] = {
    "linear": (lambda: functional.linear(X, WEIGHT, BIAS), Work(100 * 240), 13),
    "operator": (lambda: X @ Y, Work(0, 50 * 2 * 12 * 30), 7),
    "method": (lambda: X.matmul(Y), Work(0, 50 * 2 * 12 * 30), 7),
    "batches": (lambda: torch.bmm(X, Y), Work(0, 50 * 2 * 12 * 30), 7),
    "vector": (lambda: X @ Y[0, :, 0], Work(), 0),
    "attention": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS), Work(0, 50 * 6 * 40 * (8 + SCORE)), 7),
    "masked": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS, attn_mask=MASK, scale=0.3), Work(0, 50 * 6 * 40 * (8 + SCORE)), 7),
    "one mask": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS, MASK[:, :, :1]), Work(0, 50 * 6 * 40 * (8 + SCORE)), 7),
    "causal": (lambda: functional.scaled_dot_product_attention(HEADS, KEYS, KEYS, is_causal=True), Work(), 0),
    "activation": (lambda: functional.gelu(X, approximate="tanh"), Work(100 * 12 * BENT), 7),
    "activation of one row": (lambda: functional.silu(X[0, 0]), Work(), 0),
    "in place": (lambda: functional.silu(X.clone(), inplace=True), Work(), 0),
    "patches": (lambda: PATCHES(IMAGES), Work(20 * 2 * 6 * 3 * 16), 3),
    "along a line": (lambda: functional.conv1d(Y, LINE, None, (2,), (1,), (1,), 1), Work(20 * 2 * 15 * 12 * 3), 3),
    "groups": (lambda: functional.conv1d(Y, LINE[:, :6], None, (1,), (1,), (1,), 2), Work(), 0),
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

    def noted(self: Bands, each: Callable[[slice], torch.Tensor], rows: int, work: Work, axis: int = -2) -> torch.Tensor:
        return cut(self, lambda band: each(band) if counted.append(band) is None else each(band), rows, work, axis)

    monkeypatch.setattr(Bands, "_cut", noted)
    with Bands() as bands:
        found = compute()
    assert found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert (bands.work, len(counted)) == (work, calls)
    with Bands(counts=True) as bands:
        found = compute()
    assert (found.shape, bands.work, len(counted)) == (expected.shape, work, calls + (calls > 0)), "one row tells"


def test_parts_are_of_equal_work_and_a_new_size_is_told_by_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, done = Stepped(), list[int]()

    def compute(rows: int) -> torch.Tensor:
        found = torch.ones(rows, 12)
        for at in range(10):
            done.append(at)
            found = functional.linear(found, WEIGHT)[:, :12]
        return found @ found.T

    stepped.whole(lambda: compute(16), 16)
    assert stepped._known[16] == Work(10 * 16 * 240, 16 * 12 * 16)
    monkeypatch.setattr(stepping, "READ", 0)
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


def of_tiles(count: int) -> torch.Tensor:
    """What some tiles of 16 rows become, of which each sees itself alone."""
    x = torch.ones(count, 16, 12)
    return functional.gelu(functional.linear(x @ x.mT @ x, WEIGHT))


def of_rows(count: int) -> torch.Tensor:
    """What as many rows become, which all see each other."""
    x = torch.ones(16 * count, 12)
    return functional.gelu(functional.linear(x @ x.mT @ x, WEIGHT))


@pytest.mark.parametrize("compute", [of_tiles, of_rows])
@pytest.mark.parametrize("count", [1, 6])
def test_a_part_is_no_larger_than_a_band_where_two_other_sizes_were_counted(compute: Callable[[int], torch.Tensor], count: int) -> None:
    stepped, done, add = Stepped(), [0], Bands._add
    for at in (3, 2):
        stepped.whole(lambda at=at: compute(at), at, counts=at == 2)
    expected = Stepped().whole(lambda: compute(count), count)

    def noted(self: Bands, rows: int, each: Work) -> None:
        add(self, rows, each)
        done.append(sum(self.work))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bands, "_add", noted)
        parts, seen = stepped.parts(lambda: compute(count), count), list[int]()
        with pytest.raises(StopIteration) as ended:
            while next(parts):
                seen.append(done[-1])
    whole, band = done[-1], max(b - a for a, b in zip(done, done[1:]))
    assert torch.equal(ended.value.value, expected) and whole == sum(stepped.work(count))
    assert len(seen) == 1 + READ * count // stepping.PART + whole // stepping.PART
    assert max(b - a for a, b in zip(seen, [*seen[1:], whole])) < stepping.PART + band


def test_what_was_read_is_several_parts() -> None:
    stepped = Stepped()
    stepped.whole(lambda: functional.linear(X, WEIGHT), 100)
    assert list(stepped.parts(lambda: functional.linear(X, WEIGHT), 100)) == (1 + READ * 100 // 2000 + 12) * [1 + READ * 100 // 2000 + 12]


def test_a_band_of_nothing() -> None:
    with Bands() as bands:
        assert functional.linear(X[:, :0], WEIGHT).shape == (2, 0, 20)
    assert bands.work == Work() and linear(bands._cut, X[:, :0], WEIGHT).shape == (2, 0, 20)
