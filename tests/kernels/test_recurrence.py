"""Recurrent operations: each level against float64 and the plain form, and the same bits for any cut, page, company and thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from cpu_levels import LEVELS, ROUNDING, draw, using, within

from vnext.kernels import recurrence as plain
from vnext.kernels.calls import ConvolutionCall, RecurrenceCall, StateRows
from vnext.kernels.contracts import ContractError
from vnext.kernels.cpu import recurrence as compiled
from vnext.kernels.table import choose

DTYPES = [torch.float32, torch.bfloat16]
TOKENS = 41
levels = pytest.mark.parametrize("level", LEVELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def rows(*counts: int, pages: Sequence[int] = (2, 0, 1), fresh: bool = True) -> StateRows:
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    return StateRows(starts, torch.tensor(pages[: len(counts)], dtype=torch.int32), torch.full((len(counts),), fresh))


class Operation(NamedTuple):
    """One of the two, with everything but rows and pool."""

    run: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    inputs: torch.Tensor
    call: Any
    pool: torch.Tensor

    def over(self, tokens: slice, rows: StateRows, pool: torch.Tensor, run: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """The result of some of the tokens."""
        found = {"rows": rows, "pool": pool}
        for name in ("steps", "strengths", "gates"):
            if getattr(self.call, name, None) is not None:
                found[name] = getattr(self.call, name)[tokens]
        return (run or self.run)(self.inputs[tokens], self.call._replace(**found))


NO_ROWS = rows()


def convolution(dtype: torch.dtype, width: int = 3, *, gated: bool = False, activation: str = "", bias: bool = False) -> Operation:
    channels = 300
    weight = draw(channels, width, dtype=dtype)
    pool = torch.full((4, width - 1, channels), float("nan"), dtype=dtype)
    call = ConvolutionCall(weight, draw(channels, dtype=dtype) if bias else None, pool, NO_ROWS, activation, gated)
    return Operation(compiled.short_convolution, plain.short_convolution, draw(TOKENS, channels * (3 if gated else 1), dtype=dtype), call, pool)


def recurrence(dtype: torch.dtype, is_delta: bool, keys: int = 24, width: int = 40, pace: str = "head", **own: Any) -> Operation:
    key_heads, heads = {"number": 1, "none": 6}.get(pace, 2), 6
    x = draw(TOKENS, 2 * key_heads * keys + heads * width, dtype=dtype)
    beside = draw(TOKENS, 2 * heads, dtype=dtype, seed=5)
    paces = heads * {"head": 1, "key": keys, "number": width, "none": 0}[pace]
    decay_logs = draw(heads, keys, width) if pace == "number" else draw(heads)
    call = RecurrenceCall(
        steps=beside[:, :heads] if pace == "head" else draw(TOKENS, paces, dtype=dtype, seed=6) if paces else None,
        strengths=beside[:, heads:] if is_delta else None,
        gates=draw(TOKENS, heads * width, dtype=dtype, seed=1),
        decay_logs=decay_logs * 0.5,
        step_bias=draw(paces, seed=3) if paces else None,
        norm=draw(width) if is_delta else None,
        skips=None if is_delta else draw(paces or heads, seed=4),
        eps=1e-6,
        key_heads=key_heads,
        pool=torch.full((4, heads, keys, width), float("nan")),
        rows=NO_ROWS,
        gate="sigmoid" if pace == "key" else "silu",
        by_head=pace == "none",
        activates=pace == "none",
        **own,
    )
    return Operation(compiled.recur, plain.recur, x, call, call.pool)


CASES = {
    "gated": lambda dtype: convolution(dtype, gated=True),
    "gated_bias_4": lambda dtype: convolution(dtype, 4, gated=True, bias=True),
    "silu_4": lambda dtype: convolution(dtype, 4, activation="silu"),
    "silu_bias_2": lambda dtype: convolution(dtype, 2, activation="silu", bias=True),
    "delta": lambda dtype: recurrence(dtype, True),
    "delta_wide": lambda dtype: recurrence(dtype, True, 33, 128),
    "mamba": lambda dtype: recurrence(dtype, False),
    "mamba_wide": lambda dtype: recurrence(dtype, False, 64, 48),
    "by_key": lambda dtype: recurrence(dtype, True, pace="key"),
    "by_key_wide": lambda dtype: recurrence(dtype, True, 33, 128, pace="key"),
    "bounded": lambda dtype: recurrence(dtype, True, pace="key", bound=-5.0),
    "bounded_by_head": lambda dtype: recurrence(dtype, True, bound=-3.0, strength_scale=2.0),
    "by_number": lambda dtype: recurrence(dtype, False, 16, 16, pace="number"),
    "by_number_odd": lambda dtype: recurrence(dtype, False, 5, 37, pace="number"),
    "without_steps": lambda dtype: recurrence(dtype, False, pace="none"),
}
cases = pytest.mark.parametrize("case", CASES)


def convolved(x: torch.Tensor, call: ConvolutionCall) -> torch.Tensor:
    """In float64, from the definition."""
    x = x.double()
    channels, width = call.weight.shape
    before, behind, given = x.split(channels, 1) if call.gated else (1.0, 1.0, x)
    padded = torch.cat((torch.zeros(width - 1, channels, dtype=torch.float64), before * given))
    found = torch.stack([(padded[t : t + width] * call.weight.double().t()).sum(0) for t in range(len(x))])
    found = found if call.bias is None else found + call.bias.double()
    return behind * (found * found.sigmoid() if call.activation else found)


def recurred(x: torch.Tensor, call: RecurrenceCall) -> torch.Tensor:
    """In float64, head by head, from the papers' formulas."""
    _, heads, keys, width = call.pool.shape
    x, shared, results = x.double(), call.key_heads * keys, []
    x = x * x.sigmoid() if call.activates else x
    for head in range(heads):
        at = head // (heads // call.key_heads) * keys
        if call.strengths is not None:
            q, k, v = x[:, at : at + keys], x[:, shared + at :][:, :keys], x[:, 2 * shared + head * width :][:, :width]
            q, k = (part / (part.square().sum(1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
            q = q / keys**0.5
        elif call.by_head:
            q, k, v = x[:, head * (2 * keys + width) :][:, : 2 * keys + width].split((keys, keys, width), 1)
        else:
            first = heads * width
            v, k, q = x[:, head * width :][:, :width], x[:, first + at :][:, :keys], x[:, first + shared + at :][:, :keys]
        time, by_key = torch.ones(TOKENS, 1, dtype=torch.float64), call.strengths is not None
        if call.steps is not None:
            own = slice(*(len(call.step_bias) // heads * each for each in (head, head + 1)))
            given = call.steps[:, own].double() + call.step_bias[own].double()
            time = given if call.bound else given.exp().log1p()
        state, outputs = torch.zeros(keys, width, dtype=torch.float64), []
        for t in range(len(x)):
            pace = call.decay_logs[head].double().exp() * (time[t][:, None] if by_key else time[t])
            state = state * (call.bound * pace.sigmoid() if call.bound else -pace).exp()
            if call.strengths is not None:
                change = call.strength_scale * call.strengths[t, head].double().sigmoid() * (v[t] - k[t] @ state)
            else:
                change = time[t] * v[t]
            state = state + torch.outer(k[t], change)
            outputs.append(q[t] @ state)
        y = torch.stack(outputs)
        if call.norm is not None:
            y = y / (y.square().mean(1, keepdim=True) + call.eps).sqrt() * call.norm.double()
        if call.skips is not None:
            y = y + call.skips.view(heads, -1)[head].double() * v
        results.append(y)
    y, gates = torch.cat(results, 1), call.gates.double()
    return y * gates.sigmoid() * (1 if call.gate == "sigmoid" else gates)


@cache
def truth(case: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the size that errors are measured by."""
    made = CASES[case](dtype)
    if not isinstance(made.call, ConvolutionCall):
        expected = recurred(made.inputs, made.call)
        return expected, expected.abs() + expected.abs().mean()
    bias = None if made.call.bias is None else made.call.bias.abs()
    alike = made.call._replace(weight=made.call.weight.abs(), bias=bias, activation="")
    return convolved(made.inputs, made.call), convolved(made.inputs.abs(), alike)


def check_truth(case: str, dtype: torch.dtype, run: Callable[..., torch.Tensor]) -> None:
    (expected, size), made = truth(case, dtype), CASES[case](dtype)
    found = made.over(slice(0, TOKENS), rows(TOKENS), made.pool, run)
    within(found, expected, (3.1 * ROUNDING[dtype] + 5e-5) * size)


@dtypes
@cases
def test_the_plain_form_is_near_float64(case: str, dtype: torch.dtype) -> None:
    check_truth(case, dtype, CASES[case](dtype).plain)


@levels
@dtypes
@cases
def test_each_level_is_near_float64(case: str, dtype: torch.dtype, level: Any) -> None:
    with using(level):
        check_truth(case, dtype, CASES[case](dtype).run)


@levels
@dtypes
@cases
def test_no_cut_no_page_no_company_and_no_thread_shows(case: str, dtype: torch.dtype, level: Any) -> None:
    made = CASES[case](dtype)
    pool = made.pool.clone()
    with using(level):
        whole = made.over(slice(0, TOKENS), rows(TOKENS), pool)
    for size in (1, 7, 20):
        other, found = made.pool.clone(), []
        with using(level, threads=2):
            for first in range(0, TOKENS, size):
                count = min(size, TOKENS - first)
                places = rows(count, pages=(3,), fresh=first == 0)
                found.append(made.over(slice(first, first + count), places, other))
        assert torch.equal(torch.cat(found), whole) and torch.equal(other[3], pool[2])
        assert other[:3].isnan().all(), "a page of no row was written to"
    other = made.pool.clone()
    with using(level, threads=2):
        beside = made.over(slice(0, TOKENS), rows(TOKENS - 11, 0, 11), other)
        assert torch.equal(beside[: TOKENS - 11], whole[: TOKENS - 11]) and other[0].isnan().all()
        alone = made.over(slice(TOKENS - 11, TOKENS), rows(11), made.pool.clone())
        assert torch.equal(beside[TOKENS - 11 :], alone)


@levels
@dtypes
@cases
@pytest.mark.parametrize(("form", "error"), [("plain", 1e-5), ("run", 0.0)])
def test_states_on_the_way_are_those_of_shorter_rows(case: str, dtype: torch.dtype, level: Any, form: str, error: float) -> None:
    """Each token's page has the state that a row has which ends there; no result and no state at an end differs."""
    made, counts, kept = CASES[case](dtype), (TOKENS - 11, 0, 11), {0: 4, 6: 7, 20: 5, TOKENS - 12: 6, TOKENS - 2: 9, TOKENS - 1: 8}
    run, trail = getattr(made, form), torch.full((TOKENS,), -1, dtype=torch.int32)
    for token, page in kept.items():
        trail[token] = page
    pool = made.pool.new_full((10, *made.pool.shape[1:]), float("nan"))
    expected = pool.clone()
    with using(level, threads=2):
        whole = made.over(slice(0, TOKENS), rows(*counts), expected, run)
        assert torch.equal(made.over(slice(0, TOKENS), rows(*counts)._replace(trail=trail), pool, run), whole)
        for token, page in kept.items():
            first = 0 if token < counts[0] else counts[0]
            made.over(slice(first, token + 1), rows(token + 1 - first, pages=(page,)), expected, run)
    torch.testing.assert_close(pool, expected, rtol=error, atol=error, equal_nan=True)
    assert pool[0].isnan().all() and pool[3].isnan().all(), "a page of no token was written to"


@cases
def test_the_table_serves_them(case: str) -> None:
    """By the kernels where they have the numbers, by the plain form where not."""
    for dtype in (*DTYPES, torch.float16):
        made = CASES[case](dtype)
        name = made.run.__name__
        served = made.plain if dtype is torch.float16 or not LEVELS else made.run
        expected = made.over(slice(0, TOKENS), rows(TOKENS), made.pool.clone(), served)
        assert torch.equal(made.over(slice(0, TOKENS), rows(TOKENS), made.pool.clone(), choose(name, "cpu")), expected)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("by_number", {"strengths": draw(TOKENS, 6)}, "a delta decays by heads or by keys, not by numbers"),
        ("by_number", {"steps": None, "step_bias": None}, "steps and their bias come together"),
        ("delta", {"step_bias": None}, "steps and their bias come together"),
        ("by_key", {"by_head": True}, "heads side by side have a key each"),
        ("mamba", {"bound": -5.0}, "decays with a bound are a delta's"),
        ("by_key", {"steps": draw(TOKENS, 7)}, "steps"),
        ("by_number", {"skips": draw(6)}, "skips"),
    ],
)
def test_what_no_rule_has_is_refused(case: str, changes: dict[str, Any], message: str) -> None:
    made = CASES[case](torch.float32)
    with pytest.raises(ContractError, match=message):
        plain.check_recur(made.inputs, made.call._replace(rows=rows(TOKENS), **changes))
