"""Products with weights against formulas written another way; experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from vnext.kernels import references
from vnext.kernels.calls import Router
from vnext.kernels.table import choose

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias = draw(5, 12, dtype=dtype), draw(7, 12, dtype=dtype), draw(7, dtype=dtype) if biased else None
    found = choose("linear", "cpu")(x, choose("pack_weight", "cpu")(weight), bias)
    assert found.dtype == dtype
    close(found, x.double() @ weight.double().t() + (bias.double() if biased else 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear(dtype: torch.dtype, activation: str) -> None:
    x, weight, bias = draw(5, 12, dtype=dtype), draw(14, 12, dtype=dtype), draw(14, dtype=dtype)
    found = choose("gated_linear", "cpu")(x, choose("pack_weight", "cpu")(weight), bias, activation)
    gate, up = (x.double() @ weight.double().t() + bias.double()).chunk(2, -1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    assert found.dtype == dtype
    close(found, act * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 7, 12), (5, 40, 64)])
def test_each_head_has_its_own_product(dtype: torch.dtype, heads: int, outputs: int, inputs: int) -> None:
    """Of a part of each head, the bits of a product alone, for any number of rows."""
    x, weight = draw(70, heads, inputs + 9, dtype=dtype)[:, :, :inputs], draw(heads, outputs, inputs, dtype=dtype)
    packed = choose("pack_experts", "cpu")(weight, "")
    found = choose("head_products", "cpu")(x, packed)
    assert found.dtype == dtype
    close(found, torch.einsum("thi,hoi->tho", x.double(), weight.double()))
    alone = [choose("linear", "cpu")(x[:, head], packed[head], None) for head in range(heads)]
    assert torch.equal(found, torch.stack(alone, 1))
    assert choose("head_products", "cpu")(x[:0], packed).shape == (0, heads, outputs)
    if dtype is not torch.float16:  # of which torch's products make no such promise
        assert torch.equal(choose("head_products", "cpu")(x[3:4], packed), found[3:4])


def test_logits_are_float32() -> None:
    hidden, weight = draw(3, 12, dtype=torch.bfloat16), draw(9, 12, dtype=torch.bfloat16)
    found = choose("logits", "cpu")(hidden, choose("pack_weight", "cpu")(weight))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().t(), rtol=0.02, atol=0.02)


def test_routes_are_the_largest_shares() -> None:
    scores = draw(50, 8)
    whole = scores.double().softmax(-1).float()
    shares, ids = choose("route", "cpu")(scores, Router(3, False))
    expected = whole.topk(3, -1)
    assert torch.equal(ids, expected.indices) and torch.equal(shares, expected.values)
    normalised, same = choose("route", "cpu")(scores, Router(3, True))
    assert torch.equal(same, ids)
    torch.testing.assert_close(normalised, shares / shares.sum(-1, keepdim=True))


def test_of_equal_experts_the_lower_one_is_chosen() -> None:
    for tokens in (1, 5, 40):
        _, ids = choose("route", "cpu")(torch.zeros(tokens, 64), Router(4, True))
        assert ids.tolist() == [[0, 1, 2, 3]] * tokens


GROUPED = Router(3, True, marks="sigmoid", scale=2.5, groups=4, kept_groups=2)


def test_sigmoid_routes_are_those_of_a_loop_in_float64() -> None:
    """The bias moves the choice, in groups, and no share."""
    scores, bias = draw(50, 16), draw(16, seed=3) * 0.3
    shares, ids = choose("route", "cpu")(scores, GROUPED, bias)
    for token, row in enumerate(scores.double().sigmoid().tolist()):
        marks = [mark + float(extra) for mark, extra in zip(row, bias)]
        groups = sorted(range(4), key=lambda group: -sum(sorted(marks[4 * group : 4 * group + 4])[-2:]))[:2]
        best = sorted((expert for expert in range(16) if expert // 4 in groups), key=lambda expert: -marks[expert])[:3]
        assert ids[token].tolist() == best
        expected = [2.5 * row[expert] / sum(row[each] for each in best) for expert in best]
        assert shares[token].tolist() == pytest.approx(expected, rel=1e-5)


def test_routes_of_a_batch_are_those_of_each_token() -> None:
    scores, bias = draw(77, 16, dtype=torch.bfloat16), draw(16, seed=3)
    for router in (GROUPED, Router(3, True)):
        shares, ids = choose("route", "cpu")(scores, router, bias)
        alone = [choose("route", "cpu")(row[None], router, bias) for row in scores]
        assert torch.equal(shares, torch.cat([each for each, _ in alone])) and torch.equal(ids, torch.cat([each for _, each in alone]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_that_are_not_here_give_nothing(dtype: torch.dtype) -> None:
    """Ids behind the last one, of other ranks or of experts without weights: as if their shares were 0."""
    x, up, down = draw(30, 12, dtype=dtype), draw(6, 10, 12).to(dtype), draw(6, 12, 10).to(dtype)
    shares, ids = choose("route", "cpu")(draw(30, 9, seed=4), Router(3, True))
    pack, here = choose("pack_experts", "cpu"), ids < 6
    packs, experts = (pack(up, ""), pack(down, "")), choose("experts", "cpu")
    expected = experts(x, shares.where(here, shares * 0), ids.where(here, ids * 0), *packs, "relu2")
    assert here.any() and not here.all() and torch.equal(experts(x, shares, ids, *packs, "relu2"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_experts_without_gates(dtype: torch.dtype, tokens: int) -> None:
    """Kernels give what a loop gives, the reference's bits in float32, and ranks that have halves of them the same sum."""
    x, up, down = draw(tokens, 12, dtype=dtype), draw(6, 10, 12).to(dtype), draw(6, 12, 10).to(dtype)
    shares, ids = choose("route", "cpu")(draw(tokens, 6, seed=4), Router(3, True))
    pack, experts = choose("pack_experts", "cpu"), choose("experts", "cpu")
    found = experts(x, shares, ids, pack(up, ""), pack(down, ""), "relu2")
    expected = torch.zeros(tokens, 12, dtype=torch.float64)
    for token in range(tokens):
        for share, expert in zip(shares[token].tolist(), ids[token].tolist()):
            inner = (x[token].float() @ up[expert].float().t()).to(dtype).relu().square()
            expected[token] += share * (inner @ down[expert].t()).double()
    close(found, expected)
    halves = [(up[:, half].contiguous(), down[:, :, half].contiguous()) for half in (slice(0, 5), slice(5, 10))]
    given: list[torch.Tensor] = []
    for join in (lambda own: given.append(own) or own, lambda own: own + given[0]):
        both = experts(x, shares, ids, *(pack(part, "") for part in halves[len(given)]), "relu2", join)
    close(both, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_experts_equal_a_loop_over_tokens(dtype: torch.dtype, tokens: int) -> None:
    count, hidden, wide = 6, 12, 5
    x, gate_up, down = draw(tokens, hidden, dtype=dtype), draw(count, 2 * wide, hidden), draw(count, hidden, wide)
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    shares, ids = choose("route", "cpu")(draw(tokens, count, seed=4), Router(3, True))
    pack = choose("pack_experts", "cpu")
    found = choose("experts", "cpu")(x, shares, ids, pack(gate_up, "silu"), pack(down, ""), "silu")
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for share, expert in zip(shares[token].tolist(), ids[token].tolist()):
            inner = references.silu_and_mul(x[token : token + 1] @ gate_up[expert].t())
            expected[token] += share * (inner @ down[expert].t())[0].double()
    assert found.dtype == dtype and found.shape == (tokens, hidden)
    close(found, expected)
